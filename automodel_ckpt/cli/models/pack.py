"""``ckpt unpack`` and ``ckpt pack``: a .nemo or .qnemo file as a directory that can be edited, and back."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.base.units import counted
from automodel_ckpt.cli.common.terminal import print_path, printable, size_text
from automodel_ckpt.errors import EXIT_DONE

if TYPE_CHECKING:
    from automodel_ckpt.convert.formats.nemo.archives import ArchiveReport


def add_unpack_arguments(command: argparse.ArgumentParser) -> None:
    """Describe the command ``ckpt unpack``."""
    command.description = (
        "Unpack a .nemo or .qnemo file, compressed or not, into a directory. Archives with links, with other special "
        "members or with paths outside of the directory are rejected. Nothing in the files is executed."
    )
    command.add_argument("source", metavar="FILE", help="a .nemo or .qnemo file")
    command.add_argument(
        "output", metavar="DIR", help="a directory that does not exist, or is empty"
    )


def add_pack_arguments(command: argparse.ArgumentParser) -> None:
    """Describe the command ``ckpt pack``."""
    command.description = (
        "Pack a directory as a .nemo file (it contains model_config.yaml) or a .qnemo file (config.json and "
        "rank0.safetensors). The same files always give the same bytes."
    )
    command.add_argument("source", metavar="DIR", help="a directory of `ckpt unpack`")
    command.add_argument("output", metavar="FILE", help="the file to write")
    command.add_argument("--force", action="store_true", help="overwrite an existing file")


def run_unpack(arguments: argparse.Namespace) -> int:
    """Run ``ckpt unpack``. The path of the directory is the only line on standard output."""
    from automodel_ckpt.convert.formats.nemo.archives import unpack

    report = unpack(Path(arguments.source), Path(arguments.output), _log)
    return _print_report(arguments, report)


def run_pack(arguments: argparse.Namespace) -> int:
    """Run ``ckpt pack``. The path of the file is the only line on standard output."""
    from automodel_ckpt.convert.formats.nemo.archives import pack

    source, output = Path(arguments.source), Path(arguments.output)
    report = pack(source, output, _log, overwrite=arguments.force)
    return _print_report(arguments, report)


def _print_report(arguments: argparse.Namespace, report: ArchiveReport) -> int:
    files = counted(report.num_files, "file")
    _log(f"{report.kind}: {files}, {size_text(report.nbytes)}")
    if arguments.json:
        print(json.dumps({**asdict(report), "output": str(report.output)}, indent=2))
    else:
        print_path(report.output)
    return EXIT_DONE


def _log(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
