"""Running measurements in forked processes with a deadline, so that any of them can be stopped, and leaves nothing.

The first process imports torch and transformers once and never initializes CUDA. Each measurement is forked from it:
it starts in a fraction of a second, has the GPU's memory to itself, and takes all its memory with it when it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tools.gpu.results import NOT_RUN, Results, finite

Figures = Iterator[tuple[str, Mapping[str, Any]]]
"""What a measurement yields: the name and the figures of each result, as soon as it is known."""
Measurement = Callable[..., Figures]

BASE = "base"
"""The name of the measurement that writes a base model, which others need."""
LEAST_SECONDS = 3.0
"""A measurement is not started with less time left."""
_TAIL_LINES = 25
_PR_SET_PDEATHSIG = 1
_END = "end"
_TIMEOUT = "timeout"


class StopRequested(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


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
    """A regular expression: measurements whose names do not contain it are left out, except for bases."""
    bases: dict[str, Path] = field(default_factory=dict)
    """Directories of base models that a part has written already, by the name of their shapes."""

    @property
    def log(self) -> Path:
        """The file with the output of all measurements."""
        return self.out / "gpu.log"


class PartRun:
    """One part of a call: its figures, and the time that it has left."""

    def __init__(self, session: Session, part: str, seconds: float) -> None:
        self.session = session
        self.deadline = time.monotonic() + seconds
        self.results = Results(
            session.out / f"{part}.json", part, session.machine, is_dry_run=session.is_dry_run
        )

    @property
    def seconds_left(self) -> float:
        """Seconds until the part has to end."""
        return self.deadline - time.monotonic()

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
            self.results.fail(name, f"{NOT_RUN}: the time of the part was over")
            return {}
        print(f"  {name} ...", flush=True)
        started = time.monotonic()
        output = self.session.scratch / "output.log"
        found: dict[str, Mapping[str, Any]] = {}
        reason = _run_child(self._receive(found), output, measurement, arguments, seconds)
        text = output.read_text(errors="replace")
        with open(self.session.log, "a") as log:
            log.write(f"==== {self.results.content['part']}: {name}\n{text}\n")
        if reason is not None:
            tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
            self.results.fail(name, f"{reason}\n{tail}".strip())
        took = time.monotonic() - started
        print(f"    {took:.1f} s" + (f", FAILED: {reason}" if reason else ""), flush=True)
        return found

    def _receive(self, found: dict[str, Mapping[str, Any]]) -> Callable[[str, Any], None]:
        def receive(name: str, figures: Any) -> None:
            found[name] = figures
            self.results.add(name, figures)
            print(f"    {name}: {short_text(figures)}", flush=True)

        return receive


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
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _be_child(parent, write_end, output, measurement, arguments)
    os.close(write_end)
    status = None
    try:
        end = _read_figures(read_end, receive, time.monotonic() + seconds)
        if end is None:
            # Without a report, the child has ended, or ends now. Its exit status states how; a signal would hide it.
            status = os.waitpid(child, 0)[1]
    finally:
        os.close(read_end)
        _kill_group(child)
        if status is None:
            os.waitpid(child, 0)
    if status is not None:
        return f"its process ended with {os.waitstatus_to_exitcode(status)} before it was done"
    if end == _TIMEOUT:
        return f"stopped after {seconds:.0f} s"
    return end or None


def _read_figures(
    read_end: int, receive: Callable[[str, Any], None], deadline: float
) -> str | None:
    """Receive figures until the child reports how it ends: its error, or an empty text.

    Returns ``timeout`` if it is not done at the *deadline*, and None if it died without a report.
    """
    unread = b""
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        ready, _, _ = select.select([read_end], [], [], left)
        if not ready:
            return _TIMEOUT
        received = os.read(read_end, 1 << 16)
        if not received:
            return None
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            name, figures = json.loads(line)
            # Not the end of the pipe: a process that the child has left behind may hold it open.
            if name == _END:
                return str(figures)
            receive(name, figures)


def _be_child(
    parent: int,
    write_end: int,
    output: Path,
    measurement: Measurement,
    arguments: tuple[Any, ...],
) -> NoReturn:
    """Run the measurement as the forked process, and exit."""
    end = ""
    try:
        os.setpgid(0, 0)
        die_with(parent)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        for name, figures in measurement(*arguments):
            _send(write_end, name, figures)
    except BaseException as error:
        traceback.print_exc()
        end = f"{type(error).__name__}: {str(error)[:500]}"
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        _send(write_end, _END, end)
        # Without the interpreter's teardown, which can wait for threads of CUDA and of process groups.
        os._exit(0)


def _send(write_end: int, name: str, figures: Any) -> None:
    line = json.dumps([name, finite(figures)]).encode() + b"\n"
    while line:
        line = line[os.write(write_end, line) :]


def die_with(parent: int) -> None:
    """Have the kernel kill this process when *parent* ends, also by a signal."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_group(child: int) -> None:
    """Kill a forked process and all processes of its group."""
    for kill in (os.killpg, os.kill):
        try:
            kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue


def raise_on_signals() -> None:
    """Raise :class:`StopRequested` in this process for SIGTERM, SIGHUP and SIGINT, so that cleanup runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
