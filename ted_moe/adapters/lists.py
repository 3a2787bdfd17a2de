"""Experts in lists, a module each: their parameters seen as stacks of all experts', and the lists dealt out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.checkpoint.dealt import Dealt, leave_out
from axonn_tp.grid.layout import Layout, layout_of
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.exports import in_shards, whole_tensor, wholes_of

EACH = "*"
"""Stands for an expert's number in the name of a stack."""


def numbered(listed: nn.Module) -> list[nn.Module]:
    """The experts of a list, without what else hangs on it."""
    return [child for name, child in listed._modules.items() if name.isdigit() and child is not None]


def lists_in(module: nn.Module) -> dict[str, nn.ModuleList]:
    """Lists of modules with parameters alike, none within another, by the prefix of their names."""
    found: dict[str, nn.ModuleList] = {}
    for name, one in module.named_modules():
        prefix = f"{name}." if name else ""
        within = any(_number(prefix, [other]) is not None for other in found)
        if isinstance(one, nn.ModuleList) and not within and alike(one):
            found[prefix] = one
    return found


def alike(held: nn.ModuleList | nn.ModuleDict) -> bool:
    """True if several modules have parameters of the same names and shapes."""
    modules = numbered(held) if isinstance(held, nn.ModuleList) else list(held.children())
    kinds = {tuple((name, tuple(p.shape)) for name, p in one.named_parameters()) for one in modules}
    return len(modules) > 1 and len(kinds) == 1 and kinds != {()}


def _number(name: str, lists: Collection[str]) -> tuple[str, int, str] | None:
    """The list that a name lies in, the expert's number, and the rest."""
    for prefix in lists:
        number, _, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number.isdigit():
            return prefix, int(number), rest
    return None


def stack_of(name: str, lists: Collection[str]) -> str:
    """The name of the stack that a parameter is in; its own where it is in no list."""
    at = _number(name, lists)
    return name if at is None else f"{at[0]}{EACH}.{at[2]}"


def stacks(module: nn.Module, lists: Mapping[str, nn.ModuleList]) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's parameters, of those in lists as one stack of all experts'."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters():
        at = _number(name, lists)
        before = () if at is None else (len(numbered(lists[at[0]])),)
        shapes.setdefault(stack_of(name, lists), (*before, *parameter.shape))
    return shapes


