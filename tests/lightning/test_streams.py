"""Data without indices: readers together take the samples of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from axonn_plugins.hosts.lightning import AxonnStrategy
from axonn_plugins.hosts.lightning.streams import dealt
from axonn_tp import Grid, Mesh
from tests.distributed import run_ranks
from tests.lightning.models import BATCH, TOKENS, VOCABULARY, Language

GRIDS: tuple[dict[str, Any], ...] = ({"gx": 2, "gz": 2}, {"gz": 4}, {"gx": 2, "gy": 2})


class Stream(IterableDataset):
    """Samples in order; `part`: those of one of several readers, which a script has divided itself."""

    def __init__(self, samples: int, part: tuple[int, int] = (0, 1)) -> None:
        self.samples, self.part = samples, part

    def __iter__(self) -> Iterator[Tensor]:
        data = torch.randint(VOCABULARY, (self.samples, TOKENS), generator=torch.Generator().manual_seed(3))
        return iter(data[self.part[0] :: self.part[1]])


class Sized(Stream):
    """One that knows its length."""

    def __len__(self) -> int:
        return len(range(self.part[0], self.samples, self.part[1]))


class Module(L.LightningModule):
    """Notes losses over readers, and how often it was validated."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.validated = Language(), 0
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, number: int) -> Tensor:
        loss = self.net(ids, ids)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
        return loss

    def validation_step(self, ids: Tensor, number: int) -> None:
        self.log("val", self.net(ids, ids), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated += 1

    def predict_step(self, ids: Tensor, number: int) -> Tensor:
        return self.net(ids)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(strategy: Any, kind: type[Stream], divided: bool = False) -> dict[str, Any]:
    """Two epochs with an accumulation, validations, predictions of a number of batches that no reader divides."""
    torch.manual_seed(1)
    module, world = Module(), dist.get_world_size() if dist.is_initialized() else 1
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = L.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=2, accumulate_grad_batches=2, **quiet
    )
    readers = trainer.world_size
    part = (trainer.strategy.reader, readers) if divided else (0, 1)
    size = BATCH // readers
    trainer.fit(module, DataLoader(kind(12, part), size), DataLoader(kind(8, part), size))
    val = trainer.callback_metrics["val"].item()
    predicted = trainer.predict(module, DataLoader(kind(5), 1))
    return {
        "losses": module.losses,
        "steps": trainer.global_step,
        "validated": module.validated,
        "val": val,
        "predicted": len(predicted or []),
    }


def every() -> tuple[list[Any], list[list[list[Any]]]]:
    fits = [fit(AxonnStrategy(**GRIDS[0]), *how) for how in ((Sized,), (Stream, True))]
    return [*fits, fit(AxonnStrategy(**GRIDS[1]), Stream)], [read(grid) for grid in GRIDS]


def read(grid: dict[str, Any]) -> list[list[Any]]:
    """First elements of what this rank reads: of five batches of two, without the last round, predicting, divided by the script, without tensors."""
    mesh = Mesh(Grid.for_world(4, **grid))
    readers, reader = mesh.size("batch"), mesh.rank("batch")
    numbers = torch.arange(10).split(1)
    streams: list[Any] = [
        DataLoader(_Listed(numbers), 2),
        DataLoader(_Listed(numbers), 2, drop_last=True),
        DataLoader(_Listed(numbers), 2),
        DataLoader(_Listed(numbers[reader::readers]), 2),
        DataLoader(_Listed(list("abc")), batch_size=None),
    ]
    found = []
    for number, stream in enumerate(streams):
        loader = dealt(stream, lambda: mesh, readers, predicting=number == 2)
        for _ in range(2):
            batches = [batch[0].item() if isinstance(batch, Tensor) else batch for batch in loader]
        found.append(batches)
        assert len(loader) == len(batches), (grid, number)
    mesh.destroy()
    return found


class _Listed(IterableDataset):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def test_readers_take_turns_and_leave_what_is_divided() -> None:
    wanted = {kind: fit("auto", kind) for kind in (Stream, Sized)}
    assert wanted[Stream]["validated"] == wanted[Sized]["validated"]
    ranks = run_ranks(every, 4)
    for fits, _ in ranks:
        for found in fits:
            assert found["losses"] == pytest.approx(wanted[Stream]["losses"], rel=2e-6)
            assert found["val"] == pytest.approx(wanted[Stream]["val"], rel=2e-6)
            assert all(found[key] == wanted[Stream][key] for key in ("steps", "validated"))
            assert found["predicted"] == 5
    read_by = [[found[number] for _, found in ranks] for number in range(len(GRIDS))]
    letters = ["a", "b", "c"]
    divided = [[0, 4, 8], [1, 5, 9]]
    one, other = ([0, 4, 8], [0, 4], [0, 2, 4, 6, 8]), ([2, 6, 8], [2, 6], [0, 2, 4, 6, 8])
    two = [[*one, divided[0], letters], [*other, divided[1], letters]]
    assert read_by[0] == [two[0], two[0], two[1], two[1]]
    four = [
        [[2 * rank, 8], [2 * rank], [0, 2, 4, 6, 8], [rank, rank + 8][: 1 + (rank < 2)], letters] for rank in range(4)
    ]
    assert read_by[1] == four
    assert read_by[2] == [[[0, 2, 4, 6, 8]] * 4 + [letters]] * 4
