"""Optimizers that know the layouts: the true global norm under ZeRO-1 and 2, and half precision at stage 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from axonn_tp import Mesh, grad_norm, layout_of

_PART = 2**16


class LayoutZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's ZeRO-1/2 optimizer with the norm computed from the layouts."""

    mesh: Mesh

    @classmethod
    def adopt(cls, optimizer: DeepSpeedZeroOptimizer, mesh: Mesh) -> LayoutZeroOptimizer:
        """Turn an optimizer that DeepSpeed built into this class, in place."""
        kind = type(optimizer)
        optimizer.__class__ = cls if kind is DeepSpeedZeroOptimizer else type(cls.__name__, (cls, kind), {})
        optimizer.mesh = mesh
        return optimizer

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Let parameters find their states; DeepSpeed looks once, after the first group's step, when the others have none yet."""
        super()._lazy_init_hp_params_optimizer_state()
        self._hp_optimizer_states_linked = all(map(self.optimizer.state.get, self.single_partition_of_fp32_groups))

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        """The 2-norm of the (loss-scaled) averaged gradient of the whole model; −1 where it is not finite."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for group, parameters in enumerate(self.params_in_partition):
            gradients = (g for g in self.averaged_gradients[group] if not getattr(g, "_zero_padding", False))
            for gradient, parameter in zip(gradients, parameters, strict=False):
                # Under ZeRO every rank of the group that sums a gradient holds another partition, so none is a replica.
                layout = layout_of(parameter)
                at = self.mesh.over(layout.grid).coordinates
                if layout.counted_here(at, axes={"x", "y"} - set(layout.partial)):
                    # In parts, so that a copy in float64 takes no memory to speak of.
                    total += sum(part.double().square().sum() for part in gradient.reshape(-1).split(_PART))
        dist.all_reduce(total)
        norm = total.sqrt() if total.isfinite() else -torch.ones_like(total)
        wide = any(flat.dtype == torch.float64 for flat in self.single_partition_of_fp32_groups)
        return norm if wide else norm.float()


class MixedPrecisionOptimizer(ZeROOptimizer):
    """Half-precision parameters with float32 masters at ZeRO stage 0, with loss scaling, skipped overflows and clipping.

    Stock DeepSpeed's stage-0 fp16 optimizer divides gradients by a loss scale that its engine never multiplied in,
    hence this one.

    Args:
        optimizer: the basic optimizer over the half-precision parameters; it is given the masters instead.
        mesh: the mesh.
        loss_scaler: DeepSpeed's static or dynamic scaler.
        clip_grad: largest global norm, 0 for no clipping.
        norm: of the whole model's gradient, from this rank's parameters; by default `grad_norm` on the mesh.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        loss_scaler: Any,
        clip_grad: float,
        norm: Callable[[list[nn.Parameter]], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._norm = norm or partial(grad_norm, mesh=mesh)
        self.optimizer, self.mesh, self.loss_scaler, self.clip_grad = optimizer, mesh, loss_scaler, clip_grad
        self.custom_loss_scaler, self.external_loss_scale, self.torch_autocast_gradscaler = False, None, None
        self.overflow = False
        self._global_grad_norm: float | None = None
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                    group["params"][place] = self._master(parameter)

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(parameter.detach().float())
        if parameter in self.optimizer.state:
            self.optimizer.state[master] = self.optimizer.state.pop(parameter)
        self._pairs.append((parameter, master))
        return master

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The basic optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The basic optimizer's state."""
        return self.optimizer.state

    @property
    def cur_scale(self) -> float:
        """The loss scale in use."""
        return self.loss_scaler.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.loss_scaler.dynamic

    def pairs_by_group(self) -> list[list[tuple[nn.Parameter, nn.Parameter]]]:
        """Parameters, and what the basic optimizer has in their place: masters, or the parameters themselves."""
        live = {id(master): parameter for parameter, master in self._pairs}
        return [[(live.get(id(p), p), p) for p in group["params"]] for group in self.param_groups]

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.pairs_by_group() for parameter, _ in group]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Unscale, clip, update the masters and copy them back; skip the step when a gradient is not finite."""
        scale = self.loss_scaler.loss_scale
        norm = self._norm(self._parameters()).item() / scale
        self.overflow = self._any_overflow()
        self.loss_scaler.update_scale(self.overflow)
        self._global_grad_norm = float("inf") if self.overflow else norm
        if self.overflow:
            return
        factor = 1.0 / scale
        if self.clip_grad > 0:
            factor *= min(1.0, self.clip_grad / (norm + 1e-6))
        halves = {id(parameter) for parameter, _ in self._pairs}
        for parameter in self._parameters():
            if parameter.grad is not None and id(parameter) not in halves:
                parameter.grad.mul_(factor)
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float().mul_(factor)
        self.optimizer.step()
        for parameter, master in self._pairs:
            parameter.copy_(master)
            master.grad = None

    def _any_overflow(self) -> bool:
        """Whether a gradient is not finite on any rank, also one of which the norm counts another rank's replica."""
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        largest = torch.zeros((), device=self.mesh.device)
        if gradients:
            largest = torch.stack([most.float() for most in torch._foreach_norm(gradients, math.inf)]).max()
        overflow = (~largest.isfinite()).int()
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        return bool(overflow)

    def backward(self, loss: Tensor, retain_graph: bool = False, **keywords: Any) -> None:
        """Backward of the scaled loss; older engines of DeepSpeed call this, newer ones scale the loss themselves."""
        self.loss_scaler.scale_loss(loss).backward(retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in self._parameters():
            parameter.grad = None

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Set the masters from the parameters."""
        for parameter, master in self._pairs:
            master.copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Masters, the basic optimizer's state and the loss scaler."""
        masters = [master.data for _, master in self._pairs]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters, "loss_scaler": self.loss_scaler}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        """Restore what `state_dict` returned; without optimizer states only the masters."""
        for (parameter, master), saved in zip(self._pairs, state_dict["masters"], strict=True):
            master.copy_(saved)
            parameter.copy_(master)
        if load_optimizer_states:
            self.optimizer.load_state_dict(state_dict["optimizer"])
            self.loss_scaler = state_dict["loss_scaler"]
