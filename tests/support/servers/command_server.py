"""Commands that start immediately: one process imports torch and transformers, and forks for each of them.

Tests that run many short trainings as a user would spare the imports of each. A command has its own process,
environment, directory and standard streams; only the modules are shared with the server, as the launcher shares its
with the ranks. There are two ways to start one:

    commands.run("ckpt-train", "recipe.yaml", cwd=directory)    # or ckpt, python; like subprocess.run, popen like Popen
    environment = {**os.environ, **commands.on_path()}          # for shell scripts: all of these commands

``python`` is for a script or ``-m module``; on the PATH it takes scripts and ``-m pytest`` only, else it is the real
one. ``plain`` runs a script where torch and transformers have been imported and nothing of this package. What torchrun
starts are modules of the server too. pytest-xdist's workers come from it as well (``worker``, tests/conftest.py).
"""

import contextlib
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

NUMBER_BYTES = 16
PLAIN = ".plain"
SHIM = """#!{python} -IS
import json, os, signal, socket, sys
if {name!r} == "python" and sys.argv[1:3] != ["-m", "pytest"] and not sys.argv[1].endswith(".py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({place!r})
    request = {{"words": [{name!r}, *sys.argv[1:]], "cwd": os.getcwd(), "environment": dict(os.environ)}}
    socket.send_fds(server, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
    # Passed on; this process ends with the command, not before it.
    signal.signal(signal.SIGTERM, lambda *_: server.shutdown(socket.SHUT_WR))
    sys.exit(int(server.recv(16) or 1) & 255)
"""


class CommandServer:
    """The server's process, from the tests' side: one for all that name the same *directory*, until its end()."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self._place = directory / "server.socket"
        self._process_id = directory / "pid"
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, meanwhile: Callable[[], None] = lambda: None) -> Self:
        """Start it, unless another process of this test session has; call *meanwhile* during its imports."""
        self.bin.mkdir(parents=True, exist_ok=True)
        with open(self.bin.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._place.exists():
                self._write_shims()
                self._start(meanwhile)
        return self

    def _write_shims(self) -> None:
        for name in ("ckpt", "ckpt-train", "python", "torchrun", "rank", "worker"):
            shim = self.bin / name
            shim.write_text(SHIM.format(python=sys.executable, name=name, place=str(self._place)))
            shim.chmod(0o755)

    def _start(self, meanwhile: Callable[[], None]) -> None:
        # torch reads the last when it is imported, and a launcher sets it before that.
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            # A process that has counted GPUs by CUDA itself cannot fork commands that use one.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._place)], env=environment
        )
        self._process_id.write_text(str(self._process.pid))
        meanwhile()
        end = time.monotonic() + 300
        while not self._place.exists():
            assert self._process.poll() is None
            assert time.monotonic() < end, "the imports took too long"
            time.sleep(0.05)

    def end(self) -> None:
        if self._process_id.exists():
            # It has ended where its imports failed.
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self._process_id.read_text()), signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def on_path(self, *others: Path) -> dict[str, str]:
        """Variables for a shell, or for torchrun, that is to start commands of this server, then those in *others*."""
        path = ":".join([str(self.bin), *map(str, others), os.environ["PATH"]])
        return {"PATH": path, "PYTHON_EXEC": str(self.bin / "rank")}

    def popen(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """``subprocess.Popen``, forked by the server, which tells how it ended; text streams."""
        place = self._place.with_suffix(PLAIN) if words[0] == "plain" else self._place
        return _Forked(place, list(words), text=True, **options)

    def run(
        self, *words: str, timeout: float = 120, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """``subprocess.run`` with its output captured."""
        process = self.popen(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(words, process.returncode, out, err)


class Starting:
    """In a tool's module in the place of ``subprocess``: the tool's ``ckpt-train`` and ``ckpt`` come from the server,
    and so does the isolated Python that shows an export to transformers alone."""

    TimeoutExpired = subprocess.TimeoutExpired
    DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT

    def __init__(self, commands: CommandServer) -> None:
        self._commands = commands

    def Popen(  # noqa: N802
        self, words: Sequence[str | Path], *, text: bool = True, **options: Any
    ) -> subprocess.Popen[str]:
        assert text
        program, *rest = [str(word) for word in words]
        if Path(program).name in OUR_COMMANDS:
            return self._commands.popen(Path(program).name, *rest, **options)
        if program == sys.executable and rest[:2] == ["-m", "automodel_ckpt.cli.train"]:
            return self._commands.popen("ckpt-train", *rest[2:], **options)
        if program == sys.executable and rest[0] == "-I":
            return self._commands.popen("plain", *rest[1:], **options)
        return subprocess.Popen([program, *rest], text=True, **options)

    def run(
        self,
        words: Sequence[str | Path],
        *,
        check: bool,
        capture_output: bool = False,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        if capture_output:
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.Popen(words, **options) as process:
            out, err = process.communicate()
        done = subprocess.CompletedProcess(words, process.returncode, out, err)
        if check:
            done.check_returncode()
        return done


class _Forked(subprocess.Popen[str]):
    def __init__(self, place: Path, words: list[str], **options: Any) -> None:
        self._place = place
        super().__init__(words, **options)

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "words": given["args"],
            "cwd": str(given["cwd"] or os.getcwd()),
            "waits": True,
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "new_session": given["start_new_session"],
        }
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(self._place))
        descriptors = [own if stream == -1 else stream for own, stream in enumerate(streams)]
        socket.send_fds(self._server, [json.dumps(request).encode() + b"\n"], descriptors)
        self.pid = int(self._server.recv(NUMBER_BYTES, socket.MSG_WAITALL))
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self.returncode if self._has_ended(0) else None

    def _wait(self, timeout: float | None) -> int:
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _has_ended(self, seconds: float | None) -> bool:
        """Whether the server has reported how it ended, or does within so many *seconds*."""
        if self.returncode is None and select.select([self._server], [], [], seconds)[0]:
            self.returncode = int(self._server.recv(NUMBER_BYTES, socket.MSG_WAITALL))
            self._server.close()
        return self.returncode is not None


OUR_COMMANDS = {"ckpt": "automodel_ckpt.cli.ckpt", "ckpt-train": "automodel_ckpt.cli.train"}
NEEDED = (
    *OUR_COMMANDS.values(),
    "automodel_ckpt.convert.merging.merge",
    "automodel_ckpt.cli.launch.launcher",
    "automodel_ckpt.examples.data.python_docs",
    "automodel_ckpt.data.text",
    "automodel_ckpt.recipes.llm_finetune",
    "automodel_ckpt.recipes.vlm_finetune",
    "datasets",
    "peft",
    "torch.distributed.launcher.api",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",
)


def serve(place: str) -> None:
    # Tests that run under nohup inherit that it is ignored, which commands would take for the user's wish.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Modules are no garbage.
    gc.disable()
    without_initializing_cuda = _launchers_context()
    with without_initializing_cuda():
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    parent = os.getpid()
    if os.fork() == 0:
        assert "automodel_ckpt" not in sys.modules
        listen(str(Path(place).with_suffix(PLAIN)), parent)
    with without_initializing_cuda():
        for name in NEEDED:
            importlib.import_module(name)
    from automodel_ckpt.config.schema import RecipeConfig
    from automodel_ckpt.config.schema_keys import keys_of

    get_checkpoint_conversion_mapping("llama")  # type: ignore[no-untyped-call]
    list(keys_of(RecipeConfig))
    listen(place, os.getppid())


def _launchers_context() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What the launcher uses, from its file: the plain process must not have imported a module of the package."""
    path = Path(__file__).parents[3] / "automodel_ckpt/cli/launch/gpu_properties.py"
    found: Callable[[], contextlib.AbstractContextManager[None]]
    found = runpy.run_path(str(path))["without_initializing_cuda"]
    return found


