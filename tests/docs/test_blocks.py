"""Every block of code in a README or on the site is read by what would read it; some are run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from axonn_plugins import config
from axonn_plugins.config import compose
from tests.docs.texts import BLOCKS, LINES, ROOT, Code

OURS = ("axonn_plugins", "axonn_recipes", "axonn_tp", "samo", "ted_moe")
LANGUAGES = ("", "json", "python", "bash")


def of(language: str) -> list[Code]:
    return [block for block in BLOCKS if block.language == language]


def test_blocks_have_languages_that_are_checked() -> None:
    assert {block.language for block in BLOCKS} <= set(LANGUAGES)
    assert len(of("json")) > 20 and len(of("python")) > 20


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json(block: Code) -> None:
    text = block.text.strip()
    found = json.loads("{" + text + "}" if text.startswith('"') else text)
    if "axonn" in found:
        # A system of one's own is known where its class is.
        given = {key: value for key, value in found["axonn"].items() if key != "gradient_noise"}
        compose.check(config.parse(given))


def named(node: ast.AST) -> list[str]:
    """a.b.c as words; nothing where it begins with no name."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return [*reversed([*words, node.id])] if isinstance(node, ast.Name) else []


def resolve(words: list[str], known: dict[str, Any]) -> Any:
    """The object that a dotted name of ours stands for."""
    if words[0] not in known:
        known[words[0]] = importlib.import_module(words[0])
    value = known[words[0]]
    for word in words[1:]:
        if isinstance(value, ModuleType) and not hasattr(value, word):
            importlib.import_module(f"{value.__name__}.{word}")
        value = getattr(value, word)
    return value


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python(block: Code) -> None:
    """Names of ours are there, and take the arguments that are given by name."""
    tree = ast.parse(block.text)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            module = importlib.import_module(node.module)
            for alias in node.names:
                known[alias.asname or alias.name] = (
                    getattr(module, alias.name)
                    if hasattr(module, alias.name)
                    else importlib.import_module(f"{node.module}.{alias.name}")
                )
    for node in ast.walk(tree):
        words = named(node)
        if len(words) > 1 and words[0] in OURS:
            resolve(words, known)
        if isinstance(node, ast.Call):
            words = named(node.func)
            if words and (words[0] in OURS or words[0] in known):
                taken = inspect.signature(resolve(words, known)).parameters.values()
                if not any(one.kind is one.VAR_KEYWORD for one in taken):
                    assert {each.arg for each in node.keywords} <= {one.name for one in taken}, ".".join(words)


def test_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    given = {word for words in LINES if words[0] == "make" for word in words[1:] if "=" not in word}
    assert given and given <= targets


def test_modules_and_extras() -> None:
    """Modules that ``python -m`` and torchrun start are there, and so are the extras of pip."""
    extras = re.findall(r"^(\w+) =$", (ROOT / "setup.cfg").read_text().partition("extras_require]")[2], re.M)
    for words in LINES:
        if "-m" in words and words[0] in ("python", "torchrun", "accelerate"):
            module = words[words.index("-m") + 1]
            if module.split(".")[0] in (*OURS, "tests"):
                assert importlib.util.find_spec(module), words
        for word in words:
            if found := re.fullmatch(r"(?:\.|axonn-plugins)\[(\w+)\]", word):
                assert found[1] in extras, words


def test_flags_of_megatron() -> None:
    """Flags of ours on a line of torchrun are those of its arguments."""
    from axonn_plugins.hosts.megatron import arguments

    source = Path(inspect.getfile(arguments)).read_text()
    known = {*re.findall(r"--axonn-[\w-]+", source), "--axonn-gradient-noise"}
    systems = {f"--axonn-{key.replace('_', '-')}" for key in compose.SYSTEMS}
    for words in LINES:
        given = {word for word in words if word.startswith("--axonn-")}
        assert given <= known | systems, (words, given - known - systems)
