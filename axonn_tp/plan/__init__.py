"""What each layer of a model becomes, by rules, and whether that computes the same."""
