"""The common part of all benchmarks: sides that take turns, medians with quartiles, the table and the files."""
