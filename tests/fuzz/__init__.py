"""Random models on random grids against the serial model: ``python -m tests.fuzz --seed 0 --cases 2000``."""
