"""The benchmark behind ``axonn bench tp``."""

import os

# Before torch is imported: in an emulated node nobody answers for host names, and c10d warns at every connection.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
