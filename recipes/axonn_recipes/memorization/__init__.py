"""Memorization by language models of several sizes, and the goldfish loss against it: 002, section VIII."""
