"""``ckpt export --to hf``: Hugging Face files, optionally with an adapter merged into its base."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.cli.common.arguments import without_effect
from automodel_ckpt.cli.common.terminal import print_path, size_text
from automodel_ckpt.cli.targets.target import CAST_DTYPE, NUM_THREADS, Option, Target, log
from automodel_ckpt.errors import RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.export.consolidate import ConsolidationReport

NPROC = Option(
    "--nproc", "number of processes (default: 1)", {"type": int, "default": 1, "metavar": "N"}
)
MERGE = Option(
    "--merge",
    "merge the adapter into its base model (default of OUT: merged/ in the model's directory)",
    {"action": "store_true"},
)
BASE = Option(
    "--base",
    "with --merge: directory of the base model, if it was moved",
    {"metavar": "BASE"},
)


def export_hf(
    source: str | os.PathLike[str],
    output: str | None,
    *,
    cast_dtype: str | None,
    num_procs: int,
    num_threads: int,
    print_output: bool = True,
) -> ConsolidationReport:
    """Export *source* to Hugging Face files and log to standard error.

    With *print_output*, prints the output directory on standard output.
    """
    from automodel_ckpt.checkpoint.export.consolidate import consolidate
    from automodel_ckpt.checkpoint.export.next_steps import hf_lines
    from automodel_ckpt.convert.open import open_source

    report = consolidate(
        source,
        output,
        cast_dtype=cast_dtype,
        num_threads=num_threads,
        num_procs=num_procs,
        log=log,
        opener=open_source,
    )
    log(_summary(report))
    if print_output:
        print_path(report.output)
        for line in hf_lines(Path(report.output)):
            log(line)
    return report


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    if arguments.merge:
        return _run_merge(arguments, source)
    if arguments.base is not None:
        raise _unused(arguments, BASE, "hf without --merge")
    report = export_hf(
        source,
        arguments.output,
        cast_dtype=arguments.cast_dtype,
        num_procs=arguments.nproc,
        num_threads=arguments.num_threads,
        print_output=not arguments.json,
    )
    return _document(report)


def _run_merge(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    if arguments.nproc != NPROC.default:
        raise _unused(arguments, NPROC, "hf --merge")
    from automodel_ckpt.base.user_cache import cache_directory
    from automodel_ckpt.checkpoint.export.next_steps import hf_lines
    from automodel_ckpt.convert.merging.merge import merge
    from automodel_ckpt.models.inspect.repository import base_directory
    from automodel_ckpt.models.inspect.signature import read_signature

    report = merge(
        source,
        arguments.output,
        base=arguments.base,
        directory_of=base_directory,
        naming_of=read_signature,
        cast_dtype=arguments.cast_dtype,
        cache=cache_directory(),
        log=log,
    )
    log(_summary(report))
    if not arguments.json:
        print_path(report.output)
        for line in hf_lines(Path(report.output)):
            log(line)
    return _document(report)


def _unused(arguments: argparse.Namespace, option: Option, target: str) -> RecipeError:
    value = getattr(arguments, option.attribute)
    return without_effect(arguments.command, option.flag, value, f"with --to {target}")


def _summary(report: ConsolidationReport) -> str:
    tensors = counted(report.num_tensors, "tensor")
    files = counted(report.num_files, "file")
    digests = "digests checked" if report.checked else "source unchecked"
    size = size_text(report.nbytes)
    return f"wrote {tensors} in {files}, {size}, {report.seconds:.1f} s ({digests})"


def _document(report: ConsolidationReport) -> dict[str, Any]:
    casts = {f"{before}->{after}": count for (before, after), count in report.casts.items()}
    return {**asdict(report), "output": str(report.output), "casts": casts}


TARGET = Target(
    "hf",
    "Hugging Face files, the same as `ckpt consolidate`",
    "consolidated/ in the model's directory",
    _run,
    (CAST_DTYPE, NPROC, NUM_THREADS, MERGE, BASE),
)
