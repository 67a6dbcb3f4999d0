"""Reports on hangs of a run on nodes without shared storage: each node sends its files to all others.

When a step hangs, the ranks exchange their states through files in the run directory
(:mod:`automodel_ckpt.parallel.ranks.hangs`). The processes of the nodes copy them, since ranks may be suspended or hold
the GIL. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.memory.requests import Address, NodeFailed

ARRIVAL_SECONDS = 1.0
"""How long a report usually takes, at most, until it is on all nodes that respond."""
MAX_BYTES = 4 << 20
"""The largest file that is sent."""
_POLL_SECONDS = 0.25
_NUM_THREADS = 16
_FILE = re.compile(
    r"step_[0-9]{1,18}/(rank_[0-9]{1,9}|stacks_of_rank_[0-9]{1,9}|report)\.txt", re.ASCII
)

Stamp = tuple[int, int]
"""The inode of a file, and the time of its last change in nanoseconds."""
Stamps = Mapping[str, Stamp]
"""By the path of a file relative to the directory of all reports."""


def is_report(file: str) -> bool:
    """Whether *file* is the path of a report, relative to the directory of all reports."""
    return _FILE.fullmatch(file) is not None


class HangReports:
    """The reports in the directory of one node, which are sent to other nodes in a thread.

    *send* sends the content of a report to a node, and raises :class:`~.requests.NodeFailed`. Several threads use it.
    """

    def __init__(self, run: Path, send: Callable[[Address, str, bytes], None]) -> None:
        """*run* is the run directory of the node. What it has now is of earlier starts."""
        self.root = run / layout.HANGS
        self._send = send
        self._lock = threading.Lock()
        self._of_others = self._stamps()
        """Files that are not sent: files of earlier starts, and files that other nodes have sent."""
        self._targets: Sequence[Address] = ()
        self._sent: dict[Address, dict[str, Stamp]] = {}
        self._sending: dict[Address, Future[None]] = {}
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "reports")
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)

    def receive(self, file: str, data: bytes) -> None:
        """Write a report of another node. Raises OSError."""
        directory = (self.root / file).parent
        # Before the directory is created, which would follow a link of its parent.
        if self.root.is_symlink() or directory.is_symlink():
            raise NotADirectoryError(f"{directory} is a symbolic link")
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".{uuid.uuid4().hex}"
        # Otherwise, the thread could take it for a report of this node, and send it back.
        with self._lock:
            try:
                temporary.write_bytes(data)
                os.rename(temporary, self.root / file)
            finally:
                temporary.unlink(missing_ok=True)
            self._of_others[file] = _stamp((self.root / file).stat())

    def start(self, targets: Sequence[Address]) -> None:
        """Send reports to *targets* from now on."""
        self._targets = targets
        if not self._thread.is_alive():
            self._thread.start()

    def _run(self) -> None:
        while True:
            # It may be unable to read them now.
            with contextlib.suppress(OSError):
                self._begin_to_send()
            time.sleep(_POLL_SECONDS)

    def _begin_to_send(self) -> None:
        """Send what was not sent yet. A node that does not respond does not delay others. Raises OSError."""
        with self._lock:
            written = _without(self._stamps(), self._of_others)
        for target in self._targets:
            sending = self._sending.get(target)
            new = _without(written, self._sent.setdefault(target, {}))
            if new and (sending is None or sending.done()):
                self._sending[target] = self._pool.submit(self._send_all, target, new)

    def _send_all(self, target: Address, files: Stamps) -> None:
        """Send *files* to *target*. What fails is sent again."""
        with contextlib.suppress(NodeFailed):
            for file, stamp in files.items():
                with contextlib.suppress(OSError):
                    self._send(target, file, read_safely(self.root, file, limit=MAX_BYTES))
                self._sent[target][file] = stamp

    def _stamps(self) -> dict[str, Stamp]:
        found = {}
        for path in self.root.glob("step_*/*.txt"):
            file = f"{path.parent.name}/{path.name}"
            if is_report(file):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    found[file] = _stamp(path.lstat())
        return found


def _without(files: Stamps, known: Stamps) -> Stamps:
    """The *files* that are not among the *known* ones, or have changed since."""
    return {file: stamp for file, stamp in files.items() if known.get(file) != stamp}


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_mtime_ns
