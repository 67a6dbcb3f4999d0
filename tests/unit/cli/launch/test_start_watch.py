"""A start that takes long is reported by the launcher, with the place of each rank."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from automodel_ckpt.cli.launch import start_watch
from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.start_watch import StartWatch
from automodel_ckpt.parallel.ranks.process_stacks import DUMP_SIGNAL, StackDump, place_in
from tests.support.runs.training import RECIPE
from tests.support.servers.command_server import CommandServer

CODE = """
import os, time
from automodel_ckpt.cli.launch import start_watch
from automodel_ckpt.recipes.llm_finetune import LLMFinetune

start_watch.FIRST_REPORT_SECONDS = 1.0

def sleep_long():
    time.sleep(4)

class Slow(LLMFinetune):
    def setup(self):
        if os.environ["RANK"] == "1":
            sleep_long()
        super().setup()
"""
STACKS = """process 7, from /proc:
  thread 7 python: sleeping

Thread 0x00007f10 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f20 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 12 in recv
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", line 34 in broadcast
  File "/venv/lib/python3.11/site-packages/automodel_ckpt/distributed/agree.py", line 56 in gather
  File "/home/me/train.py", line 78 in <module>
"""


def wait_here() -> None:
    time.sleep(60)


def start_of_a_rank(failure_dir: FailureDirectory, rank: int) -> int:
    """Fork a process that registers itself as a rank, and waits; returns its id."""
    process = os.fork()
    if process == 0:
        try:
            with StackDump():
                failure_dir.register_process(0, rank)
                wait_here()
        finally:
            os._exit(0)
    return process


@pytest.fixture
def failure_dir(tmp_path: Path) -> Iterator[FailureDirectory]:
    """The directory of three ranks that start."""
    failure_dir = FailureDirectory(tmp_path / "ranks")
    failure_dir.attempt = 0
    processes = [start_of_a_rank(failure_dir, rank) for rank in range(3)]
    try:
        while len(failure_dir.processes(0)) < 3:
            time.sleep(0.01)
        yield failure_dir
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def polled(watch: StartWatch, failure_dir: FailureDirectory, times: int) -> None:
    for _ in range(times):
        watch.poll(failure_dir)


def test_ranks_that_start_for_long_are_reported_until_they_train(
    failure_dir: FailureDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(start_watch.time, "monotonic", lambda: clock[0])
    watch = StartWatch()
    polled(watch, failure_dir, 2)
    clock[0] += start_watch.FIRST_REPORT_SECONDS - 1
    polled(watch, failure_dir, 2)
    assert capfd.readouterr().err == ""
    os.kill(failure_dir.processes(0)[2], signal.SIGSTOP)
    clock[0] += 1
    polled(watch, failure_dir, 4)
    first = capfd.readouterr().err
    place = r"wait_here \(test_start_watch.py:\d+\)"
    expected = rf"""training has not begun for 5 min 00 s:
  ranks 0, 1: {place}
  rank 2: is suspended \(process \d+\)
"""
    assert re.fullmatch(expected, first), first
    failure_dir.mark_training(0, 0)
    failure_dir.mark_done(0, 2)
    clock[0] += 299
    polled(watch, failure_dir, 2)
    assert capfd.readouterr().err == ""
    clock[0] += 1
    polled(watch, failure_dir, 2)
    assert re.fullmatch(
        rf"training has not begun for 10 min 00 s:\n  rank 1: {place}\n", capfd.readouterr().err
    )
    # Ranks that are started again have their time again.
    failure_dir.attempt = 1
    clock[0] += 1000
    polled(watch, failure_dir, 2)
    assert capfd.readouterr().err == ""


def test_a_request_for_stacks_after_the_last_one_ends_no_process() -> None:
    process = os.fork()
    if process == 0:
        signal.signal(DUMP_SIGNAL, signal.SIG_DFL)
        with StackDump():
            pass
        os.kill(os.getpid(), DUMP_SIGNAL)
        os._exit(7)
    _, status = os.waitpid(process, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 7


def test_ranks_are_named_briefly() -> None:
    assert start_watch._names([3]) == "rank 3"
    assert start_watch._names([0, 1]) == "ranks 0, 1"
    assert start_watch._names([0, 1, 2, 3]) == "ranks 0 to 3"
    assert start_watch._names([0, 2, 3]) == "ranks 0, 2, 3"


def test_the_place_is_that_of_the_main_thread_and_of_the_code_outside_of_libraries() -> None:
    assert place_in(STACKS) == "recv (socket.py:12), called by gather (agree.py:56)"
    assert place_in("process 7, from /proc:\n  thread 7 python: sleeping\n") == ""
    library_only = STACKS.partition('  File "/venv/lib/python3.11/site-packages/auto')[0]
    assert place_in(library_only) == "recv (socket.py:12)"


def test_a_launcher_reports_a_slow_start_and_the_run_goes_on(
    tmp_path: Path, commands: CommandServer
) -> None:
    (tmp_path / "slow.py").write_text(CODE)
    (tmp_path / "recipe.yaml").write_text(f"recipe: slow.py:Slow\n{RECIPE}")
    words = ["--trust=slow.py", "--nproc-per-node=2", "--step_scheduler.max_steps=1"]
    done = commands.run("ckpt-train", "recipe.yaml", *words, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"training has not begun for \d s:\n  rank 0: (.*)\n  rank 1: (.*)\n", done.stderr
    )
    assert found is not None, done.stderr
    assert found[1].startswith("_wait_for_ranks (joining.py:")
    assert found[2] == "sleep_long (slow.py:9)"
