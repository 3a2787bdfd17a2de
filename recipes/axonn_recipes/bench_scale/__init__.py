"""Thousands of ranks without the machine: what a rank does at start, measured with a stand-in for all others."""
