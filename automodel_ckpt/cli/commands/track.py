"""``ckpt track``: upload a run's log to an experiment tracker after training, or again."""

from __future__ import annotations

import importlib.util
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.cli.common.arguments import RUN
from automodel_ckpt.cli.common.output import print_document
from automodel_ckpt.cli.common.paths import run_with_logs
from automodel_ckpt.errors import CheckpointUnusable, RecipeError, SaveFailed
from automodel_ckpt.logs.trackers import TRACKERS

USAGE = f"""
Upload the entries of a run's log that the tracker does not have yet: losses, gradient norm, learning rate, throughput,
saves. During training, use logging.trackers instead.

{RUN}
--to {{{",".join(TRACKERS)}}} required | the tracker; its library must be installed
--again                | upload the whole log, including entries that were already uploaded
--option repeat KEY=VALUE | an option of the tracker, such as project=x
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt track``.

    Raises :class:`RecipeError` if the tracker's library is not installed, or another process uploads the log,
    :class:`CheckpointUnusable` if there is no log, and :class:`SaveFailed` if the tracker failed.
    """
    from automodel_ckpt.logs.follow import Follower, upload_lock
    from automodel_ckpt.logs.history import read_history

    run = run_with_logs(Path(arguments.path))
    last = read_history(run).last_step
    if not (run / layout.TRAINING_LOG).exists():
        raise CheckpointUnusable(
            "the run has no log to upload",
            run / layout.TRAINING_LOG,
            "no such file",
            "use the directory of a run, the checkpoint.checkpoint_dir of its recipe",
        )
    if importlib.util.find_spec(arguments.to) is None:
        raise RecipeError(
            "the library of the tracker is not installed",
            "--to",
            arguments.to,
            f"pip install {arguments.to}",
        )
    options = _options(arguments.option)
    _check_options(arguments.to, options)
    # Follower disables a tracker that raises, and only reports it.
    reasons: list[str] = []
    # 0: the tracker has to forget, or to start anew, because all steps are sent again.
    after = 0 if arguments.again else None
    with upload_lock(run, wait=False) as is_locked:
        if not is_locked:
            raise RecipeError("another process is uploading this run's log", "ckpt track", run)
        with _collecting_failures(reasons):
            Follower(
                run, {arguments.to: options}, after, lambda _, reason: reasons.append(reason)
            ).close()
    if reasons:
        raise SaveFailed(
            "the tracker failed, and does not have the whole log",
            f"--to {arguments.to}",
            reasons[0],
            "correct the cause, then run this command again: it uploads what the tracker lacks",
        )
    document = {"path": str(run), "tracker": arguments.to, "step": last}
    return print_document(arguments, document, f"{arguments.to} has {run} up to step {last}")


@contextmanager
def _collecting_failures(reasons: list[str]) -> Iterator[None]:
    """Add the exceptions of threads to *reasons* inside this context: Python prints their tracebacks.

    TensorBoard's files are written by such a thread.
    """
    before = threading.excepthook

    def collect(failure: threading.ExceptHookArgs) -> None:
        reasons.append(f"{failure.exc_type.__name__}: {failure.exc_value}".splitlines()[0])

    threading.excepthook = collect
    try:
        yield
    finally:
        threading.excepthook = before


def _check_options(tracker: str, options: Values) -> None:
    """Raise :class:`RecipeError` for an option that the tracker does not have."""
    from automodel_ckpt.config.keys.monitoring import TRACKER_OPTIONS

    known = TRACKER_OPTIONS.get(tracker, options)
    for name in options:
        if name not in known:
            raise RecipeError(
                f"{tracker} has only the options {', '.join(known)}", "--option", name
            )


def _options(words: list[str]) -> ValueDict:
    """Parse the values of ``--option``. Raises :class:`RecipeError` for one without ``=``."""
    from automodel_ckpt.config.tree.yaml_tree import untyped

    options = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator:
            raise RecipeError("an option has the form KEY=VALUE", "--option", word)
        options[key] = untyped(value)
    return options
