"""Algorithm 2 inside DeepSpeed's PipelineEngine: a stage works on whatever message has arrived (000, chapter 3)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from math import sqrt
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.schedule import TrainSchedule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from axonn_plugins import __version__
from axonn_plugins.config import Axonn
from axonn_plugins.config.pipeline import Pipeline
from axonn_plugins.hosts.common.goldfish import LabelMask
from axonn_plugins.hosts.deepspeed.pipeline.losses import PipelineLosses
from axonn_plugins.hosts.deepspeed.pipeline.passes import StagePasses, checkpoint_layers
from axonn_plugins.hosts.deepspeed.pipeline.ties import sum_gradients
from axonn_plugins.pipeline.events import Event, Kind, Recorder
from axonn_plugins.pipeline.lead import Lead
from axonn_plugins.pipeline.links import Arrival, StageLost
from axonn_plugins.pipeline.packing import Message
from axonn_plugins.pipeline.schedule import Action, Stage, automatic_limit
from axonn_plugins.pipeline.transport import Transport
from axonn_plugins.pipeline.watch import Watch
from axonn_plugins.pipeline.wires import TorchWire
from axonn_tp.layers.batch_norm import SyncBatchNorm

_engines = count()


class StageBatches(PipelineLosses, StagePasses):
    """The part of a pipeline's engine that runs a batch.

    Attributes:
        most_alive: most microbatches whose activations this stage has kept at a time.
    """

    def __init__(
        self,
        args: Any,
        model: PipelineModule,
        optimizer: Any = None,
        *rest: Any,
        config_class: Any = None,
        **keywords: Any,
    ) -> None:
        has_bool_tensors = False
        super().__init__(has_bool_tensors, args, model, optimizer, *rest, config_class=config_class, **keywords)
        block: Axonn = config_class.axonn
        assert block.pipeline is not None
        self._pipeline: Pipeline = block.pipeline
        self._kept = {}
        self._ahead = deque()
        self._forms: set[tuple[tuple[torch.Size, torch.dtype], ...]] = set()
        self._label_mask = None if block.goldfish is None else LabelMask(block.goldfish)
        self.most_alive = 0
        self._recorder: Recorder | None = None
        interval = set_checkpointing(self.module, self._pipeline.activation_checkpointing)
        self._keep_gradients()
        wire = TorchWire(self.grid.pipe_groups, self.device)
        wire.connect()
        self._watch = Watch(str(next(_engines)), self.grid.pipe_groups)
        self._transport = Transport(wire, self.stage_id, self.num_stages, self._watch.waiting)
        groups = self._computing_together()
        self._lead = Lead(groups, wire.timeout) if max(map(len, groups)) > 1 else None
        if self.global_rank == 0:
            print(
                f"axonn {__version__}: pipeline of {self.num_stages} stages, {self._pipeline.schedule}, pipeline_limit "
                f"{self._limit(self.micro_batches)}, activations checkpointed every {interval} layers"
            )

    # Records

    def record_events(self, on: bool = True) -> None:
        """Keep the events of each batch from now on, or no more."""
        self._recorder = Recorder() if on else None

    @property
    def events(self) -> list[Event]:
        """Events of the last batch on this stage; none unless `record_events` was called."""
        return [] if self._recorder is None else self._recorder.events

    def _note(self, kind: Kind, microbatch: int, start: float) -> None:
        if self._recorder is not None:
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            self._recorder.add(kind, microbatch, start)

    def destroy(self) -> None:
        """DeepSpeed's clean-up, and the end of this engine's threads."""
        super().destroy()
        self._watch.close()
        self._transport.close()

    # The batch

    @contextmanager
    def _determined(self) -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if not self._pipeline.deterministic or before[0]:
            yield
            return
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def _bcast_pipe_scalar(self, *rest: Any, **keywords: Any) -> Tensor:
        with self._watch.collectives():
            return super()._bcast_pipe_scalar(*rest, **keywords)

    def _aggregate_total_loss(self) -> Tensor:
        start = perf_counter()
        with self._watch.collectives():
            loss = super()._aggregate_total_loss()
        self._note("loss", -1, start)
        return loss

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """Run a batch; DeepSpeed's schedule only says of what kind, and of how many microbatches.

        Raises:
            StageLost: another rank is gone; names it.
        """
        with self._determined():
            self._batch(pipe_schedule)

    def _batch(self, pipe_schedule: Any) -> None:
        training = isinstance(pipe_schedule, TrainSchedule)
        self.fwd_outputs: list[Any] = []
        if self._recorder is not None:
            self._recorder.clear()
        try:
            self._compute(pipe_schedule.micro_batches, training)
        except StageLost as error:
            self._leave()
            raise self._watch.lost(error) from None
        except Exception as error:
            if self.num_stages > 1:  # whose others wait for this one's messages
                self._leave()
                self._watch.failed(error)
            raise
        if not training:
            return
        steps: list[tuple[Kind, Any]] = [
            ("tied", lambda: sum_gradients(self.module, self.optimizer)),
            ("reduce", self._reduce_gradients),
            ("optimizer", self._exec_optimizer_step),
        ]
        with self._watch.collectives():
            for kind, step in steps:
                start = perf_counter()
                step()
                self._note(kind, -1, start)

    def _leave(self) -> None:
        if self._lead is not None:
            self._lead.leave()

    def _reduce_gradients(self) -> None:
        self._exec_reduce_grads()

    def _limit(self, microbatches: int) -> int:
        given = self._pipeline.pipeline_limit
        return automatic_limit(self._pipeline.schedule, self.num_stages, microbatches) if given == "auto" else given

    def _compute(self, microbatches: int, training: bool) -> None:
        limit, schedule = self._limit(microbatches), self._pipeline.schedule
        limit = self._transport.limit(limit) if training else limit
        apart = self._is_new if training and self._loads_apart() else None
        stage = Stage(schedule, self.stage_id, self.num_stages, microbatches, limit, backward=training, apart=apart)
        arrived: dict[bool, deque[Message]] = {True: deque(), False: deque()}
        self._transport.begin(microbatches, stage.limit, backward=training)
        while not stage.finished:
            # Without backward passes nothing holds the first stage back but messages that the next has not taken in.
            while training and self._take_in(stage, arrived, wait=False):
                pass
            start = perf_counter()
            action = self._next(stage)
            if action is None:
                arrival = self._take_in(stage, arrived, wait=True)
                self._watch.working()
                if self._recorder is not None and arrival is not None:
                    self._recorder.add_wait(start, arrival.sent)
            else:
                self._run(stage, action, arrived, training)
        self._transport.end()
        self._watch.working()

    def _loads_apart(self) -> bool:
        """True if this stage keeps microbatches apart that may load kernels: the first, where no other rank has to know and kernels are not all loaded."""
        if not (self._transport.occupies and self.is_first_stage() and self._lead is None):
            return False
        return self._pipeline.schedule == "message_driven" and os.environ.get("CUDA_MODULE_LOADING") != "EAGER"

    def _is_new(self, microbatch: int) -> bool:
        """Read the next microbatch ahead; true if the like of it was not trained on."""
        batch = self._next_batch()
        self._ahead.append(batch)
        form = tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        known = form in self._forms
        self._forms.add(form)
        return not known

    def _computing_together(self) -> list[list[int]]:
        """Groups of ranks that meet in collectives inside a pass, and so must make their passes in one order."""
        topology = self.grid.topology()
        if self._replicas_meet():
            return [topology.filter_match(pipe=stage) for stage in range(self.num_stages)]
        return topology.get_axis_comm_lists("model") or [[rank] for rank in range(dist.get_world_size())]

    def _replicas_meet(self) -> bool:
        """True if passes of any stage have collectives of data-parallel ranks; every rank calls it."""
        found = torch.tensor([int(any(_meets_replicas(layer) for layer in self.module.modules()))], device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)

    def _together(self) -> Any:
        return nullcontext() if self._lead is None else self._watch.collectives()

    def _next(self, stage: Stage) -> Action | None:
        if self._lead is None:
            return stage.next()
        with self._together():
            return self._lead.next(stage)

    def _run(self, stage: Stage, action: Action, arrived: dict[bool, deque[Message]], training: bool) -> None:
        start = perf_counter()
        kind, microbatch, alone = action
        with self._together():
            if kind == "forward":
                message = None if stage.is_first else arrived[True].popleft()
                sent = self._forward_microbatch(microbatch, message, training)
                alone = alone if message is None else message.alone
                sent = sent._replace(alone=True) if alone and sent is not None else sent
            else:
                message = None if stage.is_last else arrived[False].popleft()
                sent = self._backward_microbatch(microbatch, message)
        self._note(kind, microbatch, start)
        if sent is not None:
            start = perf_counter()
            (self._transport.send_input if kind == "forward" else self._transport.send_gradient)(sent)
            self._note("send", microbatch, start)
        if training and kind == "forward" and microbatch == stage.microbatches - 1:
            with self._watch.collectives():
                self._expect_loss()

    def _take_in(self, stage: Stage, arrived: dict[bool, deque[Message]], wait: bool) -> Arrival | None:
        arrival = self._transport.receive(wait)
        if arrival is not None:
            arrived[arrival.is_input].append(arrival.message)
            (stage.input_arrived if arrival.is_input else stage.gradient_arrived)(arrival.message.microbatch)
        return arrival


def _meets_replicas(layer: nn.Module) -> bool:
    """True if a layer's passes have collectives of data-parallel ranks."""
    return isinstance(layer, (nn.SyncBatchNorm, SyncBatchNorm)) or (isinstance(layer, MoE) and layer.ep_size > 1)


def checkpoint_interval(layers: int, all_layers: int) -> int:
    """The factor of a stage's layers nearest the square root of all layers, which keeps least (equation 3.1); 1 of a stage without layers."""
    factors = [n for n in range(1, layers + 1) if layers % n == 0] or [1]
    return min(factors, key=lambda n: abs(n - sqrt(all_layers)))


def set_checkpointing(module: PipelineModule, given: int | str | bool | None) -> int:
    """Set what ``axonn.pipeline.activation_checkpointing`` says; returns the interval in layers, 0 for none."""
    if given is False:
        module.activation_checkpoint_interval = 0
    elif given is not None:
        layers = len(module.forward_funcs)
        interval = checkpoint_interval(layers, module._num_layers) if given == "auto" else int(given)
        module.activation_checkpoint_func = checkpoint_layers
        module.activation_checkpoint_interval = interval
        module._precompute_checkpointable_values()
    return module.activation_checkpoint_interval