def listen(place: str, parent: int) -> None:
    """Fork for each request, until *parent* is no more."""
    gc.freeze()
    gc.enable()
    importlib.import_module("huge_pages").collapse()  # beside this file, which runs as a script
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place + ".new")
        listener.listen()
        os.rename(place + ".new", place)
        listener.settimeout(5)
        while os.getppid() == parent:  # of tests that were killed nothing stays
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                listener.close()
                answer(connection)
            connection.close()
    os._exit(0)


def answer(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    request = json.loads(text)
    child = os.fork()
    if child == 0:
        connection.close()
        os._exit(run(request, descriptors))
    for descriptor in descriptors:
        os.close(descriptor)  # whoever reads the command's output waits until no process can write
    if request.get("waits"):
        tell(connection, child)
    else:
        threading.Thread(target=end_with, args=(connection, child), daemon=True).start()
    _, status = os.waitpid(child, 0)
    tell(connection, os.waitstatus_to_exitcode(status))
    os._exit(0)


def tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # no client waits any more
        connection.sendall(str(number).rjust(NUMBER_BYTES).encode())


def end_with(connection: socket.socket, child: int) -> None:
    """Ask a command to end when the one that stands for it on the PATH is asked or has ended, and kill it with that."""
    if connection.recv(1) == b"":
        end = select.poll()
        end.register(connection, 0)
        was_asked = not end.poll(0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
            if was_asked:
                end.poll()
                os.kill(child, signal.SIGKILL)


def run(request: dict[str, Any], descriptors: list[int]) -> int:
    if request.get("new_session"):
        os.setsid()
    # A shell that starts tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 64)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    try:
        code = main(request["words"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main(words: list[str]) -> int:
    if words[0] == "torchrun":
        words = ["python", "-m", "torch.distributed.run", *words[1:]]
    if words[1] == "-u":
        words = [words[0], *words[2:]]
    if words[0] == "plain":
        sys.argv, sys.path[:] = words[1:], sys.path[1:]
        runpy.run_path(words[1], run_name="__main__")
        return 0
    is_module, is_text = words[1] == "-m", words[1] == "-c"
    by_path = os.path.dirname(words[1] if words[0] == "python" else sys.executable)
    first = os.getcwd() if is_module or is_text else by_path
    sys.path[0] = os.path.abspath(first)
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    if words[0] in OUR_COMMANDS:
        return int(sys.modules[OUR_COMMANDS[words[0]]].main(words[1:]))
    sys.argv = words[2:] if is_module else words[1:]
    if is_text:
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(words[2], vars(sys.modules["__main__"]))
    elif is_module:
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[1], run_name="__main__")
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
