"""The benchmark behind ``axonn bench pccl``."""
