"""What other processes of a node can find out about a rank that does not respond: its Python stacks, or its state.

A rank that holds the interpreter dumps its stacks when it receives a signal. A suspended one (SIGSTOP, a debugger), or
one that waits in the kernel, cannot: then the kernel's view of it (/proc) is all there is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

DUMP_SIGNAL = signal.SIGRTMAX - 2
"""A process that receives it writes the stacks of its threads, also while its main thread holds the interpreter."""
SUSPENDED = "suspended"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a file system",
    "T": SUSPENDED,
    "t": f"{SUSPENDED} by a debugger",
    "Z": "ended",
}
"""States of a process (source: proc_pid_stat(5))."""
_FILE_NAME = "automodel_ckpt-stacks"
_MAX_BYTES = 2**20
_MAX_THREADS = 200
_DUMP_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ProcessAddress:
    """A process of a job, such that its node's processes can find it, and mistake no other process for it.

    *host* is the name of the node. *namespace* identifies the running kernel and the namespace of process ids: two
    containers may have one host name. *started* is in clock ticks since the kernel's start: ids are used again.
    *descriptor* is the number of the file in that process to which it dumps its stacks.
    """

    host: str
    namespace: str
    process: int
    started: int
    descriptor: int

    @property
    def is_on_this_node(self) -> bool:
        """Whether the process is in the namespace of this one."""
        return bool(self.namespace) and self.namespace == _namespace()


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What was found out about a process: a *note* that follows its name, and a *text* of many lines."""

    note: str
    text: str


class StackDump:
    """Writes the stacks of this process into a file in memory when it receives :data:`DUMP_SIGNAL`.

    Only for the main thread.
    """

    def __init__(self) -> None:
        # The default would end the process: others send the signal while they see the file, which is there a moment
        # before the handler, and after it.
        signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
        # It is open as long as the handler is registered.
        self._file = os.fdopen(os.memfd_create(_FILE_NAME), "r+b")
        faulthandler.register(DUMP_SIGNAL, self._file, all_threads=True)

    @property
    def address(self) -> ProcessAddress:
        """The address of this process and its file."""
        return _address(os.getpid(), self._file.fileno())

    def __enter__(self) -> StackDump:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Handle the signal no more."""
        faulthandler.unregister(DUMP_SIGNAL)
        self._file.close()


def _address(process: int, descriptor: int) -> ProcessAddress:
    started = _started(_stat(process))
    return ProcessAddress(socket.gethostname(), _namespace(), process, started, descriptor)


def report_on(address: ProcessAddress) -> ProcessReport | None:
    """Return what this node knows of another process, with its stacks if it can dump them; None on another node."""
    if not address.is_on_this_node:
        return None
    process = address.process
    stat = _stat(process)
    if not stat or stat[0] == "Z" or _started(stat) != address.started:
        return ProcessReport(f"has ended (process {process})", "")
    seen = _threads_text(process)
    if stat[0] in ("T", "t"):
        return ProcessReport(f"is {_STATES[stat[0]]} (process {process})", seen)
    stacks = _dumped(address)
    if stacks:
        note = f"does not respond (process {process}), its stacks were dumped"
        return ProcessReport(note, f"{seen}\n{stacks}")
    state = _STATES.get(stat[0], stat[0])
    return ProcessReport(f"does not respond (process {process}, {state})", seen)


def _dumped(address: ProcessAddress) -> str:
    """Let a process dump its stacks, and return them; empty if it does not."""
    path = Path(f"/proc/{address.process}/fd/{address.descriptor}")
    with contextlib.suppress(OSError):
        before = path.stat().st_size
        os.kill(address.process, DUMP_SIGNAL)
        time.sleep(_DUMP_SECONDS)
        with path.open("rb") as file:
            # An earlier dump is in the file, too.
            file.seek(before)
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    return ""


def _threads_text(process: int) -> str:
    """Return a line for each thread of a process: its id, name, state, and the kernel's function that it waits in."""
    lines = [f"process {process}, from /proc:"]
    with contextlib.suppress(OSError):
        for thread in sorted(os.listdir(f"/proc/{process}/task"), key=int)[:_MAX_THREADS]:
            directory = Path(f"/proc/{process}/task/{thread}")
            with contextlib.suppress(OSError):
                name = (directory / "comm").read_text("utf-8", "replace").strip()
                stat = _stat(process, thread)
                state = _STATES.get(stat[0], stat[0]) if stat else "ended"
                waits_in = ""
                # Only readable with the right to trace the process.
                with contextlib.suppress(OSError):
                    waits_in = (directory / "wchan").read_text().strip("0 \n")
                lines.append(f"  thread {thread} {name}: {state}{waits_in and f' in {waits_in}'}")
    return "\n".join(lines) + "\n"


def _stat(process: int, thread: str = "") -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if there is no such process."""
    path = f"/proc/{process}/task/{thread}/stat" if thread else f"/proc/{process}/stat"
    try:
        # The name of the command comes first, and may contain spaces and parentheses.
        return Path(path).read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def _started(stat: list[str]) -> int:
    """Return the start time in clock ticks: field 22 of the file, and the state is field 3."""
    return int(stat[19]) if len(stat) > 19 else 0


def _namespace() -> str:
    """Return what identifies this kernel and the namespace of this process's ids; empty if that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
