"""The Trainer's strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import BaseFinetuning, BatchSizeFinder, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.split_states import whole_shapes
from axonn_plugins.hosts.lightning import files
from axonn_plugins.hosts.lightning.gradients import Gradients, gradients_of
from axonn_plugins.hosts.lightning.replicas import Readers, count_readers
from axonn_plugins.hosts.lightning.states import own_state, whole_state
from axonn_plugins.hosts.lightning.strategy import AxonnStrategy
from axonn_plugins.hosts.lightning.streams import decide
from axonn_tp import auto_plan, full_state_dict
from axonn_tp.checkpoint import load, save


class TrainerStrategy(AxonnStrategy, ParallelStrategy):
    """`AxonnStrategy` as the Trainer has it."""

    _launcher_class = _SubprocessScriptLauncher
    _gradients: Gradients | None = None

    def _chosen_precision(self) -> Any:
        return self.precision_plugin

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of samplers: the number of readers, and this rank's number among them.

        Predictions are not padded, so that ranks may have unequal numbers of batches: ranks of z, which gather weights
        together, then read the same.
        """
        if self._predicting:
            return {"num_replicas": Readers(self.grid.gdata), "rank": self.grid.coordinates(self.global_rank)["data"]}
        return {"num_replicas": Readers(self.grid.batch), "rank": self.reader}

    @property
    def _predicting(self) -> bool:  # type: ignore[override]
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return trainer is not None and trainer.state.fn == TrainerFn.PREDICTING

    def process_dataloader(self, dataloader: Any) -> Any:
        """See `AxonnStrategy`; the Trainer asks at once for the length of what has one."""
        found = super().process_dataloader(dataloader)
        decide(found)
        return found

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is read into the split model."""
        return True

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Models are made in host memory, or without memory where `empty_init`, by their `reset_parameters` when they are split."""
        with ExitStack() as stack:
            stack.enter_context(self._init_context(empty_init))
            stack.enter_context(self.precision_plugin.tensor_init_context())
            yield

    def setup(self, trainer: Any) -> None:
        """Split the model, with its optimizers where it is to be fitted."""
        self.accelerator.setup(trainer)
        _refuse_callbacks(trainer)
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        assert module is not None
        self.model = self.precision_plugin.convert_module(module)
        # Before the split, for functions that sort parameters by their shapes; where there are any.
        early = fitting and not any(parameter.is_meta for parameter in module.parameters())
        if early:
            with whole_shapes(module):
                self.setup_optimizers(trainer)
        self.split(module, map(_own, self.optimizers if fitting else []), self._layer_sync is not None)
        if fitting and not early:
            self.setup_optimizers(trainer)
            self.split(module, map(_own, self.optimizers))
        if fitting:
            _average_split(trainer, module)
        count_readers(module, self.mesh)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        self.precision_plugin.backward = self._backward
        if fitting:
            self._gradients = gradients_of(module, self.mesh)
            self._gradients.optimizers = [*map(_own, self.optimizers)]
            _optimizers_to_device(self.optimizers, self.root_device)

    def model_to_device(self) -> None:
        """Nothing: a model reaches its device layer by layer, when it is split."""

    def _auto_plan(self, module: Any, options: Any) -> Any:
        # A simulation copies the module, and the Trainer is no part of it.
        trainer, module._trainer = module._trainer, None
        try:
            example = module.example_input_array
            example = (example,) if isinstance(example, Tensor) else example
            return auto_plan(module, self.mesh.grid, example, options)
        finally:
            module._trainer = trainer

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.clip(self.precision_plugin.main_params(optimizer), clip_val)

    # Steps

    def _step(self, context: Any, name: str, inputs: tuple, keywords: dict[str, Any]) -> Any:
        self.replicas.inputs((inputs, keywords), f"the batch of {name}")
        with context():
            # Through the module's call, whose hooks gather weights ahead.
            return self._forward_redirection(self.lightning_module, self.lightning_module, name, *inputs, **keywords)

    def training_step(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's training_step."""
        return self._step(self.precision_plugin.train_step_context, "training_step", inputs, keywords)

    def validation_step(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's validation_step."""
        return self._step(self.precision_plugin.val_step_context, "validation_step", inputs, keywords)

    def test_step(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's test_step."""
        return self._step(self.precision_plugin.test_step_context, "test_step", inputs, keywords)

    def predict_step(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's predict_step."""
        return self._step(self.precision_plugin.predict_step_context, "predict_step", inputs, keywords)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Before backward of the loss, which is not scaled."""
        self.replicas.loss(closure_loss)
        if self._gradients is not None:
            self._gradients.prepare(closure_loss)

    def _backward(self, *given: Any, **named: Any) -> None:
        """The precision's backward, and the sums of gradients over readers, which are there when `on_after_backward` looks."""
        type(self.precision_plugin).backward(self.precision_plugin, *given, **named)
        if self._gradients is not None:
            self._gradients.finish()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *rest: Any, **named: Any) -> Any:
        """Lightning's, by gradients that are sums over readers."""

        def computed() -> Any:
            found = closure()
            if self._gradients is not None and self._gradients.left_alone:
                raise ConfigError(
                    "training_step called loss.backward(), and nobody has summed the gradients over ranks; call self.manual_backward(loss)"
                )
            return found

        return super().optimizer_step(optimizer, computed, *rest, **named)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate."""
        assert self._gradients is not None
        with self._gradients.no_sync():
            yield

    # Checkpoints

    @property
    def _sharded(self) -> bool:
        return self.settings.state_dict_type == "sharded"

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The serial model's, on rank 0."""
        assert self.lightning_module is not None
        return {} if self._sharded else full_state_dict(self.lightning_module, self.mesh)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state as one process has it, on rank 0."""
        return {} if self._sharded else whole_state(_own(optimizer), self.mesh)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, complete or absent; every rank calls it."""
        if self._sharded:
            optimizer = self._only_optimizer() if "optimizer_states" in checkpoint else None
            save(self.broadcast(filepath), self.lightning_module, self.mesh, optimizer, extra=checkpoint)
        else:
            files.save_file(self.checkpoint_io, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any grid or of one process; every rank calls it."""
        if not files.is_folder(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizer, strict = self._only_optimizer() if fitting else None, self.lightning_module.strict_loading
        found = load(checkpoint_path, self.lightning_module, self.mesh, optimizer, strict=strict)
        if found.get("state_dict"):
            # Of a callback that averages weights: it saves the average in the model's place, and what it found there, which is in the folder.
            held = self.lightning_module.state_dict()
            held = {name: value.clone() if isinstance(value, Tensor) else value for name, value in held.items()}
            found |= {"current_model_state": held} if found.get("current_model_state") == {} else {}
            self.lightning_module.load_state_dict(found["state_dict"], strict=strict)
        return {**found, "axonn_loaded": True}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part."""
        if "axonn_loaded" not in checkpoint:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of the states."""
        if "axonn_loaded" in checkpoint:
            return
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, BaseFinetuning):  # which Lightning has called before it was given its state
                BaseFinetuning.on_fit_start(callback, trainer, self.lightning_module)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(own_state(_own(optimizer), state, self.mesh))
        _optimizers_to_device(self.optimizers, self.root_device)

    def _only_optimizer(self) -> Optimizer | None:
        if len(self.optimizers) > 1:
            raise ConfigError(
                f'a folder of shards holds one optimizer, not {len(self.optimizers)}; use state_dict_type = "full", or save weights alone'
            )
        return _own(self.optimizers[0]) if self.optimizers else None


def _refuse_callbacks(trainer: Any) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, BatchSizeFinder) and trainer.strategy.grid.world > 1:
            raise ConfigError(
                f"{type(callback).__name__} (Tuner.scale_batch_size) tries batches in one process, and there are {trainer.strategy.grid.world}; "
                "leave it out, and set the batch size"
            )
        if isinstance(callback, ModelPruning):
            raise ConfigError(
                f"{type(callback).__name__} prunes each rank's part of a weight by itself, which is not what one process prunes; train under DeepSpeed "
                'with the block\'s "samo", or without the callback'
            )


def _average_split(trainer: Any, module: Any) -> None:
    """Callbacks that average weights have copied the module before it was split: they average each rank's part, which is the same."""
    for callback in trainer.callbacks:
        average = getattr(callback, "_average_model", None)
        if isinstance(average, AveragedModel):
            average.module = deepcopy(module)
        elif average is not None and isinstance(callback, StochasticWeightAveraging):
            callback._average_model = deepcopy(module)


def _own(optimizer: Optimizer) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
