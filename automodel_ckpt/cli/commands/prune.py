"""``ckpt prune``: remove old checkpoints of a run, or only their optimizer state."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.base.units import duration, size_text
from automodel_ckpt.checkpoint.files.type_aliases import Counts, Values
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.run import maintenance, resume
from automodel_ckpt.checkpoint.run.resume import KeepPolicy, metric_of
from automodel_ckpt.cli.common.arguments import (
    RUN,
    option_flag,
    without_effect,
)
from automodel_ckpt.cli.common.output import table
from automodel_ckpt.cli.common.paths import reject_several_runs, run_around
from automodel_ckpt.cli.common.remote import locate, reject_url
from automodel_ckpt.errors import EXIT_DONE, RecipeError, printable, unusable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.remote.retention import IncompleteUpload

_METRIC = "val_loss"
_MIN_HOURS = 24
# Options that select what to keep, and the option without which each has no effect.
_NEEDED = {
    "keep_best": "keep_last",
    "keep_every_steps": "keep_last",
    "keep_steps": "keep_last",
    "metric": "keep_best",
    "max": "keep_best",
}
# Steps that a message lists.
_MAX_STEPS = 10
USAGE = f"""
Remove checkpoints that no option keeps. Never removed: the newest complete checkpoint, the targets of LATEST,
LOWEST_VAL, pins and other links in the run directory, and anything that is not a complete checkpoint, except with
--incomplete.

