"""Benchmarks of today's mixtures of experts."""
