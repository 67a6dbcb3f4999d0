"""``ckpt export --to hf``: Hugging Face files, optionally with an adapter merged into its base."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.cli.common.arguments import without_effect
from automodel_ckpt.cli.common.terminal import print_path
from automodel_ckpt.cli.targets.table import log, report_line

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.export.consolidate import ConsolidationReport


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
    _finish(report, print_output=print_output)
    return report


def run_hf(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    """Export as the command line asks, and return the document of ``--json``."""
    if arguments.merge:
        report = _merged(arguments, source)
        _finish(report, print_output=not arguments.json)
    elif arguments.base is not None:
        where = "with --to hf without --merge"
        raise without_effect(arguments.command, "--base", arguments.base, where)
    else:
        report = export_hf(
            source,
            arguments.output,
            cast_dtype=arguments.cast_dtype,
            num_procs=arguments.nproc,
            num_threads=arguments.num_threads,
            print_output=not arguments.json,
        )
    casts = {f"{before}->{after}": count for (before, after), count in report.casts.items()}
    return {**asdict(report), "output": str(report.output), "casts": casts}


def _merged(arguments: argparse.Namespace, source: Path) -> ConsolidationReport:
    if arguments.nproc != 1:
        where = "with --to hf --merge"
        raise without_effect(arguments.command, "--nproc", arguments.nproc, where)
    from automodel_ckpt.base.user_cache import cache_directory
    from automodel_ckpt.convert.merging.merge import merge
    from automodel_ckpt.models.inspect.repository import base_directory
    from automodel_ckpt.models.inspect.signature import read_signature

    return merge(
        source,
        arguments.output,
        base=arguments.base,
        directory_of=base_directory,
        naming_of=read_signature,
        cast_dtype=arguments.cast_dtype,
        cache=cache_directory(),
        log=log,
    )


def _finish(report: ConsolidationReport, *, print_output: bool) -> None:
    from automodel_ckpt.checkpoint.export.next_steps import hf_lines

    tensors, files = counted(report.num_tensors, "tensor"), counted(report.num_files, "file")
    log(report_line(f"wrote {tensors} in {files}", report))
    if print_output:
        print_path(report.output)
        for line in hf_lines(Path(report.output)):
            log(line)
