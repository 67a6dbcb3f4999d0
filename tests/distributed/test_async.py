"""Asynchronous saves over several ranks: exactness, what one rank's failure does to all, and how runs end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint import Manifest, commit, discover
from automodel_ckpt.checkpoint.verify import verify
from automodel_ckpt.data.loader import GlobalBatch
from automodel_ckpt.errors import SaveFailed
from automodel_ckpt.recipes.lifecycle import Control
from automodel_ckpt.training.step_scheduler import Due
from tests.support import ranks, tiny, training

ASYNC = ("--checkpoint.is_async", "true")


def run(recipe: Path, directory: Path, *overrides: str, recipe_class: Any = training.Recipe) -> dict[str, str]:
    return training.train(recipe, "--checkpoint.checkpoint_dir", str(directory), *overrides, recipe_class=recipe_class)


def test_asynchronous_saves_change_nothing_and_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    recipe = training.write_recipe(tmp_path)
    expected = ranks.run(run, 2, recipe, tmp_path / "sync", init=False)
    ended = ranks.outcomes(run_killed, 2, recipe, tmp_path / "async", init=False)
    assert [outcome.exitcode for outcome in ended] == [-signal.SIGKILL] * 2
    assert commit.pointed(tmp_path / "async", "LATEST") == "epoch_0_step_5"
    assert ranks.run(run, 2, recipe, tmp_path / "async", *ASYNC, init=False) == expected
    assert training.steps_of(tmp_path / "async") == training.steps_of(tmp_path / "sync")
    newest = tmp_path / "async/LATEST"
    assert verify(newest, Manifest.read(newest)) == [] and os.readlink(newest) == "epoch_1_step_12"
    assert saves(tmp_path / "async") == [5, 10, 12] and not list((tmp_path / "async").glob(".epoch*"))


def run_killed(recipe: Path, directory: Path) -> dict[str, str]:
    """Killed three steps after a save, a second after it was written."""

    class Killed(training.Recipe):
        def step(self, batch: GlobalBatch, control: Control) -> Due:
            if self.step_scheduler.step == 7:
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(batch, control)

    return run(recipe, directory, *ASYNC, recipe_class=Killed)


def saves(directory: Path) -> list[int]:
    records = [json.loads(line) for line in (directory / "training.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if record.get("event") == "save"]


class WriterKilled(training.Recipe):
    """Rank 1 loses its writer in the save of step 5, while it writes."""

    failed_at: int | None = None

    def save_now(self, checkpointer: Any, validation: Any, *, last: bool) -> Any:
        if self.layout.rank != 1 or self.step_scheduler.step != 5:
            return super().save_now(checkpointer, validation, last=last)
        writer = checkpointer._background.writer_pid
        os.kill(writer, signal.SIGSTOP)
        report = super().save_now(checkpointer, validation, last=last)
        os.kill(writer, signal.SIGKILL)
        return report

    def settle(self) -> None:
        before = self.save_failure
        try:
            super().settle()
        finally:
            if self.save_failure is not before or sys.exc_info()[0]:
                self.failed_at = self.step_scheduler.step


def writer_killed(recipe: Path, directory: Path, *overrides: str) -> tuple[str, int, int | None]:
    """(what ended the run, its exit code, the last step before it was reported)"""
    made = training.build(recipe, "--checkpoint.checkpoint_dir", str(directory), *ASYNC, *overrides,
                          recipe_class=WriterKilled)  # fmt: skip
    try:
        made.setup()
        made.run()
    except SaveFailed as failure:
        return str(failure), failure.exit_code, made.failed_at
    finally:
        made.close()
    return "", 0, made.failed_at


def test_a_writer_killed_on_one_rank_is_reported_by_the_next_steps_on_all(tmp_path: Path) -> None:
    recipe = training.write_recipe(tmp_path)
    for message, code, step in ranks.run(writer_killed, 2, recipe, tmp_path / "run", init=False):
        assert "rank 1" in message and "signal 9" in message and "epoch_0_step_5" in message and code == 4
        assert step in (5, 6, 7)
    assert sorted(p.name for p in (tmp_path / "run").glob("*epoch*")) == [] and saves(tmp_path / "run") == []
    keys = ("--checkpoint.on_save_failure", "continue")
    assert [code for _, code, _ in ranks.run(writer_killed, 2, recipe, tmp_path / "on", *keys, init=False)] == [0, 0]
    assert saves(tmp_path / "on") == [10, 12] and commit.pointed(tmp_path / "on", "LATEST") == "epoch_1_step_12"


def changed_on_one_rank(directory: Path) -> list[tuple[bool, list[str]]]:
    """After each save: whether its plan was kept, and what the checkpoint lacks."""
    made = tiny.recipe(1)
    tiny.train(made, 1)
    saver = tiny.checkpointer(directory, is_async=True)
    found = []
    for step in (1, 2, 3):
        if step == 3 and saver.is_leader:
            made.optimizer.param_groups[0]["note"] = "long" * 100
        kept = saver._kept
        saver.save(discover(made), step=step, epoch=0, config_yaml="", losses={}, progress={})
        saver.settle()
        newest = directory / "LATEST"
        found.append((saver._kept is kept, [str(p) for p in verify(newest, Manifest.read(newest))]))
    saver.close()
    return found


def test_a_plan_that_one_rank_cannot_keep_is_made_anew_on_all(tmp_path: Path) -> None:
    expected = [(False, []), (True, []), (False, [])]
    assert ranks.run(changed_on_one_rank, 2, tmp_path / "run") == [expected, expected]


RECIPE = Path(__file__).parents[2] / "examples/llm_finetune/tiny_llama_python_docs.yaml"


class Command:
    """``ckpt-train`` on two ranks, in a session of its own; every save stays under way, since its writers are held."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        command = [
            sys.executable, "-m", "automodel_ckpt.cli.train", str(RECIPE), "--nproc-per-node", "2", *ASYNC,
            "--checkpoint.checkpoint_dir", str(directory / "run"), "--step_scheduler.max_steps", "5000",
            "--step_scheduler.ckpt_every_steps", "2", "--validation_dataset", "null", "--step_scheduler.num_epochs",
            "null",
        ]  # fmt: skip
        environment = {**os.environ, "NO_COLOR": "1"}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True, env=environment
            )
        self.wait_for(lambda: len(self.writers()) == 2)

    def wait_for(self, holds: Any, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def members(self) -> dict[int, bytes]:
        """The processes of the session that run, with their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and os.getsid(int(entry.name)) == self.process.pid:
                    line = (entry / "cmdline").read_bytes()
                    if line:  # a process that has ended has none
                        found[int(entry.name)] = line
            except (OSError, ProcessLookupError):
                continue
        return found

    def writers(self) -> list[int]:
        return [pid for pid, line in self.members().items() if b"checkpoint.writer" in line]

    def signal(self, pids: list[int], number: int) -> None:
        for pid in pids:
            os.kill(pid, number)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path)
    yield made
    for pid in made.members():
        os.kill(pid, signal.SIGKILL)
    made.process.wait()


def test_a_second_signal_does_not_wait_and_a_killed_launcher_leaves_no_process(
    command: Command, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command.wait_for(lambda: commit.pointed(run, "LATEST") is not None)
    command.signal(command.writers(), signal.SIGSTOP)
    newest = commit.pointed(run, "LATEST")
    command.wait_for(lambda: list(run.glob(".epoch*staging*")))
    command.process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert command.process.poll() is None
    writers = command.writers()
    command.process.send_signal(signal.SIGTERM)
    command.signal(writers, signal.SIGCONT)
    command.process.wait(20)
    command.wait_for(lambda: not command.members(), 20)
    assert command.process.returncode not in (0, 75)
    assert (run / str(newest) / "MANIFEST.json").is_file()


def test_a_launcher_that_is_killed_leaves_no_writer_behind(command: Command) -> None:
    command.wait_for(lambda: b"Saving checkpoint" in command.log.read_bytes())
    command.process.kill()
    command.wait_for(lambda: not command.members(), 20)
