"""Benchmarks of sequences that ranks share."""
