"""Plans: the place of each layer in the parallel model, by rules, and a check that it computes the same."""
