"""``axonn test gpu``: every system on the GPUs that are here, beside its stock peer, its numbers beside the serial model's."""
