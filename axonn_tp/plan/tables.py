"""Embeddings that change or scale rows by what one rank reads, which is a part of what one process would read: refused."""

from __future__ import annotations

from torch import nn

from axonn_tp.grid.mesh import Grid


def refuse_tables(model: nn.Module, grid: Grid) -> None:
    """Refuse embeddings that would be others on ranks that read different data, or whose gradients are sparse.

    Raises:
        ValueError: names the layer and the option.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or grid.world == 1:
            continue
        if module.sparse:
            raise ValueError(
                f"layer {name}: gradients of an embedding with sparse = True are not summed over ranks; use sparse=False"
            )
        for option, what in (("max_norm", "shortens the rows"), ("scale_grad_by_freq", "counts the tokens")):
            if grid.batch > 1 and getattr(module, option):
                raise ValueError(
                    f"layer {name}: an embedding with {option} {what} that a rank reads, and {grid.batch} ranks read different tokens here, so that it would "
                    f"be another than in one process; leave {option} out, or use gx and gy alone"
                )
