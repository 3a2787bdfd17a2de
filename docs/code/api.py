"""The API's reference from signatures and docstrings, read from the source: nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from texts import ROOT

FOLDERS = {"axonn_plugins": ROOT / "plugins", "axonn_recipes": ROOT / "recipes"}
MODULES = {
    "axonn_tp": "AxoNN's 4D parallelism in plain PyTorch",
    "axonn_tp.checkpoint": "Checkpoints that any grid reads",
    "axonn_tp.context.chunks": "Shared sequences: chunks and bytes",
    "samo": "SAMO",
    "samo.memory": "SAMO's memory by formula",
    "axonn_plugins.samo.mesh": "SAMO on split models",
    "ted_moe": "TED",
    "ted_moe.memory": "TED's memory by formula",
    "axonn_plugins.hosts.plain": "Several systems on one plain model",
    "axonn_plugins.hosts.host": "A system of your own",
    "axonn_plugins.hosts.lightning": "Lightning's strategy",
    "axonn_plugins.pccl": "PCCL",
    "axonn_plugins.pipeline.bucketed_optimizer": "Optimizer state in host memory",
    "axonn_plugins.optim.access": "One parameter's gradient, weights and states",
    "axonn_plugins.goldfish": "The goldfish loss",
    "axonn_plugins.cluster": "Clusters on one machine",
    "axonn_plugins.planner.answer": "The planner",
    "axonn_plugins.observe.ledger": "The ledger of collectives",
}
"""The names that a user may import; everything else may change in any version."""

PARTS = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$")
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def file_of(module: str) -> Path:
    """The source of a module."""
    folder = FOLDERS.get(module.split(".")[0], ROOT)
    path = folder.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exported(module: str) -> Iterator[tuple[str, Node | ast.AST, str]]:
    """Public names of a module, what defines each, and the module that does."""
    tree = ast.parse(file_of(module).read_text())
    listed = next((_listed(node) for node in tree.body if _listed(node)), None)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                public = alias.name in listed if listed else alias.asname == alias.name
                if public and (found := defined(alias.name, node.module)):
                    yield alias.name, found, node.module
        elif isinstance(node, Node) and (node.name in listed if listed else not node.name.startswith("_")):
            yield node.name, node, module
    # What a module makes known without importing it at once.
    for name, where in _deferred(tree).items():
        if found := defined(name, where):
            yield name, found, where


def _listed(node: ast.stmt) -> list[str] | None:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
        return list(ast.literal_eval(node.value))
    return None


def _deferred(tree: ast.Module) -> dict[str, str]:
    """Names that a module's ``__getattr__`` imports."""
    inner = next((one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "__getattr__"), None)
    found = {}
    for node in ast.walk(inner) if inner else ():
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.name: node.module for alias in node.names if not alias.name.startswith("_")}
    return found


def defined(name: str, module: str) -> ast.AST | None:
    """Find the definition of a name, followed through imports; None for one of no class and no function."""
    tree = ast.parse(file_of(module).read_text())
    for node in tree.body:
        if isinstance(node, Node) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module.split(".")[0] in (
                    *FOLDERS,
                    "axonn_tp",
                    "samo",
                    "ted_moe",
                ):
                    return defined(alias.name, node.module)
    return None


def signature(node: ast.AST, name: str) -> str:
    """As it is called, one argument a line where it is long."""
    function = node
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        if not made:
            fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign) and not _hidden(one)]
            arguments = fields if _is_dataclass(node) or _is_tuple(node) else []
            return _written(name, arguments, "") if arguments or _is_dataclass(node) else f"class {name}"
        function = made[0]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    taken = function.args
    plain = [*taken.posonlyargs, *taken.args]
    defaults = [None] * (len(plain) - len(taken.defaults)) + list(taken.defaults)
    arguments = [
        _argument(one, default) for one, default in zip(plain, defaults, strict=True) if one.arg not in ("self", "cls")
    ]
    if taken.vararg or taken.kwonlyargs:
        arguments.append("*" + (_argument(taken.vararg, None) if taken.vararg else ""))
    arguments += [_argument(one, default) for one, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True)]
    if taken.kwarg:
        arguments.append("**" + _argument(taken.kwarg, None))
    gives = f" -> {ast.unparse(function.returns)}" if function.returns and not isinstance(node, ast.ClassDef) else ""
    return _written(name, arguments, gives)


def _hidden(field: ast.AnnAssign) -> bool:
    return ast.unparse(field.target).startswith("_") or "ClassVar" in ast.unparse(field.annotation)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list)


def _is_tuple(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base) == "NamedTuple" for base in node.bases)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    said = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation else "")
    return said if default is None else f"{said}{' = ' if argument.annotation else '='}{ast.unparse(default)}"


def _written(name: str, arguments: list[str], gives: str) -> str:
    short = f"{name}({', '.join(arguments)}){gives}"
    return short if len(short) <= 90 else f"{name}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){gives}"


def docstring(node: ast.AST) -> list[str]:
    """A Google docstring in Markdown."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
    out: list[str] = []
    inside = ""
    for line in (ast.get_docstring(node) or "").splitlines():
        if PARTS.match(line):
            inside = line.rstrip(":")
            out += ["", f"**{inside}**", ""]
        elif inside and inside != "Example" and line.startswith("    ") and not line.startswith("     "):
            entry = re.match(r"    ([\w*., ]+): (.*)", line)
            out.append(
                f"- `{entry.group(1)}`: {entry.group(2)}" if entry and inside != "Returns" else f"- {line.strip()}"
            )
        elif inside and line.strip():
            out.append(f"  {line.strip()}")
        else:
            out.append(line)
    return [one.replace("``", "`") for one in out]


def page(module: str) -> str:
    """A module's reference in Markdown."""
    out = [f"# {MODULES[module]}: {module}", "", *docstring(ast.parse(file_of(module).read_text())), ""]
    for name, node, _ in sorted(exported(module), key=lambda one: one[0].lower()):
        out += [f"## {name}", "", "```python", signature(node, f"{module}.{name}"), "```", "", *docstring(node), ""]
        for one in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(one, ast.FunctionDef) and not one.name.startswith("_") and ast.get_docstring(one):
                decorated = [ast.unparse(each) for each in one.decorator_list]
                if any(each.endswith(".setter") for each in decorated):
                    continue
                is_property = any("property" in each for each in decorated)
                shown = f"{one.name}" if is_property else signature(one, one.name)
                out += [f"### {name}.{one.name}", "", "```python", shown, "```", "", *docstring(one), ""]
    return "\n".join(out)
