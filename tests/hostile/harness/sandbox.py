"""Runs a reader in a forked child under watch: what it opens, starts and takes shows in its :class:`Outcome`."""

import importlib
import json
import os
import resource
import select
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from automodel_ckpt.checkpoint.parts.manifest import environment
from automodel_ckpt.convert.formats.registry import FORMATS
from tests.support.anonymous_memory import give_back_free_memory

# Of processor time: how long a case takes by the clock is up to what else the machine does.
SECONDS = 10.0
HANGS_AFTER_SECONDS = 60.0
EXTRA_BYTES = 500 << 20
# What is beyond this would hurt the machine; what is beyond EXTRA_BYTES fails the test.
_CEILING_BYTES = 3 << 30
_OWN = Path(__file__).resolve().parents[3]
_PYTHON = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
_READABLE = (
    *map(os.path.realpath, _PYTHON),
    *(str(_OWN / name) for name in ("automodel_ckpt", "recipes", "tests", "tools")),
    *("/proc", "/sys", "/usr/lib", "/lib", "/lib64", "/dev/null", "/dev/urandom"),
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGING = ("mkdir", "remove", "rmdir", "truncate", "chmod", "chown", "utime", "setxattr")
_PATH_EVENTS = {
    **{f"os.{name}": (0,) for name in _CHANGING},
    "os.rename": (0, 1),
    "os.link": (0, 1),
    "os.symlink": (1,),
    "shutil.rmtree": (0,),
    "shutil.move": (0, 1),
    "shutil.copyfile": (1,),
}
"""Events, and which of their arguments are paths that they change."""
_FORBIDDEN = (
    *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile"),
    *("os.system", "os.putenv", "subprocess.", "pty.", "socket.", "pickle.find_class", "marshal."),
    *("code.__new__", "ctypes.cdata", "webbrowser.", "urllib.", "ftplib.", "http.", "smtplib."),
    *("sqlite3.", "shelve."),
)
_HARMLESS = frozenset({"socket.gethostname", "marshal.loads", "code.__new__"})


@dataclass(frozen=True)
class Outcome:
    """How a reader ended: its exit code (None: killed, or a signal), all that it printed, what it did that it must not
    do, seconds of processor time, and the bytes that its memory grew by at most."""

    code: int | None
    text: str
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    extra_bytes: int = 0


class _Watch:
    """An audit hook that notes what a reader of *root* must not do."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.violations: list[str] = []
        self.opened: list[str] = []
        self.active = False
        self.opening = threading.local()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        self.active = False
        try:
            self._look(event, arguments)
        finally:
            self.active = True

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            self._open(*arguments)
        elif event in ("os.listdir", "os.scandir"):
            self._reads(event, arguments[0])
        elif event in _PATH_EVENTS:
            directory = next((a for a in arguments[::-1] if isinstance(a, int) and a >= 0), None)
            for index in _PATH_EVENTS[event]:
                self._writes(
                    event,
                    arguments[index],
                    directory if event in ("os.remove", "os.rmdir") else None,
                )
        elif event == "exec":
            self._exec(arguments[0])
        elif event == "import":
            if "hostile" in str(arguments[0]):
                self.violations.append(f"import {arguments[0]}")
        elif event in ("os.putenv", "os.unsetenv") and arguments[0] == b"AUTOMODEL_CKPT_CACHE":
            return  # a reader's own place for what it keeps
        elif event == "ctypes.dlopen":
            if arguments[0] is not None:
                self.violations.append(f"dlopen {arguments[0]}")
        elif event.startswith(_FORBIDDEN) and event not in _HARMLESS:
            self.violations.append(f"{event} {arguments!r}"[:300])

    def _open(self, path: Any, mode: str | None, flags: int) -> None:
        if isinstance(path, int):
            return
        path = self._absolute(os.fsdecode(path))
        writes = flags & _WRITES or (mode is not None and set(mode) & set("wax+"))
        self.opened.append(path)
        # With the flag, the system rejects a link as the last part of a path.
        follow = not flags & os.O_NOFOLLOW
        if writes:
            self._writes("open for writing", path, follow=follow)
        else:
            self._reads("open", path, follow=follow)

    def _absolute(self, path: str) -> str:
        """The path of an open() below a directory's descriptor, which the event does not tell."""
        directory = getattr(self.opening, "directory", None)
        return (
            path
            if directory is None
            else os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)
        )

    def _exec(self, code: Any) -> None:
        name = getattr(code, "co_filename", "")
        if not name.startswith("<"):
            # The environment may be a link, as in a work tree that shares one.
            name = os.path.realpath(name)
        if not (
            name.startswith((*_READABLE, "<frozen", "<string>", "<attrs"))
            and not name.startswith(self.root)
        ):
            self.violations.append(f"exec of {name}")

    def _real(self, path: Any, directory: int | None = None, *, follow: bool = True) -> str:
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{path}")
        text = os.fsdecode(path) if path is not None else "."
        if directory is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), text)
        if follow:
            return os.path.realpath(text)
        return os.path.join(
            os.path.realpath(os.path.dirname(os.path.abspath(text))), os.path.basename(text)
        )

    def _inside(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + os.sep)

    def _reads(self, event: str, path: Any, *, follow: bool = True) -> None:
        real = self._real(path, follow=follow)
        if not self._inside(real) and not real.startswith(_READABLE):
            self.violations.append(f"{event} of {real}")

    def _writes(
        self, event: str, path: Any, directory: int | None = None, *, follow: bool = False
    ) -> None:
        real = self._real(path, directory, follow=follow)
        if not self._inside(real) and real != "/dev/null":
            self.violations.append(f"{event} of {real}")


