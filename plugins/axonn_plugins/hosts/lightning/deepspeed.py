"""Lightning's own DeepSpeedStrategy, Fabric's and the Trainer's, beside the block; without the block nothing is different."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.config import ConfigError


def patch(module: ModuleType) -> None:
    """Add to Fabric's or the Trainer's ``strategies.deepspeed``; harmless when called again."""
    kind = module.DeepSpeedStrategy
    if "axonn" in vars(kind):
        return
    kind.axonn = True
    kind.distributed_sampler_kwargs = _sampler_of_reader(kind.distributed_sampler_kwargs)
    for name in ("reduce", "all_reduce", "all_gather"):
        if hasattr(kind, name):
            setattr(kind, name, _over_readers(getattr(kind, name)))
    kind.reduce_boolean_decision = _by_all_ranks(kind.reduce_boolean_decision)
    kind.process_dataloader = _for_readers(kind.process_dataloader)
    kind._format_config = _running_once(kind._format_config)
    if hasattr(kind, "_initialize_deepspeed_inference"):  # the Trainer's
        kind._initialize_deepspeed_inference = _split_too(kind._initialize_deepspeed_inference)
        kind.init_deepspeed = _counting_metrics(kind.init_deepspeed)


def _block(strategy: Any) -> Any:
    return strategy.config.get("axonn") if isinstance(strategy.config, dict) else None


def _ranks(strategy: Any) -> int:
    ranks: int = strategy.num_nodes * strategy.num_processes
    return ranks


def _same(strategy: Any) -> int:
    """Ranks in a row that read the same data.

    Raises:
        ConfigError: the planner is to choose, after Lightning has dealt out the data.
    """
    from axonn_plugins.hosts.transformers.readers import replicas
    from axonn_plugins.hosts.transformers.sizes import open_sizes

    if open_sizes(strategy.config):
        raise ConfigError(
            'axonn.tensor_parallel has sizes that are "auto", and Lightning deals out data before the model is there that they are chosen for; '
            "write gx, gy and gz as numbers"
        )
    return replicas(strategy.config, _ranks(strategy))


def _sampler_of_reader(original: property) -> property:
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any]:
        assert original.fget is not None
        if _block(self) is None:
            found: dict[str, Any] = original.fget(self)
            return found
        from axonn_plugins.hosts.lightning.replicas import Readers, keep_order

        keep_order()
        same, mesh = _same(self), _mesh(self)
        if mesh is not None and _predicting(self):
            return {"num_replicas": Readers(mesh.size("data")), "rank": mesh.rank("data")}
        return {"num_replicas": Readers(_ranks(self) // same), "rank": self.global_rank // same}

    return property(distributed_sampler_kwargs)


def _predicting(strategy: Any) -> bool:
    """True if batches are not padded, so that ranks may have unequal numbers; ranks of z gather weights together, and then read the same."""
    trainer = getattr(getattr(strategy, "lightning_module", None), "_trainer", None)
    return trainer is not None and trainer.state.fn == "predict"


def _mesh(strategy: Any) -> Any:
    """The mesh of the strategy's engine, if it has one."""
    from axonn_tp import Mesh

    engine = getattr(strategy, "_deepspeed_engine", None) or getattr(strategy, "model", None)
    mesh = getattr(engine, "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def _over_readers(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def over(self: Any, tensor: Any, group: Any = None, *rest: Any, **named: Any) -> Any:
        mesh = _mesh(self)
        if mesh is not None and group in (None, dist.group.WORLD):
            group = mesh.group("batch")
        return original(self, tensor, group, *rest, **named)

    return over


def _by_all_ranks(original: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(original)
    def reduce_boolean_decision(self: Any, decision: bool, all: bool = True) -> bool:
        """Lightning's own, which compares a sum, over readers now, with the number of ranks."""
        if _mesh(self) is None:
            return original(self, decision, all)
        found = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(found, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(found)

    return reduce_boolean_decision


def _for_readers(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def process_dataloader(self: Any, dataloader: Any) -> Any:
        """Lightning's own; workers draw random numbers by reader, and readers of one stream take its batches in turns."""
        found = original(self, dataloader)
        if _block(self) is None:
            return found
        from axonn_plugins.hosts.lightning.replicas import seed_workers
        from axonn_plugins.hosts.lightning.streams import dealt, decide

        same = _same(self)
        seed_workers(found, self.global_rank // same)
        found = dealt(found, lambda: _mesh(self), _ranks(self) // same, _predicting(self))
        if hasattr(self, "lightning_module"):
            decide(found)
        return found

    return process_dataloader


def _running_once(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def _format_config(self: Any) -> None:
        """Lightning's own; a step of a LightningModule runs once, for what it logs, and because Lightning puts it in forward's place for one call."""
        original(self)
        split = (_block(self) or {}).get("tensor_parallel")
        if isinstance(split, dict):
            self.config["axonn"] = {**self.config["axonn"], "tensor_parallel": {**split, "verify_plan": False}}

    return _format_config


def _split_too(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def _initialize_deepspeed_inference(self: Any, model: Any) -> None:
        """Lightning's own, whose configuration has no block: it would take the shards of a trained model for whole."""
        if _block(self) is None:
            original(self, model)
            return
        import deepspeed

        from axonn_plugins.hosts.transformers.evaluating_first import without_training

        config = {"train_micro_batch_size_per_gpu": 1} | without_training(self.config)
        arguments = argparse.Namespace(device_rank=self.root_device.index)
        self.model, *_ = deepspeed.initialize(
            args=arguments, config=config, model=model, model_parameters=[], dist_init_required=False
        )

    return _initialize_deepspeed_inference


def _counting_metrics(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init_deepspeed(self: Any) -> None:
        """Lightning's own; metrics inside the module are summed over readers."""
        original(self)
        mesh = _mesh(self)
        if mesh is not None:
            from axonn_plugins.hosts.lightning.replicas import count_readers

            count_readers(self.lightning_module, mesh)

    return init_deepspeed
