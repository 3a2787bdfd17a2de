"""A split GPT's step as it is and compiled."""
