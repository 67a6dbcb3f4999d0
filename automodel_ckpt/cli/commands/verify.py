"""``ckpt verify``: verify the digests of a checkpoint and its exports, or of all checkpoints of a run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.cli.common.arguments import add_path, number_at_least
from automodel_ckpt.cli.common.paths import run_directory, whole_checkpoint
from automodel_ckpt.cli.common.remote import locate, remote_problems
from automodel_ckpt.cli.common.terminal import (
    coloured,
    printable,
    printable_lines,
    problem_json,
)
from automodel_ckpt.errors import EXIT_DONE, EXIT_UNUSABLE, CheckpointUnusable, Problem

_REMOVED = "not verified, since its run or another command removed it meanwhile"

Result = tuple[Path, list[Problem]]
"""A checkpoint or an export, and all problems that were found in it."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe the command ``ckpt verify``."""
    command.description = (
        "Verify the digest of every file of a checkpoint and its exports, or of all checkpoints "
        "of a run."
    )
    add_path(command)
    command.add_argument(
        "--deep",
        action="store_true",
        help="also verify each slice, and report files that are not in the manifest",
    )
    command.add_argument(
        "--num-threads",
        type=number_at_least(1),
        default=2,
        metavar="N",
        help="number of reader threads (default: 2)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run ``ckpt verify`` and print every problem. The exit code is 3 if there is one."""
    if is_url(arguments.path):
        return _verify_remote(arguments)
    run_path, targets = _targets(Path(arguments.path))
    results: list[Result] = []
    removed: list[Path] = []
    for target in targets:
        found = [(target, _problems(target, arguments))]
        found += [(export, _export_problems(export, arguments)) for export in _exports(target)]
        if os.path.lexists(target):
            results += found
        elif run_path is not None:
            removed.append(target)
        else:
            results.append((target, [_removal(target)]))
    _record(results)
    return _report(results, removed, arguments)


def _report(
    results: Sequence[Result], removed: Sequence[Path], arguments: argparse.Namespace
) -> int:
    """Print the results, and which checkpoints were *removed* meanwhile. Return the exit code."""
    if arguments.json:
        _print_json(results)
    else:
        _print_results(results)
        for target in removed:
            print(f"{printable(str(target))}: {_REMOVED}")
    is_damaged = any(problems for _, problems in results)
    return EXIT_UNUSABLE if is_damaged else EXIT_DONE


def _verify_remote(arguments: argparse.Namespace) -> int:
    """Verify checkpoints in an object store: that all files are there with their sizes, with --deep their digests."""

    run, name = locate(arguments.path)
    names = [name] if name else [str(found.name) for found in run.checkpoints()]
    if not names:
        raise CheckpointUnusable(
            "no complete checkpoint found",
            where=str(run.store),
            value="",
            hint="check the URL; `ckpt ls URL` also lists incomplete checkpoints",
        )
    results: list[Result] = []
    removed: list[Path] = []
    for each in reversed(names):
        try:
            _, manifest = run.complete_manifest(each)
            problems = remote_problems(run, each, manifest, deep=arguments.deep)
        except CheckpointUnusable as error:
            problems = list(error.problems)
        except FileNotFoundError as error:
            where = str(error.filename or f"{run.store}/{each}")
            hint = "list the checkpoints with `ckpt ls`: it may have been removed"
            problems = [Problem("a file of the checkpoint is missing", where, "", hint)]
        # Uploads of a live run remove checkpoints.
        if problems and name is None and run.manifest(each) is None:
            removed.append(Path(each))
        else:
            results.append((Path(each), problems))
    code = _report(results, removed, arguments)
    if not arguments.json and not arguments.deep:
        print("names and sizes only; --deep reads each file and verifies its digest")
    return code


def _targets(path: Path) -> tuple[Path | None, list[Path]]:
    """Return the run and its checkpoints, oldest first; or no run, and the one checkpoint that *path* names."""
    from automodel_ckpt.checkpoint.run import resume

    run = run_directory(path) if path.is_dir() else None
    if run is None:
        return None, [whole_checkpoint(path)]
    return run, [run / str(name) for name in reversed(resume.checkpoint_names(run))]


def _removal(checkpoint: Path) -> Problem:
    """Describe the removal of *checkpoint* while it was verified."""
    hint = "its run keeps only some checkpoints; verify another one, or `ckpt pin` it first"
    return Problem("the checkpoint was removed while it was verified", str(checkpoint), "", hint)


def _problems(checkpoint: Path, arguments: argparse.Namespace) -> list[Problem]:
    from automodel_ckpt.checkpoint.files import layout
    from automodel_ckpt.checkpoint.parts.manifest import Manifest
    from automodel_ckpt.checkpoint.parts.verify import verify, verify_deep

    try:
        os.lstat(checkpoint / layout.MANIFEST)
    except PermissionError as error:
        # The others of the run are verified all the same.
        hint = "check the owner and the permissions of the directory"
        return [Problem("the checkpoint cannot be read", str(checkpoint), error.strerror, hint)]
    except OSError:
        pass  # there is no manifest
    if not os.path.lexists(checkpoint / layout.MANIFEST):
        if os.path.lexists(checkpoint / layout.EXPORT_MANIFEST):
            return _export_problems(checkpoint, arguments)
        if _is_external(checkpoint):
            hint = "`ckpt import` makes a checkpoint with digests; `ckpt show --stats` reads the tensors"
            return [Problem("unverifiable: no digests", str(checkpoint), "no MANIFEST.json", hint)]
    try:
        manifest = Manifest.read(checkpoint)
    except CheckpointUnusable as error:
        return list(error.problems)
    problems = verify(checkpoint, manifest, "digest", num_threads=arguments.num_threads)
    if arguments.deep:
        # Both find damage of a slice table.
        problems += [each for each in verify_deep(checkpoint, manifest) if each not in problems]
    return problems


def _exports(target: Path) -> list[Path]:
    """Return the exports in a checkpoint of this program; an external checkpoint has none."""
    from automodel_ckpt.checkpoint.export.export_manifest import exports_in
    from automodel_ckpt.checkpoint.files import layout

    return exports_in(target) if os.path.lexists(target / layout.MANIFEST) else []


def _export_problems(export: Path, arguments: argparse.Namespace) -> list[Problem]:
    from automodel_ckpt.checkpoint.export.export_manifest import export_problems

    return export_problems(export, num_threads=arguments.num_threads)


def _is_external(target: Path) -> bool:
    """Whether *target* contains files of another program, without a manifest."""
    from automodel_ckpt.checkpoint.files import layout
    from automodel_ckpt.cli.common.external_checkpoints import is_external

    for manifest in (layout.MANIFEST, layout.EXPORT_MANIFEST):
        if os.path.lexists(target / manifest):
            return False
    return is_external(target)


def _record(results: Sequence[Result]) -> None:
    """Record the results in the run directory, where ``ckpt ls`` reads them."""
    from automodel_ckpt.checkpoint.files import layout
    from automodel_ckpt.checkpoint.run.verification_results import remember

    intact = {}
    run = None
    for target, problems in results:
        if layout.is_checkpoint(target.name):
            run = run or target.parent
            intact[target.name] = not problems
    if run is not None:
        remember(run, intact)


def _print_json(results: Sequence[Result]) -> None:
    documents = []
    for target, problems in results:
        listed = [problem_json(problem) for problem in problems]
        documents.append({"path": str(target), "ok": not problems, "problems": listed})
    print(json.dumps(documents))


def _print_results(results: Sequence[Result]) -> None:
    for target, problems in results:
        print(f"{printable(str(target))}: {_verdict(target, problems)}")
        for problem in problems:
            indented = f"  {problem}".replace("\n", "\n  ")
            print(printable_lines(indented))


def _verdict(target: Path, problems: list[Problem]) -> str:
    if not problems:
        return coloured("ok", "green", sys.stdout)
    if not os.path.lexists(target):
        return coloured("removed", "yellow", sys.stdout)
    if _is_external(target):
        return coloured("unverifiable: no manifest", "yellow", sys.stdout)
    return coloured("damaged", "red", sys.stdout)
