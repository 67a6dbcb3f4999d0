"""What the files of another program state about its run: the step and the epoch, and the training state.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.convert.formats.torch.training_state import (
    OptimizerState,
    Parameters,
    TrainingState,
)
from automodel_ckpt.convert.imports.file_names import NameMetadata, parse_name
from automodel_ckpt.convert.imports.import_source import ImportSource, check_not_sparse
from automodel_ckpt.convert.imports.names_file import Renaming
from automodel_ckpt.errors import CheckpointUnusable

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Position:
    """The step and the epoch in the name of an imported checkpoint, and where they were stated, in words."""

    step: int
    epoch: int
    origin: str


def position_of(source: ImportSource, step: int | None, epoch: int | None) -> Position:
    """Return the position that the user gave; else that in the files of the source; else that in its name."""
    if step is not None or epoch is not None:
        return Position(step or 0, epoch or 0, "as given")
    for path, known in source.states():
        stated = known.counters(path)
        if stated.step is not None or stated.epoch is not None:
            return Position(stated.step or 0, stated.epoch or 0, "stated in the files")
    named = parse_name(source.path.name)
    if named.step is not None or named.epoch is not None:
        return Position(named.step or 0, named.epoch or 0, "stated in the name")
    return Position(0, 0, "")


def training_state_of(
    source: ImportSource,
    parameters: Callable[[Path], Parameters],
    *,
    config: Path | None,
    renaming: Renaming | None,
) -> tuple[Path, TrainingState]:
    """Return the training state of the source, and the path that has it.

    *parameters* is called with the directory of config.json, by default that of the source, and returns a function that
    lists the model's parameters. *renaming* has the names that a file of the user gives.

    Raises :class:`CheckpointUnusable` if there is no training state that can be imported.
    """
    directory = config or _directory_of_config(source)
    kinds = []
    for path, known in source.states():
        state = known.training_state(path, parameters(directory))
        if state is None:
            kinds.append(known.training_left(path) or known.name)
            continue
        state = _completed(state, parse_name(source.path.name))
        if renaming is not None:
            renaming.check(state)
            state = replace(state, omitted=(*state.omitted, *renaming.left_out))
        if state.optimizer is not None:
            check_not_sparse(_optimizer_tensors(state.optimizer))
        return path, state
    raise CheckpointUnusable(
        "there is no training state that can be imported",
        where=str(source.path),
        value=", ".join(kinds) or "no known format",
        hint="import the weights without --training-state; runs of transformers' Trainer, Lightning and NeMo "
        "AutoModel, and of PyTorch DCP if the optimizer has the names of the weights, can be continued",
    )


def _directory_of_config(source: ImportSource) -> Path:
    """Return the directory in which the source's config.json is looked for."""
    if (source.directory / _CONFIG).is_file():
        return source.directory
    return source.run_directory


def _completed(state: TrainingState, named: NameMetadata) -> TrainingState:
    """Return the training state with the counters that only the name of the source states."""
    samples = state.consumed_samples
    if samples is None:
        samples = named.consumed_samples
    return replace(
        state,
        step=named.step if state.step is None else state.step,
        epoch=named.epoch if state.epoch is None else state.epoch,
        consumed_samples=samples,
    )


def _optimizer_tensors(optimizer: OptimizerState) -> Tensors:
    """Return all tensors of an optimizer's state, for checks of their files."""
    tensors: dict[str, Tensor] = {}
    for name, entries in optimizer.tensors.items():
        for entry, tensor in entries.items():
            tensors[f"{name}.{entry}"] = tensor
    return Tensors(optimizer.root, tensors)
