"""Consolidation: convert the shards of a checkpoint to the files that Hugging Face's loaders read.

    report = consolidate("checkpoints/epoch_0_step_20")        # or its model/
    report.output                                              # .../model/consolidated

The steps are: open the source, verify everything but the tensors, plan (without side effects), write all files to a
staging directory beside the target and verify the tensors meanwhile, flush the files to disk, rename the directory. An
earlier export is unchanged until the last step. Imports no torch, and numpy only for casts and interleaved slices.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.copy_engine import DamagedSlice, write_weights
from automodel_ckpt.checkpoint.export.files import (
    Check,
    Log,
    cast_lines,
    check_target,
    resolved_target,
    side_files,
    staged,
    write_manifest,
    write_side_files,
)
from automodel_ckpt.checkpoint.export.next_steps import consolidate_script
from automodel_ckpt.checkpoint.export.plan import make_plan, parse_cast_dtype
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.options import Level
from automodel_ckpt.checkpoint.parts.slices import Slice
from automodel_ckpt.checkpoint.parts.verify import files_covered_by_slices, verify
from automodel_ckpt.checkpoint.sources.source import Source, maps_of, open_checkpoint
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, Problem, RecipeError, unusable

__all__ = ["ConsolidationReport", "consolidate", "consolidate_script"]

log_default = logging.getLogger("automodel_ckpt")


@dataclass(frozen=True)
class ConsolidationReport:
    """An export that was published: its directory *output*, and the number of files, tensors and bytes of the weights.

    *casts* has the number of tensors that were cast, by (from, to) dtype code. *checked* is whether the source has
    digests, which were compared.
    """

    output: Path
    num_files: int
    num_tensors: int
    nbytes: int
    seconds: float
    checked: bool = True
    casts: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def consolidate(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    cast_dtype: str | None = None,
    num_threads: int = 5,
    num_procs: int = 1,
    keep_dtypes: bool = False,
    log: Log = log_default.info,
    before_publishing: Check = lambda: None,
    opener: Callable[[Path], Source] = open_checkpoint,
) -> ConsolidationReport:
    """Export the model in *source*, a checkpoint or its ``model/``, as Hugging Face files.

    With the *opener* ``open_source`` of ``convert/open.py``, *source* can also be a directory of another program.
    *output* defaults to ``consolidated`` in the model's directory (a model that is Hugging Face files already is only
    checked then); *cast_dtype* is one of bf16, fp16, fp32, fp64 or a long name. Without it, tensors have the dtypes of
    the base, or with *keep_dtypes* of the checkpoint. There are *num_threads* times *num_procs* threads. *log*
    gets a line for each warning and each kind of cast; an exception that *before_publishing* raises ends the export.

    Raises :class:`CheckpointUnusable` for a source that is damaged, incomplete or does not match its base,
    :class:`SaveFailed` if the output cannot be written, and :class:`RecipeError` for a wrong argument. In each case
    nothing was written, and an earlier export is unchanged.
    """
    started = time.monotonic()
    threads = _num_threads(num_procs, num_threads)
    cast_code = parse_cast_dtype(cast_dtype)
    opened = opener(Path(source))
    _check_needs_consolidation(opened)
    if opened.finished and output is None and cast_code is None:
        if problems := _problems(opened, threads, "digest"):
            raise CheckpointUnusable.all_of(problems)
        log(
            f"nothing to do: the files in {opened.model_directory} are already in Hugging Face format"
        )
        tensors = opened.tensors.values()
        num_files = len({tensor.slices[0].file for tensor in tensors})
        nbytes = sum(tensor.nbytes for tensor in tensors)
        seconds = time.monotonic() - started
        return ConsolidationReport(opened.model_directory, num_files, len(tensors), nbytes, seconds)
    target = resolved_target(output, opened.model_directory / layout.CONSOLIDATED)
    check_target(target)
    _check_source(opened, threads)
    maps = maps_of(opened)
    plan = make_plan(
        opened.tensors,
        opened.tied,
        dataclasses.replace(maps, dtype=None) if keep_dtypes else maps,
        cast_dtype=cast_code,
        where=str(opened.model_directory),
    )
    beside, its_warnings = side_files(opened, plan, maps)
    warnings = (*opened.notes, *plan.warnings, *its_warnings)
    for text in [*(f"warning: {text}" for text in warnings), *cast_lines(plan.casts)]:
        log(text)
    with staged(target, log, before_publishing=before_publishing) as staging:
        try:
            parts = write_weights(opened.root, staging, plan.files, threads)
        except DamagedSlice as damaged:
            raise _damaged(opened, damaged.stored, threads) from None
        write_side_files(beside, staging)
        write_manifest(plan, opened, staging, parts)
    return ConsolidationReport(
        target,
        len(plan.files),
        len(plan.tensors),
        plan.nbytes,
        time.monotonic() - started,
        opened.manifest is not None,
        plan.casts,
        warnings,
    )


_MAX_WORKERS = 1024


def _num_threads(num_procs: int, num_threads: int) -> int:
    for name, value in (
        ("--nproc (NPROC_PER_NODE)", num_procs),
        ("--num-threads (NUM_THREADS)", num_threads),
    ):
        if not 1 <= value <= _MAX_WORKERS:
            raise RecipeError(
                "not a number of workers",
                where=name,
                value=value,
                hint=f"give a number from 1 to {_MAX_WORKERS}",
            )
    return num_procs * num_threads


def adapter_of_another_program(directory: Path) -> CheckpointUnusable:
    """Return the error of an export of the adapter in *directory*, which another program saved."""
    return unusable(
        "this is an adapter, not a complete model",
        directory,
        layout.ADAPTER_MODEL,
        "peft loads this directory as it is; to merge it with its base, import it with `ckpt import DIR RUN`, "
        "then `ckpt export RUN --merge`",
    )


def _check_needs_consolidation(source: Source) -> None:
    if layout.ADAPTER_MODEL in source.files:
        raise adapter_of_another_program(source.model_directory)
    if source.finished and source.manifest is None:
        raise unusable(
            "these are complete Hugging Face files, not shards: they need no consolidation",
            source.model_directory,
            counted(len(source.files), "file"),
            "use the directory as it is",
        )


def _check_source(source: Source, num_threads: int) -> None:
    """Verify the files of *source*, except for the bytes of slices, which are verified while they are copied.

    Raises :class:`CheckpointUnusable` with all problems.
    """
    if source.manifest is None:
        return
    if problems := _problems(source, num_threads, "size"):
        raise CheckpointUnusable.all_of(problems)
    # Slices are verified during the copy, except the slices of whole files, which come from headers without digests.
    # After damage here, all files are compared, to report all damage.
    copied = set() if source.finished else files_covered_by_slices(source.root, source.manifest)
    if _problems(source, num_threads, "digest", copied):
        raise CheckpointUnusable.all_of(_problems(source, num_threads, "digest"))


def _problems(
    source: Source, num_threads: int, level: Level, without: Set[str] = frozenset()
) -> list[Problem]:
    assert source.manifest is not None
    files = {path: record for path, record in source.manifest.files.items() if path not in without}
    manifest = dataclasses.replace(source.manifest, files=files)
    return verify(source.root, manifest, level, num_threads=num_threads)


def _damaged(source: Source, damaged: Slice, num_threads: int) -> AutomodelError:
    """Return the error that stopped the copy, with all other damage in the source."""
    if problems := _problems(source, num_threads, "digest"):
        return CheckpointUnusable.all_of(problems)
    return unusable(
        "a slice changed while it was read",
        source.root / damaged.file,
        f"tensor {damaged.fqn} (slice at {list(damaged.offsets)})",
        "check for another program that writes there or for faulty memory, then export again",
    )
