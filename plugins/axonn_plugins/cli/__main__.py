"""``python -m axonn_plugins.cli`` is ``axonn``."""

from axonn_plugins.cli import run

run()
