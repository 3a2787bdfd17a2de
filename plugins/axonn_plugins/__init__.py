"""Plugins that bring AxoNN, TED, SAMO and PCCL to DeepSpeed and Megatron-core."""

__version__ = "0.2.0"


def activate() -> None:
    """Make DeepSpeed obey the ``"axonn"`` block in this process; the installed entry point does it by itself."""
    from axonn_plugins.autoload import activate as arm

    arm()
