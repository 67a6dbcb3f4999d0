"""The training state of another program as the state of a run of this program. Imports no torch.

An imported checkpoint has the optimizer, the LR schedule and the step counters under the names that the recipes of this
program use, so that ``ckpt-train`` continues from it. The position in the data follows from the counters when the run
continues, since it depends on the recipe's data set, and random numbers are drawn anew: no program can read another
one's random state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.jobs.described_tree import DescribedTree
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob, RankManifest, merge_tree
from automodel_ckpt.checkpoint.parts.manifest import NOT_SAVED, StateRecord, Tree
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.pickles.dcp_metadata import KeyPath
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import plain_archive
from automodel_ckpt.checkpoint.sources.source import MODEL
from automodel_ckpt.convert.formats.format import (
    OptimizerState,
    TrainingState,
)
from automodel_ckpt.errors import unusable

# The format of the optimizer's tree, as checkpoint/formats/rank_files.py names it.
_FORMAT = "torch_save"
OPTIMIZER = "optimizer"
SCHEDULE = "lr_scheduler"
COUNTERS = "step_scheduler"
DATA = "dataloader"
RANDOM = "rng"
"""Attributes of the recipes (``automodel_ckpt/training/recipe.py``), as checkpoints name them."""
_ADAM_ENTRIES = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
# What OneCycleLR (torch 2.13) adds to each parameter group.
_CYCLE_OPTIONS = ("max_lr", "min_lr", "max_momentum", "base_momentum")
# The options of torch.optim.AdamW (2.13) and their values in the recipes' default optimizer.
_ADAM_OPTIONS: Values = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}
# What another program's implementation of Adam stores under these names has the same meaning.
_TRANSFERRED = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "decoupled_weight_decay",
    "initial_lr",
)


@dataclass(frozen=True)
class TrainingImport:
    """What is written of a training state: *state* with its optimizer under the model's names, at *step* and *epoch*.

    *schedule* is the state of the LR scheduler as it is written, None when the source has none.
    """

    state: TrainingState
    step: int
    epoch: int
    schedule: Values | None

    @property
    def nbytes(self) -> int:
        """The bytes of the optimizer's tensors."""
        optimizer = self.state.optimizer
        states = optimizer.tensors.values() if optimizer is not None else ()
        return sum(tensor.nbytes for entries in states for tensor in entries.values())

    @property
    def contents(self) -> list[str]:
        """What is imported, in words."""
        found = []
        optimizer = self.state.optimizer
        if optimizer is not None:
            entries = sorted({entry for each in optimizer.tensors.values() for entry in each})
            moments = "without moments"
            if entries:
                number = counted(len(optimizer.tensors), "parameter")
                moments = f"{number}: {', '.join(entries)}"
            found.append(f"optimizer ({moments})")
            if optimizer.names_from:
                found.append(f"names of its parameters {optimizer.names_from}")
        if self.schedule is not None:
            steps = counted(self.schedule["last_epoch"], "step")
            found.append(f"learning-rate schedule (after {steps})")
        found += [f"step {self.step}", f"epoch {self.epoch}"]
        if self.state.consumed_samples is not None:
            found.append(f"{self.state.consumed_samples} consumed samples")
        return found

    @property
    def absent(self) -> list[str]:
        """What the checkpoint does not contain, in words; a run that continues starts with new values."""
        samples = "consumed samples (computed from the step and the recipe's batch size)"
        parts = {
            "optimizer": self.state.optimizer,
            "learning-rate schedule": self.schedule,
            samples: self.state.consumed_samples,
        }
        found = [name for name, value in parts.items() if value is None]
        return [*found, "data order", "random numbers", "consumed tokens"]

    def records(self) -> dict[str, StateRecord]:
        """The manifest's records of all attributes but the model."""
        optim = f"{layout.state_directory(OPTIMIZER)}/"
        counters = layout.state_file(COUNTERS)

        def scope(value: object) -> str:
            return "replicated" if value is not None else NOT_SAVED

        return {
            OPTIMIZER: StateRecord("optimizer", scope(self.state.optimizer), optim),
            SCHEDULE: StateRecord("lr_scheduler", scope(self.schedule), optim),
            COUNTERS: StateRecord("object", "replicated", counters, (counters,)),
            DATA: StateRecord("object", NOT_SAVED, f"{DATA}/"),
            RANDOM: StateRecord("object", NOT_SAVED, f"{RANDOM}/"),
        }


def training_import(
    state: TrainingState,
    *,
    where: Path,
    step: int | None,
    epoch: int | None,
) -> TrainingImport:
    """Complete a training state for a checkpoint.

    *step* and *epoch* are the user's values, for a source that does not state them. Raises
    :class:`CheckpointUnusable` if there is no step.
    """
    for option, given, stated in (("--step", step, state.step), ("--epoch", epoch, state.epoch)):
        if given is not None and stated is not None and given != stated:
            raise unusable(
                f"{option} contradicts the training state",
                where,
                f"{given}; the source states {stated}",
                f"remove {option}, or import without --training-state",
            )
    final_step = step if state.step is None else state.step
    final_epoch = epoch if state.epoch is None else state.epoch
    if final_step is None:
        raise unusable(
            "the source does not state its step, and a run continues after one",
            where,
            "no step",
            "add --step S, the number of optimizer steps that were taken",
        )
    return TrainingImport(state, final_step, final_epoch or 0, _schedule(state, final_step))


