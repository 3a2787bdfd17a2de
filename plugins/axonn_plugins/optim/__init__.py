"""Optimizer state in tiles: the core of SAMO's, TED's and the pipeline's optimizer. It knows no host and no system.

`lending`: a step of any element-wise torch optimizer on parts of the tensors that its state belongs to (`axonn_tp.comm.optimizer_trial`
tells if it is). `tiles`: a tile's update, where its state is on the device and where it visits it.
`store`: parameters end to end in buckets, by the ranks that sum their gradients; `reducer`: these sums; `segments`: tiles of
stores; `state`: checkpoints of them. `flat`: the optimizer made of all this.
"""
