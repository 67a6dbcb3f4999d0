"""``ckpt average``: combine the weights of several checkpoints into one. Imports no torch.

Sources are whatever ``convert/open.py`` reads. The result is a complete checkpoint of weights in a run directory,
written and published in the same way as an import. Tensors are combined block by block, so that memory does not grow
with the model. ``average_sources.py`` compares the sources and computes the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.plan import make_plan
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.sources.opening import MODEL
from automodel_ckpt.convert.imports.new_checkpoint import (
    NewCheckpoint,
    check_free,
    write_checkpoint,
)
from automodel_ckpt.convert.merging.average_sources import (
    AveragedTensors,
    AverageOptions,
    averaged_types,
    check_consistent,
    check_unaveraged,
    model_in,
    side_files_and_notes,
    weights_of,
)
from automodel_ckpt.convert.open import Weights, open_weights
from automodel_ckpt.errors import CheckpointUnusable


@dataclass(frozen=True, slots=True)
class Average:
    """A planned average: the checkpoint to write, its *sources* with their *weights*, and the number of tensors.

    *copied* names the tensors that differ and are copied from one source.
    """

    checkpoint: NewCheckpoint
    sources: Sequence[Path]
    weights: Sequence[float]
    num_tensors: int
    copied: Sequence[str]
    notes: Sequence[str]


def last_checkpoints(run: Path, count: int) -> list[Path]:
    """Return the newest *count* complete checkpoints of a run directory, the oldest first.

    Raises :class:`CheckpointUnusable` if there are fewer.
    """
    found = [run / record.name for record in resume.records(run, "")]
    if len(found) < count:
        raise CheckpointUnusable(
            f"there are fewer than {count} complete checkpoints to average",
            where=str(run),
            value=counted(len(found), "checkpoint"),
            hint="average fewer, or keep more of them (checkpoint.keep_last)",
        )
    return found[:count][::-1]


def prepare(
    sources: Sequence[Path],
    run: Path,
    options: AverageOptions,
    *,
    name: layout.CheckpointName | None = None,
) -> Average:
    """Open *sources*, check that they can be averaged, and plan the checkpoint *name* in the run directory *run*.

    Writes nothing. Without *name*, it is that of the newest source that is a checkpoint of this program. Raises
    :class:`RecipeError` for options that contradict each other, and :class:`CheckpointUnusable` if a source has no
    weights, or if the sources differ, see :func:`check_consistent`.
    """
    weights = weights_of(options, len(sources))
    opened = [open_weights(source) for source in sources]
    modules = [model_in(weights_in) for weights_in in opened]
    for source, module in zip(sources[1:], modules[1:], strict=True):
        check_consistent(modules[0], module, opened[0].path, source)
    copied = check_unaveraged(modules, options.integers)
    name = name or _newest_name(opened)
    side_files, notes = side_files_and_notes(opened)
    plan = make_plan(
        averaged_types(modules),
        {},
        BaseMaps(is_adapter=layout.ADAPTER_CONFIG in side_files),
        where=str(sources[0]),
    )
    check_free(run, name)
    merge = AveragedTensors(modules, weights, options.integers)
    checkpoint = NewCheckpoint(
        source=opened[0].path,
        kind=f"average of {len(sources)} checkpoints",
        weights=modules[0],
        plan=plan,
        side_files=side_files,
        other_files={},
        losses={},
        run=run,
        name=name,
        left_out=_left_out(opened),
        contents=merge.blocks,
        lineage=_lineage(opened, weights, options),
    )
    return Average(
        checkpoint,
        [weights_in.path for weights_in in opened],
        weights,
        len(modules[0].tensors),
        copied,
        notes,
    )


def run_average(planned: Average) -> Path:
    """Write and publish the checkpoint that :func:`prepare` planned, and return its path.

    Raises :class:`SaveFailed` if it cannot be written, and :class:`CheckpointUnusable` if a source is damaged; then
    nothing of it remains.
    """
    return write_checkpoint(planned.checkpoint)


def _newest_name(opened: Sequence[Weights]) -> layout.CheckpointName:
    """Return the name of the newest source that is a checkpoint of this program; step 0 if there is none."""
    names = [layout.CheckpointName(step=0, epoch=0)]
    for weights_in in opened:
        if weights_in.checkpoint is not None:
            summary = Summary.read(weights_in.checkpoint)
            names.append(layout.CheckpointName(step=summary.step, epoch=summary.epoch))
    return max(names)


def _left_out(opened: Sequence[Weights]) -> tuple[str, ...]:
    """Name what the sources contain beside the averaged weights."""
    names: dict[str, None] = {}
    for weights_in in opened:
        for module in weights_in.modules:
            if module != MODEL:
                names[f"module {module}"] = None
        for text in weights_in.omitted:
            names[text] = None
    return tuple(names)


def _lineage(
    opened: Sequence[Weights], weights: Sequence[float], options: AverageOptions
) -> dict[str, Any]:
    """Describe the average for the manifest: the sources with their weights, and the options that were used."""
    sources = []
    for weights_in, weight in zip(opened, weights, strict=True):
        source: dict[str, Any] = {"path": str(weights_in.path), "weight": weight}
        if weights_in.checkpoint is not None:
            source["manifest"] = Summary.read(weights_in.checkpoint).digest
        sources.append(source)
    lineage: dict[str, Any] = {"averaged_from": sources}
    if options.ema is not None:
        lineage["average_ema"] = options.ema
    return lineage


def sources_in(average: Summary) -> list[str | None]:
    """Return the digests of the manifests of the checkpoints that an average was made from, None for other sources."""
    sources = average.lineage.get("averaged_from")
    if not isinstance(sources, list):
        return []
    digests: list[str | None] = []
    for source in sources:
        digests.append(source.get("manifest") if isinstance(source, dict) else None)
    return digests
