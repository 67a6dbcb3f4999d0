"""What other processes of a node can find out about a rank that does not respond: its Python stacks, or its state.

A rank that holds the interpreter dumps its stacks when it receives a signal. A suspended one (SIGSTOP, a debugger), or
one that waits in the kernel, cannot: then only its state (source: proc_pid_stat(5)) is known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

DUMP_SIGNAL = signal.SIGRTMAX - 2
"""A process that receives it writes the stacks of its threads, also while its main thread holds the interpreter."""
_MAX_BYTES = 2**20
_DUMP_SECONDS = 0.5


@dataclass(frozen=True)
class ProcessAddress:
    """A process of a job: its id, the number of the file in it to which it dumps its stacks, and that file's name.

    The name is random: ids are used again, and ids of another container or node belong to other processes, which the
    signal would end.
    """

    process: int
    descriptor: int
    name: str

    @property
    def path(self) -> Path:
        """The file of the process, as other processes can open it."""
        return Path(f"/proc/{self.process}/fd/{self.descriptor}")

    @property
    def is_on_this_node(self) -> bool:
        """Whether the process runs in the namespace of this one."""
        try:
            return self.name in os.readlink(self.path)
        except OSError:
            return False


@dataclass(frozen=True)
class ProcessReport:
    """What was found out about a process: a *note* that follows its name, and the *text* of its stacks."""

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
        name = f"automodel_ckpt-stacks-{uuid.uuid4().hex}"
        # It is open as long as the handler is registered.
        self._file = os.fdopen(os.memfd_create(name), "r+b")
        faulthandler.register(DUMP_SIGNAL, self._file, all_threads=True)
        self.address = ProcessAddress(os.getpid(), self._file.fileno(), name)
        """The address of this process and its file."""

    def __enter__(self) -> StackDump:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Handle the signal no more."""
        faulthandler.unregister(DUMP_SIGNAL)
        self._file.close()


def report_on(address: ProcessAddress) -> ProcessReport | None:
    """Return what this node knows of another process, with its stacks if it can dump them.

    Returns None for a process that has ended or is on another node.
    """
    if not address.is_on_this_node:
        return None
    process = address.process
    with contextlib.suppress(OSError):
        # The name of the command comes first, and may contain spaces and parentheses.
        stat = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2]
        if stat.split()[0] in "Tt":
            return ProcessReport(f"is suspended (process {process})", "")
    stacks = ""
    with contextlib.suppress(OSError):
        before = address.path.stat().st_size
        os.kill(process, DUMP_SIGNAL)
        time.sleep(_DUMP_SECONDS)
        with address.path.open("rb") as file:
            # An earlier dump is in the file, too.
            file.seek(before)
            stacks = file.read(_MAX_BYTES).decode("utf-8", "replace")
    dumped = ", its stacks were dumped" if stacks else ""
    return ProcessReport(f"does not respond (process {process}){dumped}", stacks)