def each(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their own names, those of stacks expert by expert."""
    for name, tensor in parameters.items():
        before, star, after = name.partition(EACH)
        if not star:
            yield name, tensor
            continue
        for number, one in enumerate(tensor):
            yield f"{before}{number}{after}", one


def problem_of(lists: Mapping[str, nn.ModuleList]) -> str | None:
    """The reason why lists cannot be dealt out, whatever they compute."""
    if len({len(numbered(listed)) for listed in lists.values()}) > 1:
        return "holds lists of different lengths, so how many experts it has is not known"
    for prefix, listed in lists.items():
        experts, name = numbered(listed), prefix.removesuffix(".") or "itself"
        every = [id(p) for expert in experts for p in expert.parameters()]
        if len(set(every)) < len(every):
            return f"has experts in the list {name} that share a parameter, which would be another on each rank; give each its own"
        for expert in experts:
            kept = [key for key in expert.state_dict(keep_vars=True) if key not in dict(expert.named_parameters())]
            if kept:
                return f"has experts in the list {name} with the buffer {kept[0]}, which a checkpoint would hold of each; register it with persistent=False"
    return None


def deal(listed: nn.ModuleList, home: int, homes: int) -> None:
    """Keep one rank's experts of a list, numbered from 0; the others' parameters are marked as elsewhere."""
    experts = numbered(listed)
    here = len(experts) // homes
    for number, expert in enumerate(experts):
        if number // here != home:
            leave_out(expert.parameters())
    others = {name: child for name, child in listed._modules.items() if not name.isdigit()}
    kept = experts[home * here : (home + 1) * here]
    listed._modules = {str(number): expert for number, expert in enumerate(kept)} | others


class DealtExperts(Dealt):
    """This rank's experts of a list, whose `state_dict` gives and takes those of all ranks, whole.

    Attributes:
        mesh: the ranks on the experts' grid, along whose z they have different ones.
    """

    mesh: Mesh

    def __len__(self) -> int:
        """As many as all ranks have together, by which routers and losses count."""
        return len(self._modules) + self.each * (self.mesh.size("z") - 1)

    def __getitem__(self, index: Any) -> Any:
        """The expert of a number in the serial model.

        Raises:
            ValueError: it is another rank's.
        """
        numbers = range(self.each * self.mesh.size("z"))[index]
        found = []
        for number in numbers if isinstance(index, slice) else [numbers]:
            home, own = divmod(number, self.each)
            if home != self.home:
                first = self.home * self.each
                raise ValueError(
                    f"expert {number} of a list is another rank's under axonn.ted, and this one has those from {first} to {first + self.each - 1}; call "
                    "the module that holds the list with hidden states, expert indices and weights, or iterate over the list for this rank's"
                )
            found.append(self._modules[str(own)])
        return found if isinstance(index, slice) else found[0]

    def state_dict(self, *given: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """All experts by the serial model's names; every rank calls it.

        Raises:
            ValueError: parameters themselves are asked for, or not all ranks call it.
        """
        if in_shards():
            return super().state_dict(*given, destination=destination, prefix=prefix, keep_vars=keep_vars)
        if keep_vars:
            raise ValueError(
                f"state_dict(keep_vars=True) would hand out this rank's experts of {prefix.removesuffix('.')} alone; leave keep_vars out for all "
                "experts, or take these from named_parameters()"
            )
        destination = OrderedDict() if destination is None else destination
        wholes_of(destination, self.mesh)
        self._save_to_state_dict(destination, prefix, keep_vars)
        gathered = {(number, rest): self._of_all(p) for number, rest, p in self._own()}
        for home in range(self.mesh.size("z")):
            for (number, rest), wholes in gathered.items():
                destination[f"{prefix}{home * self.each + number}.{rest}"] = wholes[home]
        for name, child in self._modules.items():
            if child is not None and not name.isdigit():
                child.state_dict(destination=destination, prefix=f"{prefix}{name}.", keep_vars=keep_vars)
        return destination

    def _own(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """This rank's parameters with the expert's number here and the rest of the name."""
        for number, expert in enumerate(numbered(self)):
            for rest, parameter in expert.named_parameters():
                yield number, rest, parameter

    @torch.no_grad()
    def _of_all(self, parameter: nn.Parameter) -> list[Tensor]:
        """The whole parameters of all homes, on the CPU."""
        whole, homes = whole_tensor(parameter, layout_of(parameter), self.mesh), self.mesh.size("z")
        if homes == 1:
            return [whole.cpu()]
        wholes = [torch.empty_like(whole) for _ in range(homes)]
        dist.all_gather(wholes, whole, group=self.mesh.group("z"))
        return [one.cpu() for one in wholes]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if not in_shards():
            assign = local_metadata.get("assign_to_params_buffers", False)
            self._take(state_dict, prefix, assign, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _take(
        self,
        given: dict[str, Any],
        prefix: str,
        assign: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Put this rank's shards by its own names in the place of all experts' whole tensors."""
        listed = {key: given.pop(key) for key in list(given) if _number(key, [prefix]) is not None}
        shapes = {rest: torch.Size(layout_of(p).serial_shape) for _, rest, p in self._own()}
        every = range(self.each * self.mesh.size("z"))
        wanted = {f"{prefix}{number}.{rest}": shape for number in every for rest, shape in shapes.items()}
        missing += sorted(wanted.keys() - listed.keys())
        unexpected += sorted(listed.keys() - wanted.keys())
        for key in sorted(wanted.keys() & listed.keys()):
            if listed[key].shape != wanted[key]:
                errors.append(
                    f"size mismatch for {key}: copying a param with shape {listed.pop(key).shape} from checkpoint, the shape in current model is "
                    f"{wanted[key]}."
                )
        for number, rest, parameter in self._own():
            key, layout = f"{prefix}{self.home * self.each + number}.{rest}", layout_of(parameter)
            shard = parameter.detach()
            if key in listed:
                shard = layout.shard(listed[key].detach(), self.mesh.grid, self.mesh.coordinates)
            given[f"{prefix}{number}.{rest}"] = _marked(shard, parameter, layout) if assign else shard


def _marked(shard: Tensor, parameter: nn.Parameter, layout: Layout) -> nn.Parameter:
    made: Any = nn.Parameter(shard, parameter.requires_grad)
    made.axonn_layout = layout
    return made
