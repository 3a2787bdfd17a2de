"""Saving and loading as every engine of ours does: complete or absent, verified on all ranks together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.complete import begin, everyone, find, nothing_in, publish
from axonn_tp.checkpoint.files import abandon


class CheckedCheckpoints(DeepSpeedEngine):
    """The part of an engine that saves and loads; what is in a checkpoint is in `_write` and `_read`."""

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        **keywords: Any,
    ) -> bool:
        """DeepSpeed's files and ours, complete or absent; every rank calls it.

        They are written aside with a checksum of every byte, then renamed; the name in ``latest`` changes last. Without frozen parameters, as
        the Trainer saves models of PEFT, they are read by ``load_module_strict=False``.

        Raises:
            ConfigError: ranks name different folders or tags, or it cannot be written; the same on every rank.
        """
        tag = str(tag if tag is not None else f"global_step{self.global_steps}")
        aside, mark = begin(save_dir, tag)
        keywords |= {"exclude_frozen_parameters": True} if exclude_frozen_parameters else {}
        try:
            with self._told_together():
                self._write(save_dir, aside, client_state or {}, **keywords)
            publish(save_dir, tag, save_latest, mark)
        except ConfigError:
            if dist.get_rank() == 0:  # a full disk needs its place
                abandon(Path(save_dir) / tag, mark)
            raise
        return True

    @contextmanager
    def _told_together(self) -> Iterator[None]:
        """Raise on all ranks what DeepSpeed's files cannot take on one, when the others have come through DeepSpeed's barriers.

        Raises:
            ConfigError: a file that cannot be written.
        """
        failed: list[str] = []
        save = self.checkpoint_engine.save

        def held_back(state_dict: Any, path: str) -> None:
            try:
                save(state_dict, path)
            except Exception as error:
                failed.append(why_unwritten(path, error))

        def tell() -> None:
            if failed:
                raise ConfigError(failed[0])

        self.checkpoint_engine.save = held_back
        try:
            yield
        finally:
            del self.checkpoint_engine.save
        everyone(tell)

    def _write(self, save_dir: str, tag: str, client_state: dict, **keywords: Any) -> None:
        super().save_checkpoint(save_dir, tag, client_state, save_latest=False, **keywords)

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *rest: Any, **keywords: Any) -> tuple:
        """Load what `save_checkpoint` wrote, once its bytes are found as they were written; every rank calls it.

        As DeepSpeed's, it returns (None, {}) where there is none; rank 0 then says so.

        Raises:
            ConfigError: there is none of that name, it is damaged, or does not fit; one sentence, the same on every rank.
        """
        if not self.load_universal_checkpoint():  # what DeepSpeed's converter wrote has no sums
            tag = find(load_dir, tag)
            if tag is None and (said := nothing_in(load_dir)) and dist.get_rank() == 0:
                logger.warning(said)
        found = self._read(load_dir, tag, *rest, **keywords)
        if tag is not None:
            self._after_loading()
        return found

    def _after_loading(self) -> None:
        """Called when a checkpoint has been read."""

    def _read(self, load_dir: str, tag: str | None, *rest: Any, **keywords: Any) -> tuple:
        return super().load_checkpoint(load_dir, tag, *rest, **keywords)


def why_unwritten(path: str, error: Exception) -> str:
    """The sentence on a file that DeepSpeed could not write, and what to do.

    Args:
        path: the file.
        error: what it ended with.
    """
    said = getattr(error, "strerror", None) or " ".join(str(error).split())
    if isinstance(error, OSError) or "inline_container" in said or "PytorchStreamWriter" in said:
        return f'"{path}" cannot be written ({said}); make room for it, or save elsewhere'
    if isinstance(error, PickleError | TypeError | RecursionError) or "pickle" in said.casefold():
        return f'"{path}" cannot be written ({said}); leave out of client_state what cannot be pickled'
    return f'"{path}" cannot be written ({type(error).__name__}: {said}); save without client_state, which tells if that is at fault'
