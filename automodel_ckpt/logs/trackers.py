"""Experiment trackers with one common interface. Each imports its own library, none of which this package requires.

A tracker is created with the run's directory, a *memory* and the options of the recipe, which are passed to the
library. The memory is a mapping that is stored in the run's directory from one start to the next; its ``attempt``
counts the tracker's runs for this run. Trackers are used by a process (:mod:`automodel_ckpt.logs.follow`) that a
:class:`Tracking` of the trainer starts.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from automodel_ckpt.base.python_child import start_python
from automodel_ckpt.checkpoint.files.type_aliases import Metrics, ValueDict, Values
from automodel_ckpt.errors import RecipeError

log = logging.getLogger("automodel_ckpt")


class Tracker(Protocol):
    """Receives values. An exception that it raises disables only this tracker."""

    is_durable: ClassVar[bool] = False
    """Whether logged and flushed values survive when every process is killed."""

    def log(self, step: int, values: Metrics) -> None:
        """Log the values of a step, by names such as ``train/loss``. The steps of each name ascend."""

    def log_text(self, step: int, name: str, text: str) -> None:
        """Log Markdown *text* under *name*, if the library supports it. The steps ascend."""

    def flush(self) -> None:
        """Send buffered values, if the library supports it."""

    def close(self) -> None:
        """Send buffered values, and end."""


class TensorBoard(Tracker):
    """Writes event files to ``tensorboard/`` of the run, or to the option ``log_dir``; later attempts to a directory
    in it."""

    is_durable = True

    def __init__(self, run: Path, memory: ValueDict, *, log_dir: str | None = None) -> None:
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = import_module("tensorboard.compat.proto.summary_pb2")
        directory = Path(log_dir or run / "tensorboard")
        if memory.get("attempt", 1) > 1:
            directory /= f"attempt-{memory['attempt']}"
        # A run directory from elsewhere must not lead out of it.
        if directory.is_symlink():
            raise NotADirectoryError(f"{directory} is a link")
        self._writer = writer.EventFileWriter(str(directory))

    def log(self, step: int, values: Metrics) -> None:
        value = self._summaries.Summary.Value
        entries = [value(tag=name, simple_value=number) for name, number in values.items()]
        self._write(step, summary=self._summaries.Summary(value=entries))

    def log_text(self, step: int, name: str, text: str) -> None:
        plugin = import_module("tensorboard.plugins.text.metadata")
        tensors = import_module("tensorboard.util.tensor_util")
        value = self._summaries.Summary.Value(
            tag=name,
            metadata=plugin.create_summary_metadata(display_name="", description=""),
            tensor=tensors.make_tensor_proto([text]),
        )
        self._write(step, summary=self._summaries.Summary(value=[value]))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases, resumed by its id. The options are arguments of ``wandb.init``.

    wandb's own steps must not descend, so the logged value ``step`` is the axis of all others.
    """

    def __init__(self, run: Path, memory: ValueDict, **options: Any) -> None:
        wandb = import_module("wandb")
        defaults = {"dir": str(run), "name": _name(run, memory)}
        if "id" in memory:
            defaults |= {"id": memory["id"], "resume": "allow"}
        self._run = wandb.init(**(defaults | options))
        # Stored for the next start, which resumes the same run of wandb.
        memory["id"] = self._run.id
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._last = 0

    def log(self, step: int, values: Metrics) -> None:
        self._last = max(step, self._last)
        self._run.log({**values, "step": step}, step=self._last)

    def log_text(self, step: int, name: str, text: str) -> None:
        html = import_module("wandb").Html(f"<pre>{escape(text)}</pre>")
        self.log(step, {name: html})

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of MLflow, resumed by its id.

    Options: ``tracking_uri``, ``experiment``, and the arguments of the client's ``create_run``.
    """

    is_durable = True

    def __init__(
        self,
        run: Path,
        memory: ValueDict,
        *,
        tracking_uri: str | None = None,
        experiment: str = "automodel_ckpt",
        **options: Any,
    ) -> None:
        self._metric = import_module("mlflow.entities").Metric
        self._client = client = import_module("mlflow").MlflowClient(tracking_uri)
        if "id" not in memory:
            found = client.get_experiment_by_name(experiment)
            experiment_id = found.experiment_id if found else client.create_experiment(experiment)
            created = client.create_run(
                experiment_id, **({"run_name": _name(run, memory)} | options)
            )
            memory["id"] = created.info.run_id
        self._id = memory["id"]
        # close() of an earlier process has marked the run as finished.
        client.update_run(self._id, status="RUNNING")

    def log(self, step: int, values: Metrics) -> None:
        # MLflow's timestamps are in milliseconds.
        now = int(1000 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics)

    def log_text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/step_{step}.md")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio(Tracker):
    """A run of trackio, resumed by its name. The options are arguments of ``trackio.init``."""

    def __init__(self, run: Path, memory: ValueDict, **options: Any) -> None:
        trackio = import_module("trackio")
        name = memory.setdefault("name", options.pop("name", _name(run, memory)))
        defaults = {"project": "automodel_ckpt", "resume": "allow"}
        self._run = trackio.init(**(defaults | options), name=name)

    def log(self, step: int, values: Metrics) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _name(run: Path, memory: Values) -> str:
    """Return the name of the run in a tracker: its directory's name, with a number after the first attempt."""
    attempt = memory.get("attempt", 1)
    return run.name if attempt == 1 else f"{run.name}-{attempt}"


TRACKERS: Mapping[str, type[Any]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""All trackers by name, which is also the name of the library."""


# ---------------------------------------------------------------- seen from the trainer

CLOSE_SECONDS = 10.0


def require_trackers(names: Collection[str], *, has_logs: bool) -> None:
    """Raise :class:`RecipeError` for trackers without an installed library.

    If the run has no logs, raises it for any tracker.
    """
    if names and not has_logs:
        raise RecipeError(
            "trackers read the run's logs, but this run writes none",
            "logging.trackers",
            "checkpoint.enabled is false",
            "set checkpoint.enabled, or remove the trackers",
        )
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise RecipeError(
            "a tracker's library is not installed",
            "logging.trackers",
            ", ".join(missing),
            f"pip install {' '.join(missing)}, or remove the tracker: `ckpt track` can send the run later",
        )


class Tracking:
    """Follows the logs in *run* until :meth:`close`; ends after this process, however that ends, not before.

    The run continues from step *after*; with *went_back*, it ignores later checkpoints. Only the training steps
    that *every_steps* divides are sent.
    """

    def __init__(
        self,
        run: Path,
        trackers: Mapping[str, Values],
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
        self.close()

    def close(self) -> None:
        """Have the rest sent. The process continues on its own if that takes longer than a few seconds."""
        with suppress(BrokenPipeError):
            self._pipe.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("trackers are still sending; they end within a minute")
