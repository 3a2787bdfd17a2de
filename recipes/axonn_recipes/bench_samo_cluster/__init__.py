"""Batch times of dense data parallelism and of SAMO on an emulated cluster."""
