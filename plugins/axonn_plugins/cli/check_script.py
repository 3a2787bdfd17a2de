"""Reading of a training script without running it, for ``axonn check``: where its engine starts, and how its data is dealt out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from axonn_plugins.config.base import ConfigError

_TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer", "GRPOTrainer", "DPOTrainer")
_STARTS = {
    "initialize": "deepspeed.initialize",
    "Accelerator": "Accelerate",
    **dict.fromkeys(_TRAINERS, "the HF Trainer"),
}


def notes(file: Path, keys: set[str], replicas: int) -> list[str]:
    """Sentences on a script, each with its line.

    Args:
        file: the script.
        keys: of the block.
        replicas: ranks that read the same samples.

    Raises:
        ConfigError: it is not there, or no Python.
    """
    try:
        tree = ast.parse(file.read_text())
    except OSError as error:
        raise ConfigError(f'"{file}" cannot be read: {error.strerror}; give the path of your training script') from None
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f'"{file}" is no Python script: {error}') from None
    calls = [(node, _name(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return list(_sentences(file.name, calls, keys, replicas))


def _name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _sentences(file: str, calls: list[tuple[ast.Call, str]], keys: set[str], replicas: int) -> Iterator[str]:
    starts = [(node, name) for node, name in calls if name in _STARTS]
    for node, name in starts:
        yield f"{file}:{node.lineno}: {_STARTS[name]} starts the engine, which obeys the block"
        given = {keyword.arg for keyword in node.keywords}
        if name == "initialize" and "mpu" in given and keys & {"tensor_parallel"}:
            yield f"{file}:{node.lineno}: mpu does not go with axonn.tensor_parallel, which makes its own groups; leave one of them out"
    if not starts:
        yield f"{file}: no call of deepspeed.initialize, Accelerator or an HF Trainer is in it; if none is in what it imports, nothing obeys the block"
    trainer = any(name != "initialize" for _, name in starts)
    for node, name in calls:
        given = {keyword.arg for keyword in node.keywords}
        if name == "DistributedSampler" and "num_replicas" in given and replicas > 1 and not trainer:
            yield (
                f"{file}:{node.lineno}: the sampler deals out by numbers of the script's own, and {replicas} ranks are to read the same; give it "
                "num_replicas=engine.mpu.get_data_parallel_world_size() and rank=engine.mpu.get_data_parallel_rank(), or neither"
            )
    if "pipeline" in keys and not any(name == "PipelineModule" for _, name in calls):
        yield f"{file}: axonn.pipeline is for a deepspeed.pipe.PipelineModule, and none is made in it"
    if "pipeline" not in keys and any(name == "PipelineModule" for _, name in calls) and "tensor_parallel" in keys:
        yield f'{file}: a PipelineModule beside axonn.tensor_parallel asks for "pipeline": {{}} in the block, too'
