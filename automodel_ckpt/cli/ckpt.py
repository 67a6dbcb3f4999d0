"""``ckpt``: look after checkpoints. Runs on CPU, without a network, from any directory, and without torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from automodel_ckpt import __version__
from automodel_ckpt.cli import completion, difference, export, foreign, importing, plot, show, track, upkeep
from automodel_ckpt.cli.terminal import (
    age_text,
    coloured,
    json_text,
    leave_reader,
    print_error,
    printable,
    size_text,
    table,
)
from automodel_ckpt.errors import EXIT_DONE, AutomodelError, CheckpointUnusable, describe


@dataclass(frozen=True, slots=True)
class Row:
    """A directory of a run as ``ckpt ls`` shows it; *reason* says why it is no complete checkpoint."""

    name: str
    complete: bool
    step: int | None = None
    epoch: int | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    nbytes: int | None = None
    created: float | None = None
    pointers: tuple[str, ...] = ()
    reason: str = ""
    foreign: bool = False


def parser() -> argparse.ArgumentParser:
    """The command line of ``ckpt``."""
    result = argparse.ArgumentParser(prog="ckpt", description="Look after checkpoints.")
    result.add_argument("--version", action="version", version=f"automodel_ckpt {__version__}")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    where = "a run directory, a checkpoint, or a pointer such as checkpoints/LATEST"
    ls = commands.add_parser("ls", help="list the checkpoints of a run", description="List the checkpoints of a run.")
    ls.add_argument("path", nargs="?", default=".", metavar="PATH", help=f"{where} (default: here)")
    consolidate = commands.add_parser(
        "consolidate",
        help="export a checkpoint as Hugging Face files",
        description="Export a checkpoint's model as Hugging Face files, checked against its manifest.",
    )
    consolidate.add_argument("path", metavar="DIR", help=f"{where}, its model/, or a directory of bare shards")
    consolidate.add_argument("--output", "-o", metavar="OUT", help="default: consolidated/ in the model's directory")
    consolidate.add_argument("--cast-dtype", metavar="T", help="bf16, fp16, fp32 or fp64: cast ordinary float tensors")
    consolidate.add_argument("--nproc", type=int, default=1, metavar="N", help="processes (default: 1)")
    consolidate.add_argument("--num-threads", type=int, default=5, metavar="N", help="threads of each (default: 5)")
    own = (
        ls, show.add_parser(commands, where), consolidate, export.add_parser(commands, where),
        importing.add_parser(commands), difference.add_parser(commands, where),
    )  # fmt: skip
    curves = (plot.add_parser(commands), track.add_parser(commands))
    for command in (*own, *upkeep.add_parsers(commands, where), *curves):
        command.add_argument("--json", action="store_true", help="print JSON")
    completion.add_parser(commands)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ckpt``; returns its exit code."""
    arguments = parser().parse_args(argv)
    command = _COMMANDS[arguments.command]
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        leave_reader()
        return EXIT_DONE
    except (AutomodelError, OSError, KeyboardInterrupt) as error:
        code, message = describe(error)
        print_error(message)
        return code


def run_directory(path: Path) -> Path | None:
    """The directory of checkpoints that *path* is, or holds as ``checkpoints/``; None where it is neither."""
    from automodel_ckpt.checkpoint import resume

    for directory in (path, path / "checkpoints"):
        if directory.is_dir() and resume.checkpoint_names(directory):
            return directory
    return None


def find_checkpoint(path: Path) -> Path:
    """The directory that *path* means: of a run its newest complete checkpoint, of a pointer its target, else itself.

    Raises :class:`CheckpointUnusable` where there is nothing.
    """
    from automodel_ckpt.checkpoint import commit, layout

    if path.is_dir() and not (path.name in layout.POINTERS and path.is_symlink()):
        run = run_directory(path)
        return path.resolve() if run is None else _newest(run)
    stem = path.name.removesuffix(".txt")
    target = commit.pointed(path.parent, stem) if stem in layout.POINTERS else None
    if target is None or not (path.parent / target).is_dir() or (path.parent / target).is_symlink():
        raise _nothing("there is no such checkpoint", path, "name a run directory, a checkpoint or a pointer")
    return (path.parent / target).resolve()


def _newest(run: Path) -> Path:
    rows = [row for row in rows_of(run) if row.complete and row.step is not None and "superseded" not in row.reason]
    if not rows:
        raise _nothing("no checkpoint here is complete", run, "`ckpt ls` says why")
    return (run / max(rows, key=lambda row: (row.step or 0, row.epoch or 0)).name).resolve()


def _nothing(what: str, path: Path, remedy: str) -> CheckpointUnusable:
    return CheckpointUnusable(what, where=str(path), value="", remedy=remedy)


def _ls(arguments: argparse.Namespace) -> int:
    path = Path(arguments.path)
    run = run_directory(path) if path.is_dir() else None
    checkpoint = None if run else find_checkpoint(path)
    rows = list(rows_of(run)) if run else [row_of(checkpoint, {})] if checkpoint else []
    if checkpoint is not None and not _looks_like_checkpoint(checkpoint):
        raise _nothing("there are no checkpoints here", path, "name a run directory, a checkpoint or a pointer")
    if arguments.json:
        print(json_text([asdict(row) for row in rows]))
    else:
        _print_rows(rows)
    return EXIT_DONE


