"""Running measurements in forked processes with a deadline, so that any of them can be stopped, and leaves nothing.

The first process imports torch and transformers once and never initializes CUDA. Each measurement is forked from it:
it starts in a fraction of a second, has the GPU's memory to itself, and takes all its memory with it when it ends.
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

Figures = Iterator[tuple[str, Mapping[str, Any]]]
"""What a measurement yields: the name and the figures of each result, as soon as it is known."""
Measurement = Callable[..., Figures]

BASE = "base"
"""The name of the measurement that writes a base model, which others need."""
LEAST_SECONDS = 3.0
"""A measurement is not started with less time left."""
_TAIL_LINES = 25
_PR_SET_PDEATHSIG = 1
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
RUNNING = "running"
"""The value of ``ended`` in the file of a part that has not ended, or was killed."""
_END = "end"


@dataclass(frozen=True)
class Session:
    """What the parts of one call share.

    *device* is ``cuda`` or ``cpu``; *scratch* is removed at the end of the call, *out* is kept. *machine* describes
    versions and hardware.
    """

    device: str
    is_dry_run: bool
    scratch: Path
    out: Path
    machine: Mapping[str, Any]
    only: str = ""
    """A regular expression: measurements with other names are left out, except for bases."""
    bases: dict[str, Path] = field(default_factory=dict)
    """Directories of base models that a part has written already, by the name of their shapes."""

    @property
    def log(self) -> Path:
        return self.out / "gpu.log"


class NoBase(Exception):
    """The base model of a part could not be written."""


class PartRun:
    """One part of a call: its figures by the name of the measurement, what failed, and the time that it has left.

    Its file is replaced after each change by a rename, so that whoever stops the process finds complete JSON.
    """

    def __init__(self, session: Session, part: str, seconds: float) -> None:
        self.session, self.name = session, part
        self.started = time.monotonic()
        self.deadline = self.started + seconds
        self.figures: dict[str, Mapping[str, Any]] = {}
        self.failed: dict[str, str] = {}
        """A reason for each measurement that has no figures, or not all, and the end of its output."""
        self._content: dict[str, Any] = {
            "part": part,
            "is_dry_run": session.is_dry_run,
            "machine": dict(session.machine),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self.write(RUNNING)

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def write(self, ended: str = RUNNING) -> None:
        """Write the file; *ended* is ``done`` or why the part was stopped."""
        self._content |= {"seconds": round(time.monotonic() - self.started, 1), "ended": ended}
        content = {**self._content, "figures": self.figures, "failed": self.failed}
        path = self.session.out / f"{self.name}.json"
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(partial, path)

    def add(self, name: str, figures: Mapping[str, Any]) -> None:
        self.figures[name] = dict(figures)
        self.write()

    def fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        self.write()

    def base(self, config: Mapping[str, Any], key: str = "", auto_class: str = "") -> Path:
        """The directory of a base of these shapes, which the first part that needs it writes.

        Raises NoBase if that failed.
        """
        from tools.gpu.shapes import TINY, write_base

        session = self.session
        key = key or str(config["hidden_size"])
        if key not in session.bases:
            directory = session.scratch / f"base-{key}"
            shapes = TINY if session.is_dry_run and not auto_class else config
            arguments = (shapes, directory, session.device, auto_class or "AutoModelForCausalLM")
            if not self.measure(BASE, write_base, *arguments, limit=180):
                raise NoBase
            session.bases[key] = directory
        return session.bases[key]

    def remove_base(self, key: str) -> None:
        """Remove a base, if there is one; a later part writes it again."""
        directory = self.session.bases.pop(key, None)
        if directory is not None:
            shutil.rmtree(directory)

    def measure(
        self, name: str, measurement: Measurement, *arguments: Any, limit: float = 480.0
    ) -> dict[str, Mapping[str, Any]]:
        """Run a measurement in a forked process, and return what it yielded, by name.

        Everything is also in the part's file as soon as it is yielded. A measurement that raises, ends the process, or
        is not done after *limit* seconds is recorded as failed under *name*; the part continues. One that the session
        leaves out yields nothing.
        """
        if name != BASE and not re.search(self.session.only, name):
            return {}
        seconds = min(limit, self.seconds_left)
        if seconds < LEAST_SECONDS:
            self.fail(name, "not run: the time of the part was over")
            return {}
        print(f"  {name} ...", flush=True)
        started = time.monotonic()
        output = self.session.scratch / "output.log"
        found: dict[str, Mapping[str, Any]] = {}

        def receive(result: str, figures: Any) -> None:
            found[result] = figures
            self.add(result, figures)
            print(f"    {result}: {short_text(figures)}", flush=True)

        reason = _run_child(receive, output, measurement, arguments, seconds)
        text = output.read_text(errors="replace")
        with open(self.session.log, "a") as log:
            log.write(f"==== {self.name}: {name}\n{text}\n")
        if reason is not None:
            tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
            self.fail(name, f"{reason}\n{tail}".strip())
        took = time.monotonic() - started
        print(f"    {took:.1f} s" + (f", FAILED: {reason}" if reason else ""), flush=True)
        return found


def short_text(figures: Mapping[str, Any]) -> str:
    """Figures in one line; texts and lists are left out."""
    words = []
    for name, value in figures.items():
        if isinstance(value, bool) or value is None:
            words.append(f"{name} {value}")
        elif isinstance(value, int | float):
            words.append(f"{name} {value:.4g}")
    return ", ".join(words)


def _run_child(
    receive: Callable[[str, Any], None],
    output: Path,
    measurement: Measurement,
    arguments: tuple[Any, ...],
    seconds: float,
) -> str | None:
    """Run a measurement in a forked process; return why it failed, or None. No process of its group survives."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    reader, writer = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _be_child(parent, writer, output, measurement, arguments)
    writer.close()
    deadline = time.monotonic() + seconds
    reason: str | None = f"stopped after {seconds:.0f} s"
    try:
        while reader.poll(max(deadline - time.monotonic(), 0.0)):
            name, figures = reader.recv()
            # Not the end of the pipe: a process that the child has left behind may hold it open.
            if name == _END:
                reason = figures
                break
            receive(name, figures)
    except EOFError:
        reason = "its process ended before it was done"
    finally:
        reader.close()
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return reason


def _be_child(
    parent: int,
    writer: Connection,
    output: Path,
    measurement: Measurement,
    arguments: tuple[Any, ...],
) -> NoReturn:
    error: str | None = None
    try:
        os.setpgid(0, 0)
        # The kernel kills this process when its parent ends, also by a signal.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        for number in _STOPS:
            signal.signal(number, signal.SIG_DFL)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        for name, figures in measurement(*arguments):
            writer.send((name, dict(figures)))
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {str(raised)[:500]}"
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        writer.send((_END, error))
        # Without the interpreter's teardown, which can wait for threads of CUDA and of process groups.
        os._exit(0)


def exit_on_signals() -> None:
    """End this process with SystemExit for SIGTERM, SIGHUP and SIGINT, so that cleanup runs."""
    for number in _STOPS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def read_all(directory: Path) -> dict[str, dict[str, Any]]:
    """Read the files of all parts in a directory, by part. Files that are not of this tool are ignored."""
    found = {}
    for path in sorted(directory.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError:
            continue
        if isinstance(content, dict) and {"part", "figures"} <= content.keys():
            found[content["part"]] = content
    return found
