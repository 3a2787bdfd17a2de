"""Entry point of group ``torch.backends``: torch calls `arm` at the end of every ``import torch``.

It lives outside the package `plugins` because that name is a common one: where another `plugins` comes first on
sys.path, importing torch must still work, and must not run that package.
"""

import os


def arm() -> None:
    """Arm the hook; whatever goes wrong becomes a warning."""
    if os.environ.get("AXONN_PLUGINS") == "0":
        return
    try:
        from importlib.util import find_spec

        spec = find_spec("plugins")
        found = None if spec is None or spec.origin is None else os.path.dirname(os.path.dirname(spec.origin))
        if found != os.path.dirname(__file__):
            raise ImportError(f"the name plugins leads to {found} instead of axonn-plugins")
        from plugins.autoload import activate

        activate()
    except Exception as error:
        import warnings

        warnings.warn(
            f'axonn: DeepSpeed will not see the "axonn" block, nor torch the backend pccl: {error}; run axonn doctor',
            stacklevel=2,
        )