def run(reader: Callable[[], int], root: Path, *, forbidden: Sequence[str] = ()) -> Outcome:
    """Call *reader* in a child; it may read and write below *root* only, and open no path that ends in *forbidden*."""
    # An import records the environment, for which git is started once per process. In the child, no program may be
    # started.
    environment()
    # Nor may it read files of the package's libraries, which the readers of formats import when they are asked.
    readers = {f"formats.{row.place.partition(':')[0]}" for row in FORMATS}
    for name in (*sorted(readers), "imports.import_checkpoint", "targets.flow"):
        importlib.import_module(f"automodel_ckpt.convert.{name}")
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as output:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of threads of this process: the child takes none of their locks
            child = os.fork()
        if child == 0:
            os.close(read_end)
            _child(reader, root, forbidden, write_end, output.fileno())
        os.close(write_end)
        report = _wait(read_end)
        if report is None:
            os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        output.seek(0)
        text = output.read(1 << 20).decode(errors="replace")
    seconds = used.ru_utime + used.ru_stime
    if report is None or not report:
        how = "hung" if report is None else f"died with status {status}"
        return Outcome(None, text, [how], seconds)
    return Outcome(seconds=seconds, text=text, **json.loads(report))


def _wait(descriptor: int) -> bytes | None:
    """All that the child reports; None where it took too long."""
    data, end = b"", time.monotonic() + HANGS_AFTER_SECONDS
    try:
        while select.select([descriptor], [], [], max(end - time.monotonic(), 0))[0]:
            block = os.read(descriptor, 1 << 16)
            if not block:
                return data
            data += block
        return None
    finally:
        os.close(descriptor)


def _child(
    reader: Callable[[], int], root: Path, forbidden: Sequence[str], report: int, output: int
) -> NoReturn:
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        # In a new checkout, the first import of a module would write its bytecode, outside of *root*.
        sys.dont_write_bytecode = True
        before = _start_counting()
        watch = _Watch(root)
        _tell_directories(watch)
        sys.addaudithook(watch)
        watch.active = True
        try:
            code: int | None = reader()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = None
        watch.active = False
        seen = (
            [path for path in watch.opened if path.endswith(tuple(forbidden))] if forbidden else []
        )
        violations = [*watch.violations, *(f"open of {path}" for path in seen)]
        sys.stdout.flush()
        sys.stderr.flush()
        extra = max(0, _memory("VmHWM") - before)
        os.write(
            report,
            json.dumps({"code": code, "violations": violations, "extra_bytes": extra}).encode(),
        )
        status = 0
    finally:
        os._exit(status)


def _tell_directories(watch: _Watch) -> None:
    """Let the hook know below which directory os.open() opens."""
    plain = os.open

    def telling(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        watch.opening.directory = dir_fd
        try:
            return plain(path, flags, mode, dir_fd=dir_fd)
        finally:
            watch.opening.directory = None

    os.open = telling


def _start_counting() -> int:
    """Bytes of memory now; the peak counts from here."""
    give_back_free_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ceiling = _memory("VmData") + _CEILING_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))
