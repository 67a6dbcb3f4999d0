"""``ckpt average``: combine the weights of several checkpoints into one."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.base.units import counted, size_text, some_of
from automodel_ckpt.checkpoint.files.layout import CheckpointName
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.cli.common.arguments import CHECKPOINT_NAME
from automodel_ckpt.cli.common.output import table
from automodel_ckpt.cli.models.import_ import finish, side_files_text, start_from
from automodel_ckpt.errors import EXIT_DONE, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.convert.merging.average import Average

_MAX_NAMES = 5


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise ArgumentTypeError(
            f"these are not numbers, separated by commas, such as 0.5,0.3,0.2: {text}"
        ) from error


USAGE = f"""
Combine the weights of several checkpoints, in any format that ckpt reads, into a checkpoint of weights. Arithmetic is
in float32; each tensor keeps its dtype. Config and tokenizer are copied from the first source. Names, shapes and
dtypes must agree.

sources + SOURCE         | a checkpoint, a run directory (its newest checkpoint), or a directory or file of another
  program
-o --output required RUN | run directory for the result
--last >=1 N             | average the newest N checkpoints of the run directory SOURCE
--weights W,W,...        | weight of each source (default: equal weights)
--ema DECAY              | exponential moving average: each source replaces 1 - DECAY of the average of those before it
--integers {{equal,first,last}} =equal | tensors of integers, bool and 8-bit floats must be equal (default), or are
  copied from one source
{CHECKPOINT_NAME.format("that of the newest source")}
--dry-run                | only print what would be averaged
"""
TYPES = {"--weights": _numbers, "--ema": float}


def run(arguments: Namespace) -> int:
    """Run ``ckpt average``: print what will be averaged, then average it."""
    from automodel_ckpt.convert.merging.average import prepare

    name = None
    if (arguments.step, arguments.epoch) != (None, None):
        name = CheckpointName(step=arguments.step or 0, epoch=arguments.epoch or 0)
    planned = prepare(
        _sources(arguments),
        Path(arguments.output).expanduser(),
        weights=arguments.weights,
        ema=arguments.ema,
        integers=arguments.integers,
        name=name,
    )
    finish(arguments, planned.checkpoint, _lines(planned), _document(planned), start_from)
    return EXIT_DONE


def _sources(arguments: Namespace) -> list[Path]:
    """Return the sources; with ``--last``, the sources in the run directory. Raises :class:`RecipeError`."""
    from automodel_ckpt.cli.common.paths import reject_several_runs, run_directory
    from automodel_ckpt.convert.merging.average import last_checkpoints

    sources = [Path(source).expanduser() for source in arguments.sources]
    for source in sources:
        if run_directory(source) is None:
            reject_several_runs(source)
    if arguments.last is None:
        return sources
    run = run_directory(sources[0])
    if len(sources) > 1 or run is None:
        value = ", ".join(arguments.sources)
        raise RecipeError("--last needs one run directory", "SOURCE", value)
    return last_checkpoints(run, arguments.last)


def _document(planned: Average) -> ValueDict:
    checkpoint = planned.checkpoint
    pairs = zip(planned.sources, planned.weights, strict=True)
    return {
        "sources": [{"path": str(path), "weight": weight} for path, weight in pairs],
        "num_tensors": len(checkpoint.weights.tensors),
        "nbytes": checkpoint.nbytes,
        "side_files": list(checkpoint.side_files),
        "copied": list(planned.copied),
        "left_out": list(checkpoint.left_out),
        "notes": list(planned.notes),
    }


def _lines(planned: Average) -> Iterator[str]:
    """Describe what will be averaged."""
    checkpoint = planned.checkpoint
    yield f"average -> {checkpoint.target}"
    pairs = zip(planned.weights, planned.sources, strict=True)
    rows = [(f"{weight:.4g}", str(path)) for weight, path in pairs]
    tensors = counted(len(checkpoint.weights.tensors), "tensor")
    rows.append(("weights", f"{tensors}, {size_text(checkpoint.nbytes)}"))
    rows.append(("other files", side_files_text(checkpoint)))
    if planned.copied:
        number = counted(len(planned.copied), "tensor")
        text = some_of(planned.copied, _MAX_NAMES)
        rows.append(("copied", f"{number} with differences: {text}"))
    if checkpoint.left_out:
        rows.append(("not included", ", ".join(checkpoint.left_out)))
    yield from table(rows)
    for note in planned.notes:
        yield f"note: {note}"
