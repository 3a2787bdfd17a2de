"""The benchmark behind ``axonn bench megatron``."""
