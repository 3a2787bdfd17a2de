"""Optimizers that look at whole matrices, where ranks hold parts of them: Muon, and any that treats each parameter by itself.

`spread`: which rank holds what of a matrix; `exchange`: how it travels to where it is wanted whole, and back; `plan`: what that costs, and who
does it; `newton_schulz`: orthogonalisation of a matrix in panels; `rules`: what an optimizer does element by element, and what it needs whole;
`step`: the step of all matrices.
"""
