"""The benchmark behind ``axonn bench tp``."""
