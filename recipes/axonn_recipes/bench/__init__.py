"""What all benchmarks share: sides that take turns, medians with quartiles, the table and what is written."""
