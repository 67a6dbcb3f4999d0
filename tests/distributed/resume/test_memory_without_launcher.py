"""Checkpoints in memory after a failure of a run that this package's launcher did not start: torchrun, the library."""

import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt import api
from tests.support.runs.training import RECIPE
from tests.support.servers.command_server import CommandServer
from tools.support import ROOT, environment

CODE = """
import os, signal
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.loop import TrainingLoop

class Loop(TrainingLoop):
    def train_step(self, batch, control):
        how, _, number = os.environ["FAILURE"].partition(" ")
        if self.step_scheduler.step == 4 and self.layout.rank == int(number):
            self.saves.memory.wait()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("boom")
        return super().train_step(batch, control)

class Failing(LLMFinetune):
    loop_class = Loop
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "failing.py").write_text(CODE)
    (tmp_path / "recipe.yaml").write_text(f"recipe: failing.py:Failing\n{RECIPE}")
    (tmp_path / "memory").mkdir()
    return tmp_path


def overrides(directory: Path) -> dict[str, Any]:
    return {
        "checkpoint.checkpoint_dir": str(directory / "run"),
        "checkpoint.memory.every_steps": 1,
        "checkpoint.memory.directory": str(directory / "memory"),
        "step_scheduler.ckpt_every_steps": 100,
    }


def kept_steps(directory: Path) -> tuple[list[int], int]:
    """The steps of the checkpoints on disk, and the number of directories in memory."""
    names = (directory / "run").glob("epoch_*_step_*")
    steps = sorted(int(name.name.rpartition("_")[2]) for name in names)
    return steps, len(list((directory / "memory").iterdir()))


def test_torchrun_without_a_restart_leaves_the_newest_step_on_disk_and_no_memory(
    directory: Path, commands: CommandServer
) -> None:
    done = torchrun(directory, commands, "kill 0", max_restarts=0)
    assert done.count("the newest checkpoint in memory was copied to") == 1, done
    assert kept_steps(directory) == ([4], 0)


def test_a_restart_of_torchrun_uses_the_memory(directory: Path, commands: CommandServer) -> None:
    """It fails again in the same step. The second failure is the last one."""
    done = torchrun(directory, commands, "raise 1", max_restarts=1)
    assert "step 4 was loaded from memory" in done
    assert done.count("the newest checkpoint in memory was copied to") == 1, done
    assert kept_steps(directory) == ([4], 0)


def torchrun(directory: Path, commands: CommandServer, failure: str, *, max_restarts: int) -> str:
    """Train two ranks with torchrun until they fail; what they print."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = ["--nproc-per-node=2", f"--max-restarts={max_restarts}", f"--master-port={port}"]
    words = ["-m", "automodel_ckpt.cli.train", "recipe.yaml", "--trust=failing.py"]
    words += [f"--{key}={value}" for key, value in overrides(directory).items()]
    variables = environment(PYTHONPATH=str(ROOT), FAILURE=failure, **commands.on_path())
    done = commands.run("torchrun", *flags, *words, cwd=directory, env=variables)
    assert done.returncode == 1, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


def test_a_failure_of_the_library_function_leaves_the_newest_step_on_disk(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("FAILURE", "raise 0")
    with (
        caplog.at_level(logging.WARNING, "automodel_ckpt"),
        pytest.raises(ValueError, match="boom"),
    ):
        api.train(directory / "recipe.yaml", overrides(directory), trust=["failing.py"])
    assert kept_steps(directory) == ([4], 0)
    assert "the newest checkpoint in memory was copied to" in caplog.text
