"""TED: tensor × expert × data parallel mixtures of experts (000, chapter 7)."""

from ted_moe.tiled_optimizer import TiledOptimizer as TiledOptimizer
