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
USAGE_UNPACK = """
Unpack a .nemo or .qnemo file, compressed or not, into a directory. Archives with links, with other special members or
with paths outside of the directory are rejected. Nothing in the files is executed.

source FILE | a .nemo or .qnemo file
output DIR  | a directory that does not exist, or is empty
"""
USAGE_PACK = """
Pack a directory as a .nemo file (it contains model_config.yaml) or a .qnemo file (config.json and rank0.safetensors).
The same files always give the same bytes.

source DIR  | a directory of `ckpt unpack`
output FILE | the file to write
--force     | overwrite an existing file
"""


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
