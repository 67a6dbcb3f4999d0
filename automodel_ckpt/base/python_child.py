"""Start another process of this package (the only place that starts a Python interpreter), and protect forked ones.

``python -m`` and ``python -c`` search the current directory first: a ``json.py`` next to a recipe would be executed. A
process that is started here has the search path of this one, which contains what the user's PYTHONPATH, an editable
installation or a script added, and imports nothing before the path is set.

Objects in reference cycles wait for Python's garbage collector. A forked process inherits them, and must not destroy
them: destructors of process groups and stores wait for threads that only the parent has, tensors can use a GPU
that the child cannot, and some destructors abort the process. A collection can begin as soon as the child allocates
objects, which includes the hooks that libraries register with :func:`os.register_at_fork`.

The path of a Unix socket has 107 bytes at most. Data workers pass tensors through Python's multiprocessing, which
creates sockets in the temporary directory. Where their paths are too long, the receiver would wait forever.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from automodel_ckpt.errors import RecipeError

_START = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    "import importlib; sys.exit(importlib.import_module(sys.argv.pop(1)).main(sys.argv[1:]))"
)


def start_python(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that calls ``main(arguments)`` of a module and exits with the code that it returns.

    Args:
        module: The full name of the module.
        arguments: The list of strings that ``main`` gets.
        options: Options of :class:`subprocess.Popen`.

    Returns:
        The process.

    Raises:
        OSError: The process could not be started.
    """
    path = "\n".join(os.path.abspath(entry) for entry in sys.path)
    # -P also protects the helper processes of multiprocessing, which inherit the flags of the interpreter.
    command = [sys.executable, "-P", "-c", _START, path, module, *arguments]
    return subprocess.Popen(command, **options)


_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_NICENESS = 10
# Not SCHED_IDLE: on a busy machine, a save took twice as long.
_BEAT_SECONDS = 0.25
_POLL_SECONDS = 0.1
_END_SECONDS = 5.0


class CommandProcess:
    """A process that runs commands of this one, at a low priority, and ends when this one has ended.

    One thread at a time calls :meth:`do`. Signals to the process group do not end it before this process.
    """

    def __init__(self, module: str, *arguments: str, pass_fds: Sequence[int] = ()) -> None:
        """Start the process, which calls ``main`` of *module* with the two arguments of :func:`run_commands`, and then
        with *arguments*. Raises OSError."""
        from multiprocessing.connection import Pipe

        self._connection, there = Pipe()
        self.progress = 0
        """What the process has reported of the command in progress, or of the last one."""
        # The process inherits the mask.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            self._process = start_python(
                module,
                str(there.fileno()),
                str(os.getpid()),
                *arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(there.fileno(), *pass_fds),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
            # Each side notices the end of the other by a closed connection.
            there.close()

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def do(
        self,
        command: Any,
        *,
        check: Callable[[], None] | None = None,
        stalled_seconds: float = float("inf"),
    ) -> Any:
        """Run a command, and return its result.

        Args:
            command: What the function of :func:`run_commands` gets.
            check: Called repeatedly until the command ends. It may raise: then the process is killed.
            stalled_seconds: How long the process may report nothing.

        Raises:
            ChildProcessError: The process has ended; the message says how.
            TimeoutError: It reported nothing for so long, and was killed.
            Exception: What the command has raised.
        """
        self.progress = 0
        last_sign = time.monotonic()
        try:
            self._connection.send(command)
            while True:
                if check is not None:
                    check()
                    if not self._connection.poll(_POLL_SECONDS):
                        if time.monotonic() - last_sign > stalled_seconds:
                            text = f"process {self.pid}: nothing for {stalled_seconds:.0f} s"
                            raise TimeoutError(text)
                        continue
                    last_sign = time.monotonic()
                kind, value = self._connection.recv()
                if kind == "result":
                    return value
                if kind == "error":
                    break
                self.progress = value
        # It died, perhaps while it wrote an answer.
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise ChildProcessError(f"process {self.pid}: {self._end()}") from error
        except BaseException:
            # It must not answer the next command with the result of this one.
            self.kill()
            raise
        raise value

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        code = self._process.poll()
        if code is not None and code < 0:
            return f"signal {-code} ({signal.Signals(-code).name})"
        return f"code {code}"

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        # A process in a call to a disk that does not respond ends only when the call returns.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def end(self) -> None:
        """End the process after its current command."""
        # Closing is not enough: a data-loader worker may have a copy of the connection.
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        self._process.wait()


def run_commands(
    descriptor: str,
    parent: str,
    run: Callable[[Any], Any],
    progress: Callable[[], int] = lambda: 0,
) -> None:
    """Run the commands of a :class:`CommandProcess` with *run*, until it closes the connection *descriptor*.

    Ends immediately when the process *parent* has ended: nobody waits for the result. *progress* is reported repeatedly
    during a command, and at its end.
    """
    from multiprocessing.connection import Connection

    connection: Any = Connection(int(descriptor))
    lock = threading.Lock()
    is_busy = threading.Event()

    def beat() -> None:
        # The connection is no sign: a data-loader worker of the parent may keep its end open.
        while os.getppid() == int(parent):
            with lock, contextlib.suppress(OSError):
                if is_busy.is_set():
                    connection.send(("progress", progress()))
            time.sleep(_BEAT_SECONDS)
        # In a thread, sys.exit would end only the thread.
        os._exit(1)

    os.nice(_NICENESS)
    threading.Thread(target=beat, name="beat", daemon=True).start()
    # EOFError: the parent has closed the connection. A broken pipe: it has ended.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (command := connection.recv()) is not None:
            is_busy.set()
            answer = _answer(run, command)
            with lock:
                is_busy.clear()
                connection.send(("progress", progress()))
                connection.send(answer)


def _answer(run: Callable[[Any], Any], command: Any) -> tuple[str, Any]:
    from automodel_ckpt.errors import AutomodelError

    try:
        return "result", run(command)
    except OSError as error:
        return "error", OSError(error.errno, error.strerror, error.filename)
    except AutomodelError as error:
        return "error", error
    except Exception:
        return "error", RuntimeError(traceback.format_exc())


_is_registered = False
_before_fork = threading.local()


def freeze_in_forked_processes() -> None:
    """Let no process that is forked from now on collect what it inherits (:func:`gc.freeze`).

    It concerns all forks of this process and of its children, also forks by other libraries, for example the workers of
    a DataLoader. Processes that :mod:`subprocess` starts inherit no objects. Further calls do nothing.
    """
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    os.register_at_fork(
        before=_pause,
        after_in_parent=_resume,
        after_in_child=_freeze_and_resume,
    )


def _pause() -> None:
    """Disable the collector: hooks of other libraries may run in the child before the hook of this module."""
    _before_fork.was_enabled = gc.isenabled()
    gc.disable()


def _resume() -> None:
    if _before_fork.was_enabled:
        gc.enable()


def _freeze_and_resume() -> None:
    gc.freeze()
    _resume()


_MAX_BYTES = 70
"""The longest temporary directory: multiprocessing appends 32 bytes."""


def check_temporary_directory() -> None:
    """Raise :class:`RecipeError` if the path of the temporary directory is too long for the sockets of data workers."""
    import tempfile

    directory = tempfile.gettempdir()
    if len(os.fsencode(directory)) > _MAX_BYTES:
        raise RecipeError(
            f"the path of the temporary directory has over {_MAX_BYTES} bytes: too long for sockets of data workers",
            "TMPDIR",
            directory,
        )
