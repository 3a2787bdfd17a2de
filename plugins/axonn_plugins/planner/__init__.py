"""Which configuration to run, why, and how sure we are: models of machines, transformers and parallel training (000 §5.1.2, 004)."""
