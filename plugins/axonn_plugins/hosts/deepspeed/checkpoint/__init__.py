"""Checkpoints under DeepSpeed: complete or absent, and readable on another grid."""
