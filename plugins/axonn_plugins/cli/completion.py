"""``axonn completion``: commands, options and their values for a shell, as text that it reads once and that starts no Python."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from shlex import quote
from typing import Literal

from tyro.conf import Positional, PositionalMetavarFromFieldName

from axonn_plugins.cli.options import read
from axonn_plugins.observe.progress import each

_BASH = """# axonn completion bash: commands, options and values, as installed when this was written.
_axonn() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} key="" word words=""
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case $word in -*) break ;; *) key="$key $word" ;; esac
    done
    while :; do
        case $key in
@KEYS@
        esac
        key=${key% *}
    done
    case "$key $prev" in
@VALUES@
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
    if [[ ${#COMPREPLY[@]} == 0 && $cur != -* ]]; then
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
}
complete -o filenames -F _axonn axonn
"""
_ZSH = """# axonn completion zsh: by zsh's own reading of bash's completions.
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""


@dataclass(frozen=True)
class Options:
    """The completion of axonn's command line for a shell, to be kept in a file that it reads; takes half a minute, as every command is asked.

    Attributes:
        shell: bash: axonn completion bash > ~/.local/share/bash-completion/completions/axonn; zsh: to a file that .zshrc sources.
    """

    shell: PositionalMetavarFromFieldName[Positional[Literal["bash", "zsh"]]]


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    shell = read(Options, arguments, "axonn completion").shell
    print({"bash": bash, "zsh": zsh}[shell](*words()), end="")
    return 0


def words() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Words that may follow each command, and the values of options that have a choice."""
    from axonn_plugins.cli.parsers import every, parser

    after: dict[str, list[str]] = {"": ["--help", "--version"]}
    values: dict[str, list[str]] = {}
    asked = each(list(every()), "asking", "command")
    # Modules print and draw nothing when they are imported, but some libraries of theirs warn.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        for name in asked:
            for depth in range(len(name)):
                before = "".join(f" {part}" for part in name[:depth])
                after.setdefault(before, ["--help"])
                if name[depth] not in after[before]:
                    after[before].append(name[depth])
            key, (found, _) = "".join(f" {part}" for part in name), parser(name)
            after[key] = [flag for action in found._actions for flag in action.option_strings if flag.startswith("--")]
            for action in found._actions:
                if not action.option_strings:
                    after[key] += map(str, action.choices or ())
                for flag in action.option_strings:
                    if action.choices:
                        values[f"{key} {flag}"] = [str(choice) for choice in action.choices]
    return after, values


def bash(after: dict[str, list[str]], values: dict[str, list[str]]) -> str:
    """The text for bash of `words`."""
    keys = "\n".join(
        f"            {quote(key)}) words={quote(' '.join(after[key]))}; break ;;" for key in sorted(after)
    )
    chosen = "\n".join(f"        {quote(key)}) words={quote(' '.join(values[key]))} ;;" for key in sorted(values))
    return _BASH.replace("@KEYS@", keys).replace("@VALUES@", chosen)


def zsh(after: dict[str, list[str]], values: dict[str, list[str]]) -> str:
    """The text for zsh of `words`, which has no mapfile."""
    text = re.sub(r"mapfile -t COMPREPLY < <\((.*)\)$", r"COMPREPLY=( $(\1) )", bash(after, values), flags=re.M)
    return _ZSH + text.partition("\n")[2]
