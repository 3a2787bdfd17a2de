"""The suite's packages beside this one, and what hides them: `samo` is a name that a user's folder may have, too."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

from axonn_plugins.config.base import ConfigError

PACKAGES = ("axonn_tp", "samo", "ted_moe")

_HERE = Path(__file__).resolve().parent
# Beside this package where it is installed; above its source folder in a checkout.
_HOMES = (_HERE.parent, _HERE.parent.parent)


def hidden(name: str) -> str:
    """The file that Python finds under the name of one of our packages where that is not ours; empty where it is.

    A folder without ``__init__.py`` hides nothing: it gives way to a package, of an editable installation as of any other.

    Args:
        name: of `PACKAGES`.
    """
    spec = _spec(name)
    if spec is None:
        return repr(sys.modules[name]) if name in sys.modules else "nothing"
    if spec.origin is None and name not in sys.modules:
        return "" if _ours(name) else "a folder without __init__.py"
    origin = spec.origin or ", ".join(spec.submodule_search_locations or [])
    return "" if any(Path(origin).resolve() == place for place in _places(name)) else origin


def require(asked: str, *names: str) -> None:
    """Refuse what needs packages of ours that are hidden by others of the same name.

    Args:
        asked: the key or flag that needs them.
        names: of `PACKAGES`.

    Raises:
        ConfigError: one is hidden.
    """
    for name in names:
        if found := hidden(name):
            raise ConfigError(
                f"{asked} needs axonn-plugins' own package `{name}`, but `import {name}` finds {found} here; "
                "rename yours, or start the script from another folder"
            )
        spec = _spec(name)
        if spec is not None and spec.origin is None:
            _load(name)


def _spec(name: str) -> ModuleSpec | None:
    if name in sys.modules:
        return sys.modules[name].__spec__
    return find_spec(name)


def _places(name: str) -> list[Path]:
    return [home / name / "__init__.py" for home in _HOMES]


def _ours(name: str) -> Path | None:
    return next((place for place in _places(name) if place.is_file()), None)


def _load(name: str) -> None:
    """Import ours past a folder without ``__init__.py``, which an editable installation would let win."""
    place = _ours(name)
    spec = spec_from_file_location(name, place, submodule_search_locations=[str(place.parent)]) if place else None
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no package {name} beside {_HERE}")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
