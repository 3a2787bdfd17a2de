"""The benchmark behind ``axonn bench samo``."""