def rows_of(run: Path) -> Iterator[Row]:
    """A row for each directory of a run that is, or might be taken for, a checkpoint; oldest first."""
    from automodel_ckpt.checkpoint import commit, layout
    from automodel_ckpt.checkpoint.upkeep import pinned_names

    pointers: dict[str, list[str]] = {}
    for pointer in layout.POINTERS:
        if (target := commit.pointed(run, pointer)) is not None:
            pointers.setdefault(target, []).append(pointer)
    for name in pinned_names(run):
        pointers.setdefault(name, []).append("pinned")
    found = [Path(entry.path) for entry in os.scandir(run) if entry.is_dir(follow_symlinks=False)]
    rows = [row_of(path, pointers) for path in found if _looks_like_checkpoint(path)]
    yield from sorted(rows, key=lambda row: (row.step is None, row.step or 0, row.epoch or 0, row.name))


def _looks_like_checkpoint(path: Path) -> bool:
    from automodel_ckpt.checkpoint import layout

    named = layout.parse_checkpoint_name(path.name) or layout.is_superseded(path.name) or layout.is_staging(path.name)
    return (
        bool(named)
        or any(os.path.lexists(path / name) for name in (layout.MANIFEST, "model"))
        or foreign.is_known(path)
    )


def row_of(path: Path, pointers: Mapping[str, Sequence[str]]) -> Row:
    """What is known of the checkpoint directory *path*; *pointers* lists the pointers to each name."""
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.checkpoint.manifest import Summary

    name = layout.parse_checkpoint_name(path.name)
    step, epoch = (name.step, name.epoch) if name else (None, None)
    here = tuple(pointers.get(path.name, ()))
    if layout.is_staging(path.name):
        return Row(path.name, False, reason="unfinished: being saved now, or left by a killed save")
    if not os.path.lexists(path / layout.MANIFEST):
        if (facts := foreign.facts(path)) is not None:
            facts |= {key: _number(facts[key]) for key in ("train_loss", "val_loss")}
            return Row(path.name, False, step, epoch, pointers=here, **facts)
        what = "torn, or another program's" if name else "foreign"
        return Row(path.name, False, step, epoch, pointers=here, reason=f"{what}: it has no {layout.MANIFEST}")
    try:
        summary = Summary.read(path)
    except CheckpointUnusable as error:
        problem = error.problems[0]
        return Row(path.name, False, step, epoch, pointers=here, reason=f"{problem.what}: {problem.value}")
    reason = "superseded: the run went back and on from an earlier step" if layout.is_superseded(path.name) else ""
    reason = reason or ("" if summary.has_optimizer else "weights only")
    train_loss, val_loss = (_number(summary.losses.get(key)) for key in ("train_loss", "val_loss"))
    return Row(
        path.name, True, summary.step, summary.epoch, train_loss, val_loss, summary.nbytes, summary.created, here,
        reason,
    )  # fmt: skip


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _print_rows(rows: Sequence[Row]) -> None:
    titles = ("checkpoint", "step", "epoch", "train loss", "val loss", "size", "age", "complete", "")
    head, *lines = table([titles, *map(_cells, rows)])
    print(coloured(head, "bold", sys.stdout))
    for row, line in zip(rows, lines, strict=True):
        print(coloured(line, "red", sys.stdout) if not (row.complete or row.foreign) else line)


def _cells(row: Row) -> tuple[str, ...]:
    numbers = ["" if value is None else str(value) for value in (row.step, row.epoch)]
    losses = ["" if value is None else f"{value:.4f}" for value in (row.train_loss, row.val_loss)]
    size = "" if row.nbytes is None else size_text(row.nbytes)
    age = "" if row.created is None else age_text(row.created)
    notes = ", ".join((*row.pointers, *([row.reason] if row.reason else [])))
    complete = "yes" if row.complete else "?" if row.foreign else "no"
    return printable(row.name), *numbers, *losses, size, age, complete, printable(notes)


def _consolidate(arguments: argparse.Namespace) -> int:
    from automodel_ckpt.consolidate import export as run

    report = run(
        find_checkpoint(Path(arguments.path)), arguments.output, arguments.cast_dtype, arguments.nproc,
        arguments.num_threads, quiet=arguments.json,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(export.report_hf(report), indent=2))
    return EXIT_DONE


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "ls": _ls,
    "show": lambda arguments: show.show(arguments, find_checkpoint),
    "consolidate": _consolidate,
    "diff": lambda arguments: difference.diff(arguments, find_checkpoint),
    "export": lambda arguments: export.export(arguments, find_checkpoint),
    "import": importing.import_,
    "verify": lambda arguments: upkeep.verify(arguments, find_checkpoint, run_directory),
    "prune": lambda arguments: upkeep.prune(arguments, run_directory),
    "pin": lambda arguments: upkeep.pin(arguments, find_checkpoint),
    "unpin": lambda arguments: upkeep.pin(arguments, find_checkpoint),
    "track": lambda arguments: track.track(arguments, run_directory),
    "plot": lambda arguments: plot.plot(arguments, run_directory),
    "completion": lambda arguments: completion.completion(arguments.shell, parser()),
}

if __name__ == "__main__":
    sys.exit(main())
