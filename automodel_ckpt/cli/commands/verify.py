"""``ckpt verify``: verify the digests of a checkpoint and its exports, or of all checkpoints of a run."""

from __future__ import annotations

import os
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.base.terminal import colored, printable_lines
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Manifest, has_manifest
from automodel_ckpt.checkpoint.parts.verify import verify, verify_deep
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.notes import note_verifications
from automodel_ckpt.cli.common.arguments import PATH
from automodel_ckpt.cli.common.output import print_document, problem_json
from automodel_ckpt.cli.common.paths import run_directory, whole_checkpoint
from automodel_ckpt.cli.common.remote import locate, remote_problems
from automodel_ckpt.errors import (
    EXIT_DONE,
    EXIT_UNUSABLE,
    CheckpointUnusable,
    Problem,
    printable,
    unusable,
)

_UNVERIFIABLE = "unverifiable: no digests"
_GONE = "the checkpoint was removed while it was verified"
_VERDICTS = {_UNVERIFIABLE: "unverifiable: no manifest", _GONE: "removed"}
_REMOVED = "not verified, since its run or another command removed it meanwhile"

Result = tuple[Path, list[Problem]]
"""A checkpoint or an export, and all problems that were found in it."""
USAGE = f"""
Verify the digest of every file of a checkpoint and its exports, or of all checkpoints of a run.

{PATH}
--deep                | also verify each slice, and report files that are not in the manifest
--num-threads >=1 =2 N | number of reader threads (default: 2)
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt verify`` and print every problem. The exit code is 3 if there is one."""
    if is_url(arguments.path):
        return _verify_remote(arguments)
    path = Path(arguments.path)
    run = run_directory(path) if path.is_dir() else None
    if run is None:
        targets = [whole_checkpoint(path)]
    else:
        targets = [run / str(name) for name in reversed(resume.checkpoint_names(run))]
    results = []
    removed = []
    for target in targets:
        found = _verified(target, arguments)
        if os.path.lexists(target):
            results += found
        elif run is not None:
            removed.append(target)
        else:
            results.append(
                (
                    target,
                    [
                        Problem(
                            _GONE,
                            str(target),
                            "",
                            "its run keeps only some checkpoints; verify another one, or `ckpt pin` it first",
                        )
                    ],
                )
            )
    intact = {
        target.name: not problems
        for target, problems in results
        if layout.is_checkpoint(target.name)
    }
    if intact:
        # `ckpt ls` shows them.
        note_verifications(targets[0].parent, intact)
    return _report(results, removed, arguments)


def _report(results: Sequence[Result], removed: Sequence[Path], arguments: Namespace) -> int:
    """Print the results, and which checkpoints were *removed* meanwhile. Return the exit code."""
    documents = []
    lines = []
    for target, problems in results:
        listed = [problem_json(problem) for problem in problems]
        documents.append({"path": str(target), "ok": not problems, "problems": listed})
        verdict = colored("ok", "green", sys.stdout)
        if problems:
            special = _VERDICTS.get(problems[0].what)
            color = "yellow" if special else "red"
            verdict = colored(special or "damaged", color, sys.stdout)
        lines.append(f"{printable(str(target))}: {verdict}")
        lines += [printable_lines(textwrap.indent(str(problem), "  ")) for problem in problems]
    lines += [f"{printable(str(target))}: {_REMOVED}" for target in removed]
    print_document(arguments, documents, lines)
    return EXIT_UNUSABLE if any(problems for _, problems in results) else EXIT_DONE


def _verify_remote(arguments: Namespace) -> int:
    """Verify checkpoints in an object store: that all files are there with their sizes, with --deep their digests."""
    run, name = locate(arguments.path)
    names = [name] if name else [str(found.name) for found in run.checkpoints()]
    if not names:
        raise unusable("no complete checkpoint found", run.store, "", "check the URL")
    results = []
    removed = []
    for each in reversed(names):
        try:
            _, manifest = run.complete_manifest(each)
            problems = remote_problems(run, each, manifest, deep=arguments.deep)
        except CheckpointUnusable as error:
            problems = list(error.problems)
        except FileNotFoundError as error:
            where = str(error.filename or f"{run.store}/{each}")
            problems = [
                Problem(
                    "a file of the checkpoint is missing",
                    where,
                    "",
                    "list the checkpoints with `ckpt ls`: it may have been removed",
                )
            ]
        # Uploads of a live run remove checkpoints.
        if problems and name is None and run.manifest(each) is None:
            removed.append(Path(each))
        else:
            results.append((Path(each), problems))
    code = _report(results, removed, arguments)
    if not arguments.json and not arguments.deep:
        print("names and sizes only; --deep reads each file and verifies its digest")
    return code


def _verified(checkpoint: Path, arguments: Namespace) -> list[Result]:
    """Return the problems of *checkpoint*, and of the exports in it. An export may also be verified alone."""
    from automodel_ckpt.checkpoint.export.export_manifest import export_problems, exports_in
    from automodel_ckpt.cli.common.external_checkpoints import is_external

    try:
        os.lstat(checkpoint / layout.MANIFEST)
    except PermissionError as error:
        # The others of the run are verified all the same.
        hint = "check the owner and the permissions of the directory"
        problem = Problem("the checkpoint cannot be read", str(checkpoint), error.strerror, hint)
        return [(checkpoint, [problem])]
    except OSError:  # there is no manifest
        if os.path.lexists(checkpoint / layout.EXPORT_MANIFEST):
            return [(checkpoint, export_problems(checkpoint, num_threads=arguments.num_threads))]
        if is_external(checkpoint):
            hint = "`ckpt import` makes a checkpoint with digests; `ckpt show --stats` reads the tensors"
            problem = Problem(_UNVERIFIABLE, str(checkpoint), "no MANIFEST.json", hint)
            return [(checkpoint, [problem])]
    try:
        manifest = Manifest.read(checkpoint)
        problems = verify(checkpoint, manifest, "digest", num_threads=arguments.num_threads)
        if arguments.deep:
            # Both find damage of a slice table.
            deep = verify_deep(checkpoint, manifest)
            problems += [each for each in deep if each not in problems]
    except CheckpointUnusable as error:
        problems = list(error.problems)
    exports = exports_in(checkpoint) if has_manifest(checkpoint) else ()
    return [
        (checkpoint, problems),
        *((each, export_problems(each, num_threads=arguments.num_threads)) for each in exports),
    ]
