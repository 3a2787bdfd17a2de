"""A GPT dense and 90 % pruned: 000, Figure 4.4."""
