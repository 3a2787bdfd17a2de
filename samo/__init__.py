"""SAMO: a pruned network trained with the state of its kept elements only (000, chapter 4)."""

from samo.checkpoint import dense_state_dict as dense_state_dict
from samo.index import Index as Index
from samo.loss_scale import LossScale as LossScale
from samo.optimizer import Optimizer as Optimizer
