"""SAMO: a pruned network trained with the state of its kept elements only (000, chapter 4)."""

from axonn_plugins.optim.index import Index as Index
from axonn_plugins.optim.loss_scale import LossScale as LossScale
from samo.checkpoint import dense_state_dict as dense_state_dict
from samo.early_bird import EarlyBird as EarlyBird
from samo.optimizer import Optimizer as Optimizer
from samo.patterns import n_of_m as n_of_m
from samo.pruning import Shard as Shard
from samo.pruning import Shards as Shards
from samo.pruning import magnitude as magnitude
from samo.pruning import read_masks as read_masks
from samo.pruning import sparsity_table as sparsity_table
from samo.pruning import write_masks as write_masks
from samo.regrowth import Regrowth as Regrowth
from samo.regrowth import regrow as regrow
from samo.reparametrised import absorb as absorb
from samo.schedule import Schedule as Schedule
from samo.scores import grasp as grasp
from samo.scores import random as random
from samo.scores import snip as snip
from samo.structures import channels as channels
from samo.structures import heads as heads
