"""``ckpt verify``, ``prune``, ``pin`` and ``unpin``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.paths import add_path, run_around, run_directory, whole_checkpoint
from automodel_ckpt.cli.terminal import (
    coloured,
    printable,
    printable_lines,
    problem_json,
    size_text,
    table,
)
from automodel_ckpt.errors import EXIT_DONE, EXIT_UNUSABLE, CheckpointUnusable, Problem, RecipeError

_LEFTOVER = "an export is in progress or was interrupted; the next start of the run removes it"


def add_parsers(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the commands to ``ckpt``'s."""
    verify = commands.add_parser(
        "verify",
        help="verify the digests of all files",
        description="Verify the digest of every file of a checkpoint and its exports, or of all checkpoints of a run.",
    )
    add_path(verify)
    verify.add_argument(
        "--deep",
        action="store_true",
        help="also verify each slice, and report files that are not in the manifest",
    )
    verify.add_argument(
        "--num-threads",
        type=_at_least(1),
        default=2,
        metavar="N",
        help="number of reader threads (default: 2)",
    )
    prune = commands.add_parser(
        "prune",
        help="remove old checkpoints",
        description="Remove checkpoints that no option keeps. Never removed: the newest complete checkpoint, the "
        "targets of LATEST, LOWEST_VAL, pins and other links in the run directory, and anything that is not a "
        "complete checkpoint.",
    )
    prune.add_argument(
        "path",
        nargs="?",
        default=".",
        metavar="RUN",
        help="a run directory, or a path inside it (default: current directory)",
    )
    prune.add_argument("--keep-last", type=_at_least(1), metavar="N", help="keep the newest N")
    prune.add_argument(
        "--keep-best",
        type=_at_least(0),
        default=0,
        metavar="K",
        help="keep the best K by --metric (default: 0)",
    )
    prune.add_argument(
        "--keep-every-steps",
        type=_at_least(1),
        metavar="N",
        help="keep checkpoints whose step is a multiple of N",
    )
    prune.add_argument(
        "--keep-steps",
        type=_at_least(0),
        nargs="+",
        default=[],
        metavar="S",
        help="keep the checkpoints of these steps",
    )
    prune.add_argument(
        "--metric",
        default="val_loss",
        help="key in losses.json for --keep-best (default: val_loss)",
    )
    prune.add_argument("--max", action="store_true", help="higher values of --metric are better")
    prune.add_argument(
        "--superseded", action="store_true", help="also remove superseded checkpoints"
    )
    prune.add_argument(
        "--drop-optimizer",
        action="store_true",
        help="remove only the optimizer state, and keep the weights",
    )
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    pin = commands.add_parser(
        "pin",
        help="protect a checkpoint from removal",
        description="Protect a checkpoint from removal.",
    )
    unpin = commands.add_parser("unpin", help="remove a pin", description="Remove a pin.")
    for command in (pin, unpin):
        command.add_argument(
            "path", metavar="PATH", help="a checkpoint, or a pointer such as checkpoints/LATEST"
        )
    return [verify, prune, pin, unpin]


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    return whole_number


def verify(arguments: argparse.Namespace) -> int:
    """Run ``ckpt verify``: print every problem; the exit code is 3 if there is one."""
    from automodel_ckpt.checkpoint.run import resume

    path = Path(arguments.path)
    run = run_directory(path) if path.is_dir() else None
    targets = (
        [run / str(name) for name in reversed(resume.checkpoint_names(run))]
        if run
        else [whole_checkpoint(path)]
    )
    results = []
    for target in targets:
        results.append((target, _problems(target, arguments)))
        results += [(export, _export_problems(export, arguments)) for export in _exports(target)]
    _note(results)
    if arguments.json:
        print(
            json.dumps(
                [
                    {"path": str(t), "ok": not p, "problems": [*map(problem_json, p)]}
                    for t, p in results
                ]
            )
        )
    else:
        for target, problems in results:
            print(f"{printable(str(target))}: {_verdict(target, problems)}")
            for problem in problems:
                print(printable_lines(f"  {problem}".replace("\n", "\n  ")))
        _print_leftovers(targets)
    return EXIT_UNUSABLE if any(problems for _, problems in results) else EXIT_DONE


def _print_leftovers(targets: Sequence[Path]) -> None:
    from automodel_ckpt.checkpoint.export_leftovers import leftovers_in

    for target in targets:
        with contextlib.suppress(OSError):
            for path in leftovers_in(target):
                print(f"{printable(str(path))}: {_LEFTOVER}")


def _verdict(target: Path, problems: list[Problem]) -> str:
    if not problems:
        return coloured("ok", "green", sys.stdout)
    if _is_external(target):
        return coloured("unverifiable: no manifest", "yellow", sys.stdout)
    return coloured("damaged", "red", sys.stdout)


def _is_external(target: Path) -> bool:
    """Whether *target* holds files of another program, without a manifest."""
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.convert.sources import external

    described = any(
        os.path.lexists(target / name) for name in (layout.MANIFEST, layout.EXPORT_MANIFEST)
    )
    return not described and not target.is_symlink() and bool(external.kinds_in(target))


def _note(results: Sequence[tuple[Path, list[Problem]]]) -> None:
    """Record the results, which ``ckpt ls`` shows."""
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.checkpoint.run.verification_results import remember

    own = [(target, problems) for target, problems in results if layout.is_checkpoint(target.name)]
    if own:
        remember(own[0][0].parent, {target.name: not problems for target, problems in own})


