"""Where the packages lie; setup.cfg holds the rest.

plugins/ and recipes/ are source folders of one package each: their own names are common ones, which users have, too.
"""

from setuptools import find_packages, setup

OURS = {".": ["axonn_tp", "samo", "ted_moe"], "plugins": ["axonn_plugins"], "recipes": ["axonn_recipes"]}

setup(
    packages=[
        package
        for folder, names in OURS.items()
        for package in find_packages(folder, include=[pattern for name in names for pattern in (name, f"{name}.*")])
    ],
    package_dir={"axonn_plugins": "plugins/axonn_plugins", "axonn_recipes": "recipes/axonn_recipes"},
)
