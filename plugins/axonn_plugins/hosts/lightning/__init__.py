"""Lightning as a host: ``Trainer(strategy="axonn")``, ``Fabric(strategy="axonn")``, and LitGPT's command line.

`AxonnStrategy` takes the sizes: ``Trainer(strategy=AxonnStrategy(gx=2))``, ``Fabric(strategy=AxonnStrategy(gx=2, gz=2))``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonn_plugins.hosts.lightning.strategy import AxonnStrategy

__all__ = ["AxonnStrategy"]


def __getattr__(name: str) -> Any:
    # Lightning is imported with the class, not with the package, which is imported while Lightning is.
    if name in __all__:
        from axonn_plugins.hosts.lightning.strategy import AxonnStrategy

        return AxonnStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
