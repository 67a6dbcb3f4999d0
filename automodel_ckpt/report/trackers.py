"""Experiment trackers behind one small protocol. Each imports its own library, none of which this package needs.

A tracker is made with the run's directory, a *memory* (a mapping that is kept in the run's directory from one start to
the next), the step after which values will come, and the options of the recipe, which go to the library as they are.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Takes values; whatever it raises ends it, and nothing else."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values of a step, by names such as ``train/loss``. Steps do not fall, and come again for other names."""

    def close(self) -> None:
        """Send what is still held back."""


class TensorBoard:
    """Event files in ``tensorboard/`` of the run (option ``log_dir``: elsewhere). A run that went back has TensorBoard
    forget the later steps (its session log does that; source: tensorboard's event.proto)."""

    def __init__(self, run: Path, memory: dict[str, Any], after: int, *, log_dir: str | None = None) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = writer.EventFileWriter(log_dir or str(run / "tensorboard"))
        if after:
            session = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(after + 1, session_log=session)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        summary = self._summaries.Summary(value=[value(tag=k, simple_value=v) for k, v in values.items()])
        self._write(step, summary=summary)

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


class WeightsAndBiases:
    """A run of Weights & Biases, found again by its id; the options are those of ``wandb.init``."""

    def __init__(self, run: Path, memory: dict[str, Any], after: int, **options: Any) -> None:
        wandb = importlib.import_module("wandb")
        known = {"id": memory["id"], "resume": "allow"} if "id" in memory else {}
        self._run = wandb.init(**({"dir": str(run), "name": run.name} | known | options))
        memory["id"] = self._run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, found again by its id. Options: ``tracking_uri``, ``experiment``, and those of the client's
    ``create_run``."""

    def __init__(
        self, run: Path, memory: dict[str, Any], after: int, *,
        tracking_uri: str | None = None, experiment: str = "automodel_ckpt", **options: Any,
    ) -> None:  # fmt: skip
        mlflow = importlib.import_module("mlflow")
        self._client = mlflow.MlflowClient(tracking_uri)
        if "id" not in memory:
            found = self._client.get_experiment_by_name(experiment)
            place = found.experiment_id if found else self._client.create_experiment(experiment)
            memory["id"] = self._client.create_run(place, **({"run_name": run.name} | options)).info.run_id
        self._id = memory["id"]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    """A run of trackio, found again by its name; the options are those of ``trackio.init``."""

    def __init__(self, run: Path, memory: dict[str, Any], after: int, **options: Any) -> None:
        trackio = importlib.import_module("trackio")
        name = memory.setdefault("name", options.pop("name", run.name))
        self._run = trackio.init(**({"project": "automodel_ckpt", "resume": "allow"} | options), name=name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, type[Any]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip
"""By name, which is also that of the library to be imported."""
