"""LitGPT's command line with the strategy."""