{RUN}
--keep-last >=1 N       | keep the newest N
--keep-best >=0 =0 K    | keep the best K by --metric (default: 0)
--keep-every-steps >=1 N | keep checkpoints whose step is a multiple of N
--keep-steps >=0 + S    | keep the checkpoints of these steps
--metric METRIC         | key in losses.json for --keep-best (default: {_METRIC})
--max                   | higher values of --metric are better
--superseded            | also remove superseded checkpoints
--drop-optimizer        | remove only the optimizer state, and keep the weights
--incomplete            | in a store, also remove uploads that were interrupted and never continued
--min-hours >=1 H       | keep an incomplete upload that wrote an object in the last H hours (default: {_MIN_HOURS})
--dry-run               | only print what would be removed
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt prune``: preview or remove checkpoints.

    Raises :class:`RecipeError` if no option selects what to keep or no checkpoint has the metric,
    :class:`CheckpointUnusable` if there is no run, and an error of the lease if a live run uses the directory.
    """
    from automodel_ckpt.checkpoint.run.lease import COMMAND_HINT, Lease

    if is_url(arguments.path):
        return _prune_remote(arguments)
    run = run_around(Path(arguments.path))
    if run is None:
        reject_several_runs(Path(arguments.path))
        raise unusable("no checkpoints found", arguments.path, "", "specify a run directory")
    for name in ("incomplete", "min_hours"):
        if value := getattr(arguments, name):
            raise without_effect("prune", option_flag(name), value, "in a run directory")
    policy = _policy(arguments)
    steps = {record.step for record in resume.records(run, "")}
    _check_selection(arguments, steps, resume.validated_losses(run))
    removable = partial(
        maintenance.removable,
        run,
        policy,
        metric_key=_metric(arguments),
        superseded=arguments.superseded,
    )
    if arguments.dry_run:
        freed = removable()
        for name in freed if arguments.drop_optimizer else ():
            manifest = Manifest.read(run / name)
            freed[name] = manifest.nbytes - maintenance.without_optimizer(manifest).nbytes
    else:
        # Select under the lease: a live run, or another prune, changes the set of checkpoints.
        lease = Lease(run, hint=COMMAND_HINT)
        try:
            maintenance.recover(run)
            freed = _remove(arguments, run, removable(), lease.check)
        finally:
            lease.release()
    if arguments.drop_optimizer:
        # The others have no optimizer state any more.
        freed = {name: nbytes for name, nbytes in freed.items() if nbytes}
    _print_result(arguments, freed)
    return EXIT_DONE


def _prune_remote(arguments: Namespace) -> int:
    """Remove checkpoints in an object store. Those that LATEST and LOWEST_VAL name there are never removed."""
    from automodel_ckpt.checkpoint.remote import retention

    if arguments.drop_optimizer:
        reject_url(arguments.path, "prune --drop-optimizer")
    policy = _policy(arguments)
    run, _ = locate(arguments.path)
    uploads = retention.incomplete(run)
    if not run.names() and not uploads:
        raise unusable("no checkpoints found", run.store, "", "check the URL")
    if arguments.keep_best or arguments.keep_steps:
        summaries = [checkpoint.summary for checkpoint in run.checkpoints()]
        validated = [summary.losses for summary in summaries if summary.validated]
        _check_selection(arguments, {summary.step for summary in summaries}, validated)
    removable = retention.removable(run, policy, _metric(arguments))
    if arguments.superseded:
        removable += retention.superseded(run)
    kept = []
    freed = {}
    for upload in uploads:
        reason = _reason_to_keep(upload, arguments)
        if reason:
            kept.append({"name": upload.name, "nbytes": upload.nbytes, "reason": reason})
        else:
            removable.append(upload.name)
            freed[upload.name] = upload.nbytes
    for name in removable:
        if name not in freed:
            freed[name] = sum(run.store.sizes(name).values())
        if not arguments.dry_run:
            run.withdraw(name)
    _print_result(arguments, freed, kept)
    return EXIT_DONE


def _reason_to_keep(upload: IncompleteUpload, arguments: Namespace) -> str:
    """Return why an incomplete *upload* is kept; empty if it is removed."""
    if upload.written is None:
        return "the store does not tell when it was written: remove it with the store's own tool"
    seconds = max(time.time() - upload.written, 0.0)
    if seconds < 3600 * (arguments.min_hours or _MIN_HOURS):
        return f"last written {duration(seconds)} ago, the upload may be in progress (--min-hours)"
    if not arguments.incomplete:
        return f"last written {duration(seconds)} ago; to remove it: --incomplete"
    return ""


def _policy(arguments: Namespace) -> KeepPolicy:
    selects = arguments.superseded or arguments.incomplete
    if arguments.keep_last is None and not selects:
        raise RecipeError(
            "no checkpoints were selected to keep",
            "ckpt prune",
            "no --keep-last",
            "add --keep-last N (try it with --dry-run first), --superseded, or --incomplete",
        )
    for name, needed in _NEEDED.items():
        value = getattr(arguments, name)
        if value and not getattr(arguments, needed):
            condition = f"without {option_flag(needed)}"
            raise without_effect("prune", option_flag(name), value, condition)
    return KeepPolicy(
        arguments.keep_last,
        arguments.keep_best,
        arguments.keep_every_steps,
        frozenset(arguments.keep_steps or ()),
        "max" if arguments.max else "min",
    )


def _metric(arguments: Namespace) -> str:
    # An empty name, as of a variable that is not set, is an error, not the default.
    return _METRIC if arguments.metric is None else arguments.metric


def _check_selection(arguments: Namespace, known: set[int], losses: Iterable[Values]) -> None:
    """Raise :class:`RecipeError` for steps or a metric of no checkpoint: the one that was meant would be removed.

    *known* are the steps of the complete checkpoints, and *losses* the values of those that were validated.
    """
    missing = sorted(set(arguments.keep_steps or ()) - known)
    if missing:
        existing = ", ".join(map(str, sorted(known)[-_MAX_STEPS:]))
        raise RecipeError(
            "no complete checkpoint has this step",
            "--keep-steps",
            f"{', '.join(map(str, missing))}; the newest steps are {existing}",
        )
    metric = _metric(arguments)
    names = {name for each in losses for name in each if metric_of(each, name) is not None}
    if arguments.keep_best and metric not in names:
        shown = ", ".join(sorted(names - {"step", "epoch"})) or "none: no checkpoint was validated"
        raise RecipeError(
            "no checkpoint has the metric that --keep-best ranks by",
            "--metric",
            f"{metric}; there are {shown}",
        )


def _remove(
    arguments: Namespace,
    run: Path,
    removable: Counts,
    check_lease: Callable[[], None],
) -> dict[str, int]:
    """Remove checkpoints or their optimizer state; map each name to the number of bytes that were freed."""
    if not arguments.drop_optimizer:
        removed = maintenance.remove(run, removable, check_lease=check_lease)
        return {name: removable[name] for name in removed}
    freed = {}
    for name in removable:
        # Removing takes long: a suspended process may have lost the lease meanwhile.
        check_lease()
        freed[name] = maintenance.drop_optimizer(run, name)
    return freed


def _print_result(
    arguments: Namespace,
    freed: Counts,
    incomplete: Sequence[Values] = (),
) -> None:
    """Print what was *freed*, and the *incomplete* uploads that are kept."""
    if arguments.json:
        removed = [{"name": name, "nbytes": nbytes} for name, nbytes in freed.items()]
        document = {
            "dry_run": arguments.dry_run,
            "drop_optimizer": arguments.drop_optimizer,
            "pruned": removed,
        }
        if incomplete:
            document["incomplete"] = list(incomplete)
        print(json.dumps(document))
        return
    for each in incomplete:
        text = f"incomplete: {each['name']}, {size_text(each['nbytes'])}; {each['reason']}"
        print(printable(text), file=sys.stderr)
    if not freed:
        print("nothing to remove")
        return
    action = "would remove" if arguments.dry_run else "removed"
    if arguments.drop_optimizer:
        action += " optimizer state of"
    rows = [(action, printable(name), size_text(nbytes)) for name, nbytes in freed.items()]
    print("\n".join(table(rows)))
    total = size_text(sum(freed.values()))
    print(f"{total} to free" if arguments.dry_run else f"{total} freed")
