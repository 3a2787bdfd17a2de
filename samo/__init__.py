"""SAMO (compressed state of pruned networks), not implemented yet: it will follow chapter 4 of the dissertation."""
