"""TED (tensor × expert × data parallel MoE), not implemented yet: it will follow chapter 7 of the dissertation."""
