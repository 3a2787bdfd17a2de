"""Pipelines beside one another on emulated clusters."""
