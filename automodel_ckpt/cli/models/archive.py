"""``ckpt archive`` and ``ckpt unarchive``: checkpoints in one compressed file, and back."""

from __future__ import annotations

import argparse
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.cli.common.arguments import WHERE, number_at_least
from automodel_ckpt.cli.common.paths import find_checkpoint, run_directory
from automodel_ckpt.cli.common.terminal import print_document, print_path, printable, size_text
from automodel_ckpt.errors import EXIT_DONE, CheckpointUnusable, RecipeError

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
TYPES = {"--level": number_at_least(1, 19)}


def run(arguments: argparse.Namespace) -> int:
    """Run ``ckpt archive``."""
    from automodel_ckpt.checkpoint.files import layout
    from automodel_ckpt.convert.checkpoint_archive import archive
    from automodel_ckpt.convert.publishing import check_file_target

    path = Path(arguments.path).expanduser()
    # All checkpoints of a run, which may be named by a link; else a pointer or a checkpoint.
    source = None if path.name in layout.POINTERS else run_directory(path)
    if source is None:
        source = find_checkpoint(path)
        if layout.parse_checkpoint_name(source.name) is None:
            raise CheckpointUnusable(
                "only checkpoints of this program can be archived",
                where=str(source),
                value=source.name,
                hint="name a run directory or a checkpoint; `ckpt import` makes one from other files",
            )
    target = Path(arguments.output).expanduser()
    if target.suffix != ".zst":
        raise RecipeError(
            "archives are compressed with zstd, and their name ends in .tar.zst",
            where="--output",
            value=str(target),
            hint="write a file such as run.tar.zst",
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


def run_unarchive(arguments: argparse.Namespace) -> int:
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
