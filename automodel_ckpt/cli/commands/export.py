"""``ckpt export``: a checkpoint's model in another program's form."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.paths import WHERE, find_checkpoint
from automodel_ckpt.cli.terminal import print_path, size_text
from automodel_ckpt.errors import EXIT_DONE, RecipeError


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``ckpt``'s."""
    command: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="export a checkpoint's model for other programs",
        description="Export the model of a checkpoint: hf (Hugging Face files, same as `ckpt consolidate`) or gguf "
        "(one file for llama.cpp; Llama models with byte-level BPE tokenizers).",
    )
    command.add_argument(
        "path",
        metavar="DIR",
        help=f"{WHERE}, its model/ directory, or a directory of shards; for gguf also Hugging Face files",
    )
    command.add_argument(
        "--to", choices=sorted(_TARGETS), default="hf", help="output format (default: hf)"
    )
    command.add_argument(
        "--output",
        "-o",
        metavar="OUT",
        help="output path (default for hf: consolidated/ in the model's directory; for gguf: NAME.gguf next to the "
        "checkpoint)",
    )
    command.add_argument(
        "--cast-dtype",
        metavar="T",
        help="cast floating-point tensors to bf16, fp16, fp32 or fp64 (fp64: hf only)",
    )
    command.add_argument(
        "--nproc",
        type=int,
        default=1,
        metavar="N",
        help="number of processes (hf only; default: 1)",
    )
    command.add_argument(
        "--num-threads", type=int, default=5, metavar="N", help="threads per process (default: 5)"
    )
    command.add_argument(
        "--merge",
        action="store_true",
        help="hf only: merge the adapter into its base model (default of OUT: merged/ in the model's directory)",
    )
    command.add_argument(
        "--base", metavar="BASE", help="with --merge: directory of the base model, if it was moved"
    )
    command.add_argument(
        "--force", action="store_true", help="gguf only: overwrite an existing file"
    )
    return command


def export(arguments: argparse.Namespace) -> int:
    """Run the command; the path that was written is the only line on standard output."""
    report = _TARGETS[arguments.to](arguments, find_checkpoint(Path(arguments.path)))
    if arguments.json:
        print(json.dumps(report, indent=2))
    return EXIT_DONE


def report_hf(report: Any) -> dict[str, Any]:
    """A consolidation's report for JSON."""
    casts = {f"{a}->{b}": count for (a, b), count in report.casts.items()}
    return {**asdict(report), "output": str(report.output), "casts": casts}


def _to_hf(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.cli.commands.consolidate import export as consolidate

    _check_unused(arguments, "hf", force=arguments.force)
    if arguments.merge:
        return _merged(arguments, source)
    _check_unused(arguments, "hf without --merge", base=arguments.base is not None)
    report = consolidate(
        source,
        arguments.output,
        arguments.cast_dtype,
        arguments.nproc,
        arguments.num_threads,
        quiet=arguments.json,
    )
    return report_hf(report)


def _merged(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    _check_unused(arguments, "hf --merge", nproc=arguments.nproc != 1)
    from automodel_ckpt.cli.commands.consolidate import say, summary
    from automodel_ckpt.convert.merge import merge
    from automodel_ckpt.data.cache import cache_directory
    from automodel_ckpt.models.build import base_directory
    from automodel_ckpt.models.signature import outline

    report = merge(
        source,
        arguments.output,
        base=arguments.base,
        directory_of=base_directory,
        naming_of=outline,
        cast_dtype=arguments.cast_dtype,
        cache=cache_directory(),
        log=say,
    )
    say(summary(report))
    if not arguments.json:
        print_path(report.output)
    return report_hf(report)


def _to_gguf(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.cli.commands.consolidate import say
    from automodel_ckpt.convert.gguf import export_gguf

    _check_unused(
        arguments,
        "gguf",
        nproc=arguments.nproc != 1,
        merge=arguments.merge,
        base=arguments.base is not None,
    )
    report = export_gguf(
        source,
        arguments.output,
        cast_dtype=arguments.cast_dtype,
        overwrite=arguments.force,
        num_threads=arguments.num_threads,
        log=say,
    )
    checked = "digests checked" if report.checked else "source unchecked"
    say(
        f"wrote {report.num_tensors} tensors, {size_text(report.nbytes)}, {report.seconds:.1f} s ({checked})"
    )
    if not arguments.json:
        print_path(report.output)
    return {**asdict(report), "output": str(report.output)}


def _check_unused(arguments: argparse.Namespace, target: str, **given: bool) -> None:
    for name, unwanted in given.items():
        if unwanted:
            raise RecipeError(
                f"this option has no effect with --to {target}",
                where=f"ckpt export --{name}",
                value=getattr(arguments, name),
                hint=f"remove --{name}",
            )


_TARGETS: Mapping[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "hf": _to_hf,
    "gguf": _to_gguf,
}