def _exports(target: Path) -> list[Path]:
    """The exports in a checkpoint of this program; none in anything else."""
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.checkpoint.export_manifest import exports_in

    return exports_in(target) if os.path.lexists(target / layout.MANIFEST) else []


def _export_problems(export: Path, arguments: argparse.Namespace) -> list[Problem]:
    from automodel_ckpt.checkpoint.export_manifest import export_problems

    return export_problems(export, num_threads=arguments.num_threads)


def _problems(checkpoint: Path, arguments: argparse.Namespace) -> list[Problem]:
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.checkpoint.manifest import Manifest
    from automodel_ckpt.checkpoint.verify import verify as verify_files
    from automodel_ckpt.checkpoint.verify import verify_deep

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
    problems = verify_files(checkpoint, manifest, "digest", num_threads=arguments.num_threads)
    return problems + (verify_deep(checkpoint, manifest) if arguments.deep else [])


def prune(arguments: argparse.Namespace) -> int:
    """Run ``ckpt prune``: preview or remove checkpoints. Raises if a live run uses the directory."""
    from automodel_ckpt.checkpoint import policy
    from automodel_ckpt.checkpoint.run import maintenance
    from automodel_ckpt.checkpoint.run.lease import Lease

    run = run_around(Path(arguments.path))
    if run is None:
        raise CheckpointUnusable(
            "no checkpoints found", where=arguments.path, value="", hint="specify a run directory"
        )
    keep = _policy(arguments, policy)

    def chosen() -> dict[str, int]:
        removals = maintenance.removable(
            run, keep, metric_key=arguments.metric, superseded=arguments.superseded
        )
        return {removal.name: removal.nbytes for removal in removals}

    if arguments.dry_run:
        freed = (
            {name: _optimizer_bytes(run / name) for name in chosen()}
            if arguments.drop_optimizer
            else chosen()
        )
    else:
        # What stays is decided under the lease: a live run, or another prune, changes it.
        lease = Lease(run)
        try:
            maintenance.recover(run)
            freed = _removed(arguments, run, chosen(), lease.check)
        finally:
            lease.release()
    _print_prune(arguments, freed)
    return EXIT_DONE


def _removed(
    arguments: argparse.Namespace,
    run: Path,
    chosen: dict[str, int],
    check_lease: Callable[[], None],
) -> dict[str, int]:
    """Remove the *chosen* checkpoints or their optimizer state; returns the bytes that each removal has freed."""
    from automodel_ckpt.checkpoint.run import maintenance

    if not arguments.drop_optimizer:
        return {
            name: chosen[name] for name in maintenance.remove(run, chosen, check_lease=check_lease)
        }
    freed = {}
    for name in chosen:
        check_lease()
        freed[name] = maintenance.drop_optimizer(run, name)
    return freed


def _policy(arguments: argparse.Namespace, policy: Any) -> Any:
    if arguments.keep_last is None and not arguments.superseded:
        raise RecipeError(
            "no checkpoints were selected to keep",
            where="ckpt prune",
            value="no --keep-last",
            hint="add --keep-last N (try it with --dry-run first), or --superseded",
        )
    return policy.KeepPolicy(
        arguments.keep_last,
        arguments.keep_best,
        arguments.keep_every_steps,
        frozenset(arguments.keep_steps),
        "max" if arguments.max else "min",
    )


def _optimizer_bytes(checkpoint: Path) -> int:
    from automodel_ckpt.checkpoint.manifest import Manifest
    from automodel_ckpt.checkpoint.run.maintenance import without_optimizer

    manifest = Manifest.read(checkpoint)
    return manifest.nbytes - without_optimizer(manifest).nbytes


def _print_prune(arguments: argparse.Namespace, freed: dict[str, int]) -> None:
    if arguments.json:
        removed = [{"name": name, "nbytes": nbytes} for name, nbytes in freed.items()]
        print(
            json.dumps(
                {
                    "dry_run": arguments.dry_run,
                    "drop_optimizer": arguments.drop_optimizer,
                    "pruned": removed,
                }
            )
        )
        return
    what = "optimizer state of" if arguments.drop_optimizer else ""
    verb = "would remove" if arguments.dry_run else "removed"
    if freed:
        print(
            "\n".join(
                table(
                    [
                        (f"{verb} {what}".strip(), printable(n), size_text(b))
                        for n, b in freed.items()
                    ]
                )
            )
        )
    total = f"{size_text(sum(freed.values()))} {'to free' if arguments.dry_run else 'freed'}"
    print(total if freed else "nothing to remove")


def pin(arguments: argparse.Namespace) -> int:
    """Run ``ckpt pin`` or ``ckpt unpin``."""
    from automodel_ckpt.checkpoint.run import maintenance

    path = Path(arguments.path)
    if arguments.command == "pin":
        root, name = maintenance.run_of(whole_checkpoint(path))
        maintenance.pin(root, name)
        done = True
    else:
        # A pin outlives its checkpoint where somebody removed that by hand.
        root, name = maintenance.pin_at(path) or maintenance.run_of(whole_checkpoint(path))
        done = maintenance.unpin(root, name)
    if arguments.json:
        print(
            json.dumps({"checkpoint": name, "pinned": arguments.command == "pin", "changed": done})
        )
    else:
        print(
            f"{arguments.command}ned {printable(name)}"
            if done
            else f"{printable(name)} was not pinned"
        )
    return EXIT_DONE
