from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.command_server import CommandServer


def start(
    code: str, cache: Path, commands: CommandServer | None = None, **variables: str
) -> subprocess.Popen[str]:
    """A process that runs *code*: of the server, or with a new interpreter."""
    script = cache.with_suffix(".py")
    script.write_text(code)
    env = {**os.environ, "AUTOMODEL_CKPT_CACHE": str(cache), **variables}
    if commands is not None:
        return commands.popen("python", str(script), env=env, stderr=subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, str(script)], env=env, stderr=subprocess.PIPE, text=True
    )


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    """What each wrote to stderr, once all have ended well."""
    logs = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), logs
    return logs


def digests(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.mark.further
def test_tokenizer_and_samples_are_the_same_bytes_in_every_process(
    tmp_path: Path, commands: CommandServer
) -> None:
    code = "from automodel_ckpt.examples.data.python_docs import *; language_modeling(train_tokenizer(500), 64)"
    # The server's hashes have a different seed.
    finish(start(code, tmp_path / "1", PYTHONHASHSEED="1"), start(code, tmp_path / "2", commands))
    first, second = digests(tmp_path / "1"), digests(tmp_path / "2")
    assert first == second
    assert any(name.endswith("tokenizer.json") for name in first)
    assert any(name.endswith("tokens.npy") for name in first)
