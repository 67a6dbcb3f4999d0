"""Commands that start at once: one process imports torch and transformers, and forks for each ``ckpt-train``.

    with CommandServer(directory) as commands: ...    # commands.bin holds `ckpt-train` and `python` for a PATH

Tests that run many short trainings as a user would type them spare the imports of each. A command has its own
process, environment, directory and standard streams; only the modules are shared with the server, as the launcher
shares its with the ranks. `python` takes a script file; with other arguments it is the real one.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

SHIM = """#!{python} -IS
import json, os, socket, sys
if {name!r} == "python" and not sys.argv[1:2][0].endswith(".py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({place!r})
    request = {{"name": {name!r}, "words": sys.argv[1:], "cwd": os.getcwd(), "environment": dict(os.environ)}}
    socket.send_fds(server, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
    sys.exit(int(server.recv(8)))
"""


class CommandServer:
    """The server's process, from the tests' side."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()
        self._place = directory / "socket"
        for name in ("ckpt-train", "python"):
            shim = self.bin / name
            shim.write_text(SHIM.format(python=sys.executable, name=name, place=str(self._place)))
            shim.chmod(0o755)

    def __enter__(self) -> CommandServer:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen([sys.executable, __file__, str(self._place)], env=environment)
        end = time.monotonic() + 120
        while not self._place.exists():
            assert self._process.poll() is None
            assert time.monotonic() < end, "the imports took too long"
            time.sleep(0.05)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()


def serve(place: str) -> None:
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

    import automodel_ckpt.cli.train
    import automodel_ckpt.recipes.llm_finetune  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place + ".new")
        listener.listen()
        os.rename(place + ".new", place)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                answer(connection)
            connection.close()


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
    _, status = os.waitpid(child, 0)
    connection.sendall(str(os.waitstatus_to_exitcode(status) & 255).encode())
    os._exit(0)


def run(request: dict[str, object], descriptors: list[int]) -> int:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 64)
    os.chdir(str(request["cwd"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    words = list(request["words"])  # type: ignore[call-overload]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    code = 0
    try:
        if request["name"] == "python":
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        else:
            code = sys.modules["automodel_ckpt.cli.train"].main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve(sys.argv[1])
