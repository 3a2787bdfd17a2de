"""Mixtures of experts of others made TED's: what a model computes stays its own, and where its experts are is ours.

`structure` finds experts modules, `trials` how they can be dealt out and split, `suspects` what looks like a mixture; `fused` makes them
parallel; `blocks` takes a mixture with its router into a model whose other layers are split.
"""

from ted_moe.adapters.blocks import blocks_of as blocks_of
from ted_moe.adapters.blocks import enclose as enclose
from ted_moe.adapters.blocks import stand_ins as stand_ins
from ted_moe.adapters.fused import Choices as Choices
from ted_moe.adapters.fused import SpreadExperts as SpreadExperts
from ted_moe.adapters.fused import adopt as adopt
from ted_moe.adapters.fused import passing_by as passing_by
from ted_moe.adapters.structure import find as find
from ted_moe.adapters.suspects import suspect as suspect
from ted_moe.adapters.trials import Cut as Cut
from ted_moe.adapters.trials import Experts as Experts
from ted_moe.adapters.trials import splittable as splittable
