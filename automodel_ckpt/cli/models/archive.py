"""``ckpt archive`` and ``ckpt unarchive``: checkpoints in one compressed file, and back. ``ckpt unpack`` and ``ckpt
pack``: a .nemo or .qnemo file as a directory that can be edited, and back."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.base.terminal import print_path
from automodel_ckpt.base.units import counted, size_text
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.cli.common.arguments import WHERE, number_at_least
from automodel_ckpt.cli.common.output import print_document
from automodel_ckpt.cli.common.paths import OWN_ONLY, find_checkpoint, run_directory
from automodel_ckpt.errors import EXIT_DONE, RecipeError, printable, unusable

if TYPE_CHECKING:
    from automodel_ckpt.convert.formats.nemo.archives import ArchiveReport

USAGE = f"""
Write a checkpoint, or all complete checkpoints of a run directory, to one compressed file, for cold storage or uploads.
`ckpt unarchive` restores them bit for bit. Exports and superseded checkpoints are not included. Needs the extra
[archive].

path PATH                         | {WHERE}
-o --output required FILE.tar.zst | the archive to write
--level =3 N                      | compression level of zstd, 1 to 19 (default: 3)
--force                           | replace an existing file
"""
USAGE_UNARCHIVE = """
Extract the checkpoints of an archive into a run directory. Every file is compared with the digests of its manifest
before the checkpoint is published. Checkpoints that exist already are skipped. Needs the extra [archive].

file FILE.tar.zst        | a file that `ckpt archive` wrote
-o --output required RUN | run directory for the checkpoints
"""
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
TYPES = {"--level": number_at_least(1, 19)}


def run(arguments: Namespace) -> int:
    """Run ``ckpt archive``."""
    from automodel_ckpt.convert.checkpoint_archive import archive
    from automodel_ckpt.convert.publishing import check_file_target

    path = Path(arguments.path).expanduser()
    # All checkpoints of a run, which may be named by a link; else a pointer or a checkpoint.
    source = None if path.name in layout.POINTERS else run_directory(path)
    if source is None:
        source = find_checkpoint(path)
        if layout.parse_checkpoint_name(source.name) is None:
            raise unusable(
                "only checkpoints of this program can be archived", source, source.name, OWN_ONLY
            )
    target = Path(arguments.output).expanduser()
    if target.suffix != ".zst":
        raise RecipeError(
            "archives are compressed with zstd, and their name ends in .tar.zst", "--output", target
        )
    check_file_target(target, overwrite=arguments.force)
    log = _ignore if arguments.json else print
    names, nbytes, archive_bytes = archive(source, target, level=arguments.level, log=log)
    if arguments.json:
        document = {"archive": str(target), "checkpoints": names, "nbytes": nbytes}
        return print_document(arguments, {**document, "archive_bytes": archive_bytes}, ())
    ratio = nbytes / max(1, archive_bytes)
    sizes = f"{size_text(nbytes)} -> {size_text(archive_bytes)}"
    print(printable(f"{counted(len(names), 'checkpoint')}, {sizes} ({ratio:.2f} times smaller)"))
    print_path(target)
    return EXIT_DONE


def run_unarchive(arguments: Namespace) -> int:
    """Run ``ckpt unarchive``."""
    from automodel_ckpt.convert.checkpoint_archive import extract

    log = _ignore if arguments.json else print
    paths = extract(Path(arguments.file).expanduser(), Path(arguments.output).expanduser(), log=log)
    if arguments.json:
        return print_document(arguments, {"checkpoints": [str(path) for path in paths]}, ())
    for path in paths:
        print_path(path)
    return EXIT_DONE


def _ignore(_message: str) -> None:
    """Print nothing: with ``--json``, the output is one document."""


# ---------------------------------------------------------------- .nemo and .qnemo files


def run_unpack(arguments: Namespace) -> int:
    """Run ``ckpt unpack``. The path of the directory is the only line on standard output."""
    from automodel_ckpt.convert.formats.nemo.archives import unpack

    return _print_report(arguments, unpack(Path(arguments.source), Path(arguments.output), _log))


def run_pack(arguments: Namespace) -> int:
    """Run ``ckpt pack``. The path of the file is the only line on standard output."""
    from automodel_ckpt.convert.formats.nemo.archives import pack

    source, output = Path(arguments.source), Path(arguments.output)
    return _print_report(arguments, pack(source, output, _log, overwrite=arguments.force))


def _print_report(arguments: Namespace, report: ArchiveReport) -> int:
    files = counted(report.num_files, "file")
    _log(f"{report.kind}: {files}, {size_text(report.nbytes)}")
    if arguments.json:
        return print_document(arguments, {**asdict(report), "output": str(report.output)}, ())
    print_path(report.output)
    return EXIT_DONE


def _log(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