def _schedule(state: TrainingState, step: int) -> ValueDict | None:
    """Return the state that a schedule of transformers (LambdaLR, torch 2.13) has after *step* steps.

    The shape of the schedule comes from the recipe. The position and the base rates come from the source. Returns None
    when the source has no schedule, or does not state the base rates.
    """
    if state.scheduler is None or state.optimizer is None:
        return None
    groups = state.optimizer.groups
    # Under OneCycleLR (torch 2.13), `initial_lr` is the rate of the first step, and `max_lr` the peak.
    rates = [group.options.get("max_lr", group.options.get("initial_lr")) for group in groups]
    stated = state.scheduler.get("base_lrs")
    if None in rates and isinstance(stated, list | tuple) and len(stated) == len(groups):
        rates = list(stated)
    if any(type(rate) not in (int, float) or not math.isfinite(rate) for rate in rates):
        return None
    last_rates = [group.options.get("lr", 0.0) for group in groups]
    return lambda_schedule([float(rate) for rate in rates], last_rates, step)


def lambda_schedule(
    base_rates: Sequence[float], last_rates: Sequence[float], step: int
) -> ValueDict:
    """Return the state of a LambdaLR (torch 2.13), such as the schedules of transformers, after *step* steps."""
    return {
        "base_lrs": base_rates,
        "last_epoch": step,
        "_step_count": step + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": last_rates,
        "lr_lambdas": [None] * len(base_rates),
    }


# ---------------------------------------------------------------- writing


def training_jobs(planned: TrainingImport) -> Iterator[FileJob]:
    """Yield the jobs of the counters and the optimizer."""
    # The state of training/counters/step_scheduler.py.
    counters = {
        "step": planned.step,
        "epoch": planned.epoch,
        "epochs_done": planned.epoch,
        "consumed_samples": planned.state.consumed_samples or 0,
        "consumed_tokens": 0,
        "elapsed_seconds": 0.0,
        "planned_steps": None,
        "best": None,
        "validation_is_due": False,
        "save_was_due": False,
    }
    data = plain_archive(counters)
    yield FileJob(layout.state_file(COUNTERS), [Chunk(0, data)], nbytes=len(data))
    if planned.state.optimizer is not None:
        yield from _tree(planned.state.optimizer, planned.schedule).jobs()


def written_optimizer(written: RankManifest) -> Tree:
    """Return the tree of the optimizer as :func:`training_jobs` wrote it."""
    return merge_tree(OPTIMIZER, Tree(_FORMAT, {}, {}), [written])


def _tree(optimizer: OptimizerState, schedule: Values | None) -> DescribedTree:
    all_entries = {entry for entries in optimizer.tensors.values() for entry in entries}
    is_adam = "exp_avg" in all_entries and all_entries <= _ADAM_ENTRIES
    # NAdam and RAdam have moments of these names, too. All classes of torch.optim (2.13) with such moments have
    # `differentiable`, and only Adam and AdamW `amsgrad`.
    is_adam = is_adam and all(
        "amsgrad" in group.options or "differentiable" not in group.options
        for group in optimizer.groups
    )
    stored: dict[KeyPath, Tensor] = {}
    numbers: dict[KeyPath, float] = {}
    for name, entries in optimizer.tensors.items():
        path = (OPTIMIZER, "state", f"{MODEL}.{name}")
        for entry, number in optimizer.values.get(name, {}).items():
            numbers[*path, entry] = float(number)
        for entry, tensor in entries.items():
            stored[*path, entry] = tensor
    objects: dict[KeyPath, Any] = {}
    for number, group in enumerate(optimizer.groups):
        options = _adam_options(group.options) if is_adam else dict(group.options)
        for option in (*_CYCLE_OPTIONS, "initial_lr"):
            options.pop(option, None)
        if schedule is not None:
            options["initial_lr"] = schedule["base_lrs"][number]
        options["params"] = [f"{MODEL}.{name}" for name in group.parameters]
        for option, value in options.items():
            objects[OPTIMIZER, "param_groups", number, option] = value
    if schedule is not None:
        objects[SCHEDULE,] = (dict(schedule),)
    directory = layout.state_directory(OPTIMIZER)
    return DescribedTree(OPTIMIZER, directory, optimizer.root, stored, numbers, objects)


def _adam_options(given: Values) -> ValueDict:
    """Return the options of the recipes' AdamW, with the values that another implementation has for them."""
    transferred = {name: given[name] for name in _TRANSFERRED if given.get(name) is not None}
    options = {**_ADAM_OPTIONS, **transferred}
    return {**options, "betas": tuple(options["betas"])}
