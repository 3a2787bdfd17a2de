"""Collectives along axes of a mesh, weights gathered ahead of time, and sums of gradients."""
