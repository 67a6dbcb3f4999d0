"""Points of the program where a campaign strikes: when a copy begins, while it is sent, in a restart, and so on.

:func:`install` wraps functions of the package, from the outside, in every process of a run. A campaign *arms* one point
at a time (:class:`Armed`). The first process that comes there stops until the campaign lets it go on, or has killed it.
Imports nothing that takes time: the processes that write and send checkpoints have it, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base import python_child

RANK, WRITER, SENDER, LAUNCHER = "a rank", "a writer", "a sender", "a launcher"
"""The kinds of processes. A sender serves a node's memory to other nodes, and sends them copies."""
SAVE, RESTART, RESCUE = "save", "restart", "rescue"
"""When a point is reached: in each save to memory, in a restart, or when no restart follows a failure."""
NODE = "a node"
MODULES = {
    WRITER: "automodel_ckpt.checkpoint.jobs.writer",
    SENDER: "automodel_ckpt.checkpoint.memory.node_process",
}
"""What the processes that are no fork of the launcher run."""
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Point:
    """The beginning of a function of the package, or its *end*.

    *place* is MODULE:FUNCTION, where the function is looked up. *after* is the failure that leads here; empty: any.
    """

    name: str
    place: str
    end: bool = False
    after: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Points in one kind of *process*. *nodes*: only a run on several nodes has them."""

    process: str
    when: str
    points: tuple[Point, ...]
    nodes: bool = False


_STAGE = "checkpoint.saving.background:Background.stage"
_PUBLISH = "checkpoint.saving.publisher:Publisher.publish"
_WRITER = "checkpoint.jobs.writer:"
_COPY = "checkpoint.memory.node_process:Sender._copy"
_SERVER = "checkpoint.memory.node_server:"
_SURVEY = "checkpoint.memory.survey:"
_SAVES = "training.saves.memory_saves:"
_LOAD = "checkpoint.loader:CheckpointLoader._load"
_RESCUE = "checkpoint.memory.rescue:"
_KEEPING = "checkpoint.memory.keeping:"

GROUPS = (
    Group(
        RANK,
        SAVE,
        (
            Point("a copy to memory begins", _STAGE),
            Point("a copy to memory ends", _STAGE, end=True),
            Point("a checkpoint is renamed", _PUBLISH),
            Point("a checkpoint is published", _PUBLISH, end=True),
        ),
    ),
    Group(
        WRITER,
        SAVE,
        (
            Point("the writer begins", _WRITER + "run_all"),
            Point("the writer computes a digest", "checkpoint.jobs.checksums:Checksums.digest"),
            Point("the writer has written all files", _WRITER + "run_all", end=True),
            Point("the writer makes the manifest", _WRITER + "finalize"),
            Point("the writer has written the manifest", _WRITER + "finalize", end=True),
        ),
    ),
    Group(
        SENDER,
        SAVE,
        (
            Point("sending to a replica begins", _COPY),
            Point("a file is sent to a replica", "checkpoint.store.transfer:Throttle.take"),
            Point("sending to a replica ends", _COPY, end=True),
            Point("a replica's file arrives", _SERVER + "_Handler._write_body"),
            Point("a replica's file is stored", _SERVER + "NodeServer.note_received"),
            Point("a replica is renamed", _SERVER + "NodeServer.publish"),
            Point("a replica is published", _SERVER + "NodeServer.publish", end=True),
            Point("an older replica is removed", _SERVER + "NodeServer.keep"),
        ),
        nodes=True,
    ),
    Group(
        RANK,
        RESTART,
        (
            Point("the survey of all nodes begins", _SAVES + "survey"),
            Point("the survey verifies a file", _SURVEY + "file_record"),
            Point("the survey of all nodes ends", _SAVES + "survey", end=True),
            Point("a range of another node is read", _SURVEY + "read_range", after=NODE),
        ),
        nodes=True,
    ),
    Group(
        SENDER,
        RESTART,
        (Point("a range is sent to another node", _SERVER + "_Handler._send_range", after=NODE),),
        nodes=True,
    ),
    Group(
        RANK,
        RESTART,
        (
            Point("loading begins", _LOAD),
            Point("loading ends", _LOAD, end=True),
            Point("older checkpoints are removed", _SAVES + "MemorySaves._remove_all_but"),
            Point("the start is complete", _SAVES + "MemorySaves.start", end=True),
        ),
    ),
    Group(
        LAUNCHER,
        RESCUE,
        (
            Point("a copy to disk begins", _KEEPING + "copy_to_disk"),
            Point("a file is copied to disk", _RESCUE + "fsync_file"),
            Point("a copy to disk is renamed", _RESCUE + "_publish"),
            Point("a copy to disk is published", _RESCUE + "_publish", end=True),
            Point("the memory is freed", _KEEPING + "remove_memory", end=True),
        ),
    ),
)
PROCESSES = {point: group.process for group in GROUPS for point in group.points}
"""The kind of process that comes to each point."""


def points_in(*when: str, nodes: bool) -> tuple[Point, ...]:
    """The points of a run; with *nodes*, of one on several nodes."""
    found: list[Point] = []
    for group in GROUPS:
        if group.when in when and (nodes or not group.nodes):
            found += group.points
    return tuple(found)


# ---------------------------------------------------------------- in the processes of a run


def install(*processes: str) -> None:
    """Wrap the functions of all points in *processes*; none: in the launcher, the ranks, and all that they start."""
    for point, process in PROCESSES.items():
        if process in (processes or (LAUNCHER, RANK)):
            _wrap(point)
    if not processes:
        # The child's arguments begin with the name of its module.
        start = (
            "import importlib; from tools.crash.points import install_in; install_in(sys.argv[1]); "
        )
        python_child._START = python_child._START.replace("import importlib; ", start)


def install_in(module: str) -> None:
    """Wrap the functions of all points in the process that runs *module*, if it has points."""
    for process, name in MODULES.items():
        if name == module:
            install(process)


def _wrap(point: Point) -> None:
    module, _, path = point.place.partition(":")
    owner: Any = importlib.import_module(f"automodel_ckpt.{module}")
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    setattr(owner, name, _stopping(point, getattr(owner, name)))


def _stopping(point: Point, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not point.end:
            _come_to(point)
        result = function(*arguments, **options)
        if point.end:
            _come_to(point)
        return result

    return wrapped


def _come_to(point: Point) -> None:
    """Stop here if the campaign has armed this point."""
    directory = Path(os.environ["CRASH_MARKS"])
    stopped = directory / f"{_STOPPED}{os.getpid()}"
    # Only one process succeeds.
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory / _file_name(point), stopped)
        end = time.monotonic() + _STOP_SECONDS
        while stopped.exists() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)


# ---------------------------------------------------------------- in the campaign

_STOPPED = "stopped-"


def _file_name(point: Point) -> str:
    return f"armed-{point.name.replace(' ', '_')}"


class Armed:
    """A *point* where the next process stops, of a run with its marks in *directory*. Use it as a context."""

    def __init__(self, directory: Path, point: Point) -> None:
        self._directory = directory
        self._file = directory / _file_name(point)

    def __enter__(self) -> Armed:
        self._file.touch()
        return self

    @property
    def stopped(self) -> int | None:
        """The id of the process that has stopped; None if none has."""
        for path in self._directory.glob(f"{_STOPPED}*"):
            return int(path.name.removeprefix(_STOPPED))
        return None

    def __exit__(self, *_: object) -> None:
        """Let the process go on."""
        self._file.unlink(missing_ok=True)
        for path in self._directory.glob(f"{_STOPPED}*"):
            path.unlink(missing_ok=True)
