"""Checkpoints that any grid can read: through torch.distributed.checkpoint, or as one safetensors file."""

from axonn_tp.checkpoint.background import Saving
from axonn_tp.checkpoint.files import CheckpointError, latest
from axonn_tp.checkpoint.lazily import lazy_loading, lazy_tensors
from axonn_tp.checkpoint.serial import convert_checkpoint, export_safetensors, import_safetensors
from axonn_tp.checkpoint.training import load, save
from axonn_tp.checkpoint.whole import full_state_dict

__all__ = [
    "CheckpointError",
    "Saving",
    "convert_checkpoint",
    "export_safetensors",
    "full_state_dict",
    "import_safetensors",
    "latest",
    "lazy_loading",
    "lazy_tensors",
    "load",
    "save",
]
