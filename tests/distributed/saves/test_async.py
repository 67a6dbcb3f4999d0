"""Asynchronous saves over several ranks: exactness, what one rank's failure does to all, and how runs end."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.distributed.faults.test_signals import wait_for
from tests.support import ranks
from tests.support.checkpoints import is_intact
from tests.support.runs import training
from tests.support.runs.marked_trainer import Trainer, members
from tests.support.servers.command_server import CommandServer
from tools.crash import signals
from tools.support import log_lines

ASYNC = ("--checkpoint.is_async", "true")


def run(
    recipe: Path, directory: Path, *overrides: str, recipe_class: Any = training.Recipe
) -> dict[str, str]:
    return training.train(
        recipe, "--checkpoint.checkpoint_dir", str(directory), *overrides, recipe_class=recipe_class
    )


def test_asynchronous_saves_change_nothing_and_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    recipe = training.write_recipe(tmp_path)
    expected = ranks.run(run, 2, recipe, tmp_path / "sync", init=False)
    ended = ranks.outcomes(run_killed, 2, recipe, tmp_path / "async", init=False)
    assert [outcome.exitcode for outcome in ended] == [-signal.SIGKILL] * 2
    assert os.readlink(tmp_path / "async/LATEST") == "epoch_0_step_5"
    assert ranks.run(run, 2, recipe, tmp_path / "async", *ASYNC, init=False) == expected
    assert training.steps_of(tmp_path / "async") == training.steps_of(tmp_path / "sync")
    newest = tmp_path / "async/LATEST"
    assert is_intact(newest) and os.readlink(newest) == "epoch_1_step_12"
    assert saves(tmp_path / "async") == [5, 10, 12] and not list(
        (tmp_path / "async").glob(".epoch*")
    )


def run_killed(recipe: Path, directory: Path) -> dict[str, str]:
    """Killed three steps after a save, a second after it was written."""

    class Killed(LLMFinetune.loop_class):
        def step(self, batch: Any, control: Any) -> Any:
            if self.step_scheduler.step == 7:
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(batch, control)

    return run(recipe, directory, *ASYNC, recipe_class=training.with_loop(training.Recipe, Killed))


def saves(directory: Path) -> list[int]:
    records = log_lines(directory / "training.jsonl")
    return [record["step"] for record in records if record.get("event") == "save"]


@pytest.fixture
def chain(tmp_path: Path, commands: CommandServer) -> signals.Chain:
    return signals.Chain(tmp_path, "run", commands)


def writers(trainer: Trainer) -> list[int]:
    return [
        pid
        for pid in members(trainer.pid)
        if b"jobs.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def held_in_a_save(trainer: Trainer, root: Path) -> list[int]:
    """The writers, held in a save behind one that is published."""
    wait_for(trainer, 0, "published")
    held = writers(trainer)
    signal_all(held, signal.SIGSTOP)
    since = time.monotonic()
    while (
        time.monotonic() < since + 0.5
    ):  # what was written before they were held may still be published
        assert not trainer.wait(0.05), trainer.log
        begun, done = (
            sum(mark.name == name for mark in trainer.marks(0)) for name in ("upload", "published")
        )
        since = since if begun > done else time.monotonic()
    assert list(root.glob(".epoch*staging*"))
    return held


def test_a_second_signal_does_not_wait_and_leaves_the_checkpoint_before(
    chain: signals.Chain,
) -> None:
    with chain.start(is_async="true", steps=5000) as trainer:
        held, newest = held_in_a_save(trainer, chain.root), os.readlink(chain.root / "LATEST")
        trainer.send("launcher", signal.SIGTERM)
        assert not trainer.wait(1.5)
        end = time.monotonic() + 120
        # Two signals that a busy machine delivers within a second count as one.
        while not trainer.wait(1.5):
            assert time.monotonic() < end, trainer.log
            with contextlib.suppress(ProcessLookupError):
                trainer.send("launcher", signal.SIGTERM)
        # The writers continue only now: rank 0 could publish the save before the launcher ends it.
        assert trainer.code == 128 + signal.SIGTERM, trainer.log
        signal_all(held, signal.SIGCONT)
        assert trainer.orphans(120) == []
    assert (chain.root / "LATEST/MANIFEST.json").is_file() and os.readlink(
        chain.root / "LATEST"
    ) == newest


@pytest.mark.further
def test_a_launcher_that_is_killed_leaves_no_writer_behind(chain: signals.Chain) -> None:
    with chain.start(is_async="true", steps=5000) as trainer:
        wait_for(trainer, 0, "upload")
        os.kill(trainer.pid, signal.SIGKILL)
        assert trainer.wait(120) and trainer.orphans(120) == []


@pytest.mark.further
def test_a_disk_that_fills_up_while_training_goes_on_ends_it_with_4(chain: signals.Chain) -> None:
    chain.root.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", chain.root], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    try:
        with chain.start(is_async="true") as trainer:
            held, newest = held_in_a_save(trainer, chain.root), os.readlink(chain.root / "LATEST")
            (held_save,) = chain.root.glob(".epoch*staging*")
            failed = held_save.name.removeprefix(".").partition(".")[0]
            (chain.root / "filler").write_bytes(bytes(os.statvfs(chain.root).f_bavail * 4096))
            signal_all(held, signal.SIGCONT)
            assert trainer.wait(120) and trainer.code == 4 and trainer.orphans(120) == [], (
                trainer.log
            )
        _, found, error = trainer.log.partition("error: rank ")
        assert found and f"saving {failed} failed" in error and "ENOSPC" in error, trainer.log
        assert f"where:  {held_save}" in error and "free disk space" in error, trainer.log
        assert os.readlink(chain.root / "LATEST") == newest and not list(
            chain.root.glob(f"*{failed}*")
        )
    finally:
        subprocess.run(["umount", "-l", chain.root], check=True)


@pytest.mark.further
def test_told_to_go_on_a_run_ends_with_4_when_its_last_save_failed_and_with_0_when_not(
    chain: signals.Chain,
) -> None:
    for steps, code in (
        (10, 0),
        (11, 4),
    ):  # saves after 8 and 10; goes on from there, a save after 11
        going_on = {"checkpoint.on_save_failure": "continue", "step_scheduler.ckpt_every_steps": 8}
        with chain.start(is_async="true", steps=steps, keys=going_on) as trainer:
            while len(found := writers(trainer)) < 2:
                assert not trainer.wait(0.01), trainer.log
            signal_all(found, signal.SIGSTOP)
            wait_for(trainer, 0, "upload")
            signal_all(found, signal.SIGKILL)
            assert trainer.wait(120) and trainer.code == code, trainer.log
        # Whichever rank's writer is missed first.
        assert re.search(
            "warning: rank [01]: the process that writes this rank's checkpoints ended unexpectedly",
            trainer.log,
        )
        assert "training continues, since checkpoint.on_save_failure is continue" in trainer.log
    assert (
        len(re.findall("error: rank [01]", trainer.log)) == 1
        and os.readlink(chain.root / "LATEST") == "epoch_0_step_10"
    )
