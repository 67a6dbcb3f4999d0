"""Experiment trackers behind one small protocol. Each imports its own library, none of which this package needs.

A tracker is made with the run's directory, a *memory* (a mapping that is kept in the run's directory from one start to
the next; ``attempt`` in it counts the runs that it has been to the tracker) and the options of the recipe, which go to
the library as they are.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol


class Tracker(Protocol):
    """Receives values. An exception that it raises disables only this tracker."""

    forgets: ClassVar[bool] = False
    """Whether it can :meth:`forget`. One that cannot gets no value twice."""
    is_durable: ClassVar[bool] = False
    """Whether what was logged and flushed is kept when every process is killed."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values of a step, by names such as ``train/loss``. Each name's steps rise; those of a save may come late."""

    def forget(self, step: int) -> None:
        """Drop the values of *step* and all later ones, which will be logged again."""

    def flush(self) -> None:
        """Send buffered values, if the library supports it."""

    def close(self) -> None:
        """Send buffered values, and end."""


class TensorBoard(Tracker):
    """Event files in ``tensorboard/`` of the run (option ``log_dir``: elsewhere). A session log in them has TensorBoard
    forget (source: tensorboard's event.proto)."""

    forgets = True
    is_durable = True

    def __init__(self, run: Path, memory: dict[str, Any], *, log_dir: str | None = None) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = writer.EventFileWriter(log_dir or str(run / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        summary = self._summaries.Summary(
            value=[value(tag=k, simple_value=v) for k, v in values.items()]
        )
        self._write(step, summary=summary)

    def forget(self, step: int) -> None:
        self._write(step, session_log=self._events.SessionLog(status=self._events.SessionLog.START))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases, found again by its id; the options are those of ``wandb.init``. Its own steps never
    fall, so that the value ``step`` is the axis of all others."""

    def __init__(self, run: Path, memory: dict[str, Any], **options: Any) -> None:
        wandb = importlib.import_module("wandb")
        known = {"id": memory["id"], "resume": "allow"} if "id" in memory else {}
        self._run = wandb.init(**({"dir": str(run), "name": _name(run, memory)} | known | options))
        memory["id"] = self._run.id
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._last = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._last = max(step, self._last)
        self._run.log({**values, "step": step}, step=self._last)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of MLflow, found again by its id. Options: ``tracking_uri``, ``experiment``, and those of the client's
    ``create_run``."""

    is_durable = True

    def __init__(
        self,
        run: Path,
        memory: dict[str, Any],
        *,
        tracking_uri: str | None = None,
        experiment: str = "automodel_ckpt",
        **options: Any,
    ) -> None:
        self._metric = importlib.import_module("mlflow.entities").Metric
        self._client = client = importlib.import_module("mlflow").MlflowClient(tracking_uri)
        known = "id" in memory
        if not known:
            found = client.get_experiment_by_name(experiment)
            place = found.experiment_id if found else client.create_experiment(experiment)
            memory["id"] = client.create_run(
                place, **({"run_name": _name(run, memory)} | options)
            ).info.run_id
        self._id = memory["id"]
        client.update_run(self._id, status="RUNNING")
        # Values that were sent just before a kill may be missing in the memory.
        names = client.get_run(self._id).data.metrics if known else ()
        self._had = {
            (name, point.step)
            for name in names
            for point in client.get_metric_history(self._id, name)
        }

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [
            self._metric(k, v, now, step) for k, v in values.items() if (k, step) not in self._had
        ]
        if metrics:
            self._client.log_batch(self._id, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio(Tracker):
    """A run of trackio, found again by its name; the options are those of ``trackio.init``."""

    def __init__(self, run: Path, memory: dict[str, Any], **options: Any) -> None:
        trackio = importlib.import_module("trackio")
        name = memory.setdefault("name", options.pop("name", _name(run, memory)))
        self._run = trackio.init(
            **({"project": "automodel_ckpt", "resume": "allow"} | options), name=name
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _name(run: Path, memory: Mapping[str, Any]) -> str:
    """The name of the run in a tracker: the name of its directory, with a number after the first attempt."""
    attempt = memory.get("attempt", 1)
    return run.name if attempt == 1 else f"{run.name}-{attempt}"


TRACKERS: Mapping[str, type[Any]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""By name, which is also that of the library to be imported."""
