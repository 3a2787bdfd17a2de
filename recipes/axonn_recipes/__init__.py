"""Experiments one can run: ``axonn train NAME``."""

import os

import torch

if torch.cuda.device_count() == 0:
    # Said before DeepSpeed is imported, which otherwise looks for a device and warns that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
