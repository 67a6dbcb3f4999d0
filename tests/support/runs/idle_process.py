"""An uploading process that uploads nothing, and ends at once or never."""

import io
import json
from typing import Any

import pytest

from automodel_ckpt.checkpoint.remote import child_process


class Pipe(io.BytesIO):
    def close(self) -> None:
        pass


class IdleProcess:
    """Stands for the ``Popen`` of a process with the exit *code*; None: it does not end."""

    def __init__(self, code: int | None) -> None:
        self.code, self.stdin = code, Pipe()

    @property
    def job(self) -> dict[str, Any]:
        job: dict[str, Any] = json.loads(self.stdin.getvalue().splitlines()[0])["job"]
        return job

    def poll(self) -> int | None:
        return self.code

    def wait(self) -> int:
        return 0


def use_idle_processes(
    monkeypatch: pytest.MonkeyPatch, code: int | None = None
) -> list[IdleProcess]:
    """Start no other process; returns the list of those that the trainer then starts."""
    started: list[IdleProcess] = []

    def start(*_: object, **__: object) -> IdleProcess:
        started.append(IdleProcess(code))
        return started[-1]

    monkeypatch.setattr(child_process, "start_python", start)
    return started
