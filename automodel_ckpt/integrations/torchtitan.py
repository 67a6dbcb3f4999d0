"""Checkpoints for torchtitan: :class:`CheckpointManager` takes the place of torchtitan's in a trainer's config.

    from automodel_ckpt.integrations.torchtitan import CheckpointManager

    config.checkpoint = CheckpointManager.Config(enable=True, folder="run", interval=100, keep_latest_k=2)

The interface is the one of torchtitan 0.3 (torchtitan/components/checkpointer/base.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer import BaseCheckpointManager

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.integrations.state import gloo_group

__all__ = ["CheckpointManager"]

_NOT_SUPPORTED = (
    "initial_load_path",
    "initial_load_in_hf",
    "last_save_in_hf",
    "exclude_from_loading",
    "create_seed_checkpoint",
)
"""Fields of the config that must be empty or false."""
_OTHER = "use torchtitan's own manager for this run"


class _OfEachRank:
    """An object with other state on each data-parallel rank."""

    checkpoint_scope = "dp_rank"

    def __init__(self, inner: Any) -> None:
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoint manager with this program's checkpoints: saved asynchronously, verified when loaded.

    A save has the model, the optimizer, the schedule, the data loader, the train state and the random state of each
    rank; the last one, too (``last_save_model_only`` is not used). Supports models in one part: no pipeline stages.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The config of torchtitan's managers."""

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: Sequence[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        _check(config, model_parts, optimizers)
        self.save_future = None
        self.interval = config.interval
        self._saves = not config.load_only
        self._saves_first = config.enable_first_step_checkpoint
        self._directory = Path(base_folder, config.folder)
        self._options = CheckpointOptions(is_async=True, keep_last=config.keep_latest_k or None)
        self._checkpointer: Checkpointer | None = None
        self._group = gloo_group()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._state = {
            "model": model_parts[0],
            "optimizer": next(iter(optimizers)),
            "lr_scheduler": next(iter(lr_schedulers)),
            **states,
            "random_state": StatefulRNG(0, rank, reseed=False),
        }
        if dataloader is not None:
            self._state["dataloader"] = _OfEachRank(dataloader)

    def _load(self, step: int = -1) -> bool:
        name = None if step < 0 else str(self._directory / f"epoch_0_step_{step}")
        options = replace(self._options, restore_from=name)
        self._checkpointer = Checkpointer(self._directory, group=self._group, options=options)
        if self._saves:
            self._checkpointer.open()
        return self._checkpointer.load(self._state) is not None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        is_due = last_step or curr_step % self.interval == 0
        if not self._saves or not (is_due or (curr_step == 1 and self._saves_first)):
            return False
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(
                self._directory, group=self._group, options=self._options
            )
        self._checkpointer.save(self._state, step=curr_step, epoch=0, last=last_step)
        if last_step:
            self._checkpointer.wait_for_save()
        return True

    def _wait_for_saving(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.wait_for_save()

    def _maybe_wait_for_staging(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.await_copies()

    def _close(self) -> None:
        checkpointer, self._checkpointer = getattr(self, "_checkpointer", None), None
        if checkpointer is not None:
            checkpointer.close()


def _check(config: Any, model_parts: Sequence[nn.Module], optimizers: Any) -> None:
    """Raise :class:`RecipeError` for what this manager does not do."""
    for name in _NOT_SUPPORTED:
        if getattr(config, name):
            raise RecipeError(
                "the checkpoint manager of automodel_ckpt does not do this",
                where=f"checkpoint.{name}",
                value=getattr(config, name),
                hint=_OTHER,
            )
    if len(model_parts) != 1 or len(list(optimizers)) != 1:
        raise RecipeError(
            "the checkpoint manager of automodel_ckpt saves models in one part, with one optimizer",
            where="parallelism",
            value=f"{len(model_parts)} parts of the model, {len(list(optimizers))} optimizers",
            hint=_OTHER,
        )
