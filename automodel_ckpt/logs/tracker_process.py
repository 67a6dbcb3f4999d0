"""The process that sends a run's log lines to trackers, seen from the trainer (:mod:`automodel_ckpt.logs.follow`)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.base.python_child import start_python
from automodel_ckpt.errors import RecipeError

log = logging.getLogger("automodel_ckpt")

CLOSE_SECONDS = 10.0


def require_trackers(names: Collection[str], *, has_logs: bool) -> None:
    """Raise :class:`RecipeError` for trackers without an installed library.

    If the run has no logs, raises it for any tracker.
    """
    if names and not has_logs:
        raise RecipeError(
            "trackers read the run's logs, but this run writes none",
            where="logging.trackers",
            value="checkpoint.enabled is false",
            hint="set checkpoint.enabled, or remove the trackers",
        )
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise RecipeError(
            "a tracker's library is not installed",
            where="logging.trackers",
            value=", ".join(missing),
            hint=f"pip install {' '.join(missing)}, or remove the tracker: `ckpt track` can send the run later",
        )


class Tracking:
    """Follows the logs in *run* until :meth:`close`; ends after this process, however that ends, not before.

    The run continues from step *after*; with *went_back*, it ignores later checkpoints. Only the training steps
    that *every_steps* divides are sent.
    """

    def __init__(
        self,
        run: Path,
        trackers: Mapping[str, Mapping[str, Any]],
        after: int,
        *,
        went_back: bool = False,
        every_steps: int = 1,
    ) -> None:
        run.mkdir(parents=True, exist_ok=True)
        # In a separate session, a signal to the trainer's process group leaves it time to send the rest.
        self._process = start_python(
            "automodel_ckpt.logs.follow",
            str(run.absolute()),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        # The other process ends when the kernel closes this pipe, also if this process is killed.
        self._pipe = self._process.stdin
        job = {
            "trackers": trackers,
            "after": after,
            "went_back": went_back,
            "every_steps": every_steps,
        }
        self._pipe.write(json.dumps(job).encode() + b"\n")
        self._pipe.flush()

    def abandon(self) -> None:
        """End the process now: another run has the logs, and its own process sends them."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()

    def close(self) -> None:
        """Have the rest sent. The process continues on its own if that takes longer than a few seconds."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("trackers are still sending; they end within a minute")
