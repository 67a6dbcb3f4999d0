"""``ckpt export``: export the model of a checkpoint to another program's format. ``ckpt consolidate`` is an alias of
``ckpt export --to hf``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.cli.arguments import WHERE
from automodel_ckpt.cli.paths import find_checkpoint
from automodel_ckpt.cli.terminal import print_path, printable, size_text
from automodel_ckpt.errors import EXIT_DONE, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.export.consolidate import ConsolidationReport


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe the command ``ckpt export``."""
    command.description = (
        "Export the model of a checkpoint: hf (Hugging Face files, the same as `ckpt consolidate`), gguf "
        "(one file for llama.cpp: Llama, Mistral, Qwen 2 and 3, SmolLM, Gemma 2 and 3), dcp (a directory for "
        "torch.distributed.checkpoint), or torch (one state dict for torch.load)."
    )
    command.add_argument(
        "path",
        metavar="DIR",
        help=f"{WHERE}, its model/ directory, or a directory of shards; except for hf also Hugging Face files",
    )
    command.add_argument(
        "--to", choices=sorted(_TARGETS), default="hf", help="output format (default: hf)"
    )
    command.add_argument(
        "--output",
        "-o",
        metavar="OUT",
        help="output path (default for hf: consolidated/ in the model's directory; for gguf: NAME.gguf, for torch: "
        "NAME.pt, for dcp: NAME-dcp, next to the checkpoint)",
    )
    command.add_argument(
        "--prefix", metavar="P", help="dcp, torch: prefix of all names in the state dict"
    )
    _add_shared_options(command, only_hf="hf only: ", cast_note=" (fp64: hf only)")
    command.add_argument(
        "--type",
        metavar="KIND",
        help="gguf only: type of the tensors: F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0 (default: as stored)",
    )
    command.add_argument(
        "--force", action="store_true", help="gguf, torch: overwrite an existing file"
    )


def add_consolidate_arguments(command: argparse.ArgumentParser) -> None:
    """Describe the command ``ckpt consolidate``, which has the options of ``ckpt export --to hf``."""
    command.description = (
        "Alias of `ckpt export --to hf`: export the model of a checkpoint to Hugging Face files, and verify its "
        "digests."
    )
    command.set_defaults(to="hf", type=None, force=False, prefix=None)
    command.add_argument(
        "path",
        metavar="DIR",
        help=f"{WHERE}, its model/ directory, or a directory of shards without a manifest",
    )
    command.add_argument(
        "--output",
        "-o",
        metavar="OUT",
        help="output directory (default: consolidated/ in the model's directory)",
    )
    _add_shared_options(command, only_hf="", cast_note="")


