"""Layers that `torch.compile` traces: the only room of this package that it looks into.

Their collectives are the plain ones of `axonn_tp.layers.product.reference`, in the order of the code; what overlaps is the compiler's
choice. They take and give plain tensors: activations that know how they are split (`axonn_tp.layers.activation`) cannot be traced.
"""
