"""What holds for every test.

pccl is not tuned by itself; faults of our own in the search for a plan come out; DeepSpeed's kernels are compiled into a folder of this run:

torch guards a compilation by a file that stays when the process is killed, and whoever comes next then waits for ever:
in a folder shared with other runs one killed test would hang every run after it.
"""

import os
import shutil
import tempfile


def pytest_configure(config):
    folder = tempfile.mkdtemp(prefix="axonn-extensions-")
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    os.environ["AXONN_PCCL_TUNE"] = "0"
    os.environ["AXONN_DEBUG"] = "1"
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