def _add_shared_options(command: argparse.ArgumentParser, *, only_hf: str, cast_note: str) -> None:
    """Add the options that both commands have. *only_hf* and *cast_note* state the limits of other formats."""
    command.add_argument(
        "--cast-dtype",
        metavar="T",
        help=f"cast floating-point tensors to bf16, fp16, fp32 or fp64{cast_note}",
    )
    command.add_argument(
        "--nproc",
        type=int,
        default=1,
        metavar="N",
        help=f"{only_hf}number of processes (default: 1)",
    )
    command.add_argument(
        "--num-threads", type=int, default=5, metavar="N", help="threads per process (default: 5)"
    )
    command.add_argument(
        "--merge",
        action="store_true",
        help=f"{only_hf}merge the adapter into its base model (default of OUT: merged/ in the model's directory)",
    )
    command.add_argument(
        "--base", metavar="BASE", help="with --merge: directory of the base model, if it was moved"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run either command. The path of the export is the only line on standard output."""
    target = _TARGETS[arguments.to]
    _check_used(arguments, arguments.to, target.uses)
    report = target.run(arguments, find_checkpoint(Path(arguments.path)))
    if arguments.json:
        print(json.dumps(report, indent=2))
    return EXIT_DONE


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
        log=_log,
        opener=open_source,
    )
    _log(_summary(report))
    if print_output:
        print_path(report.output)
    return report


def _to_hf(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    if arguments.merge:
        return _to_merged_hf(arguments, source)
    _check_used(arguments, "hf without --merge", _TARGETS["hf"].uses - {"base"})
    report = export_hf(
        source,
        arguments.output,
        cast_dtype=arguments.cast_dtype,
        num_procs=arguments.nproc,
        num_threads=arguments.num_threads,
        print_output=not arguments.json,
    )
    return _hf_report_json(report)


def _to_merged_hf(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    _check_used(arguments, "hf --merge", _TARGETS["hf"].uses - {"nproc"})
    from automodel_ckpt.convert.merge import merge
    from automodel_ckpt.data.cache import cache_directory
    from automodel_ckpt.models.build import base_directory
    from automodel_ckpt.models.signature import read_signature

    report = merge(
        source,
        arguments.output,
        base=arguments.base,
        directory_of=base_directory,
        naming_of=read_signature,
        cast_dtype=arguments.cast_dtype,
        cache=cache_directory(),
        log=_log,
    )
    _log(_summary(report))
    if not arguments.json:
        print_path(report.output)
    return _hf_report_json(report)


def _to_gguf(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.gguf import export_gguf

    report = export_gguf(
        source,
        arguments.output,
        cast_dtype=arguments.cast_dtype,
        tensor_type=arguments.type,
        overwrite=arguments.force,
        num_threads=arguments.num_threads,
        log=_log,
    )
    size = size_text(report.nbytes)
    checked = _checked_text(report.checked)
    kinds = ", ".join(f"{count} {name}" for name, count in report.kinds.items())
    _log(
        f"wrote {report.num_tensors} tensors ({kinds}), {size}, {report.seconds:.1f} s ({checked})"
    )
    if not arguments.json:
        print_path(report.output)
    return {**asdict(report), "output": str(report.output)}


def _to_torch(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.torch_file import export_torch

    report = export_torch(
        source,
        arguments.output,
        prefix=arguments.prefix or "",
        cast_dtype=arguments.cast_dtype,
        overwrite=arguments.force,
        log=_log,
    )
    size = size_text(report.nbytes)
    checked = _checked_text(report.checked)
    _log(f"wrote {report.num_tensors} tensors, {size}, {report.seconds:.1f} s ({checked})")
    if not arguments.json:
        print_path(report.output)
    return {**asdict(report), "output": str(report.output)}


def _to_dcp(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.dcp import export_dcp

    report = export_dcp(
        source,
        arguments.output,
        prefix=arguments.prefix or "",
        cast_dtype=arguments.cast_dtype,
        log=_log,
    )
    size = size_text(report.nbytes)
    checked = _checked_text(report.checked)
    _log(f"wrote {report.num_tensors} tensors, {size}, {report.seconds:.1f} s ({checked})")
    if not arguments.json:
        print_path(report.output)
    return {**asdict(report), "output": str(report.output)}


@dataclass(frozen=True, slots=True)
class _Target:
    """A value of ``--to``: the function that exports and returns the document of ``--json``, and the options it uses.

    Any other option of ``ckpt export`` is an error when it is given.
    """

    run: Callable[[argparse.Namespace, Path], dict[str, Any]]
    uses: frozenset[str]


_TARGETS: Mapping[str, _Target] = {
    "hf": _Target(_to_hf, frozenset({"cast_dtype", "nproc", "num_threads", "merge", "base"})),
    "gguf": _Target(_to_gguf, frozenset({"cast_dtype", "type", "num_threads", "force"})),
    "dcp": _Target(_to_dcp, frozenset({"cast_dtype", "prefix"})),
    "torch": _Target(_to_torch, frozenset({"cast_dtype", "force", "prefix"})),
}
_DEFAULTS: Mapping[str, object] = {
    "cast_dtype": None,
    "nproc": 1,
    "num_threads": 5,
    "merge": False,
    "base": None,
    "type": None,
    "force": False,
    "prefix": None,
}
"""The default of each option that some targets use and others do not."""


def _check_used(arguments: argparse.Namespace, target: str, uses: Container[str]) -> None:
    """Raise :class:`RecipeError` for the first option that was given although *target* does not use it."""
    for name, default in _DEFAULTS.items():
        given = getattr(arguments, name)
        if given == default or name in uses:
            continue
        flag = f"--{name.replace('_', '-')}"
        raise RecipeError(
            f"this option has no effect with --to {target}",
            where=f"ckpt {arguments.command} {flag}",
            value=given,
            hint=f"remove {flag}",
        )


def _summary(report: ConsolidationReport) -> str:
    """Describe an export to Hugging Face files in one line."""
    files = "1 file" if report.num_files == 1 else f"{report.num_files} files"
    size = size_text(report.nbytes)
    checked = _checked_text(report.checked)
    return (
        f"wrote {report.num_tensors} tensors in {files}, {size}, {report.seconds:.1f} s ({checked})"
    )


def _checked_text(checked: bool) -> str:
    return "digests checked" if checked else "source unchecked"


def _hf_report_json(report: ConsolidationReport) -> dict[str, Any]:
    """Convert the report of an export to Hugging Face files to the document of ``--json``."""
    casts = {f"{before}->{after}": count for (before, after), count in report.casts.items()}
    return {**asdict(report), "output": str(report.output), "casts": casts}


def _log(text: str) -> None:
    """Log a line on standard error, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {printable(text)}", file=sys.stderr, flush=True)
