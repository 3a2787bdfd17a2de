"""Megatron-LM's pretrain_gpt.py with a system of one's own, which is registered by its import: what a user writes."""

import runpy
import sys

from tests.compose.noise import GradientNoise
from tests.megatron.harness import CHECKOUT

assert GradientNoise.Block
sys.path.insert(0, CHECKOUT)
runpy.run_path(f"{CHECKOUT}/pretrain_gpt.py", run_name=__name__)
