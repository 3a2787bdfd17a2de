"""Weights of models in the formats of hosts: read without being held, renamed, and written a tensor at a time."""
