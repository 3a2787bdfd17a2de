"""Experiments one can run."""
