"""Benchmarks of TED."""
