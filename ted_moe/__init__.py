"""TED: mixtures of experts under tensor × expert × data parallelism (000, chapter 7)."""

from ted_moe.gradients import GradientReducer as GradientReducer
from ted_moe.gradients import sync_gradients as sync_gradients
from ted_moe.moe import MoE as MoE
from ted_moe.stash import Stash as Stash
from ted_moe.stash import Stashing as Stashing
from ted_moe.tiled_optimizer import TiledOptimizer as TiledOptimizer
from ted_moe.topology import Groups as Groups
from ted_moe.topology import Topology as Topology
