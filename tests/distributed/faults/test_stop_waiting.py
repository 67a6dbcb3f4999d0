"""A stop is obeyed while ranks wait for data: on one rank or all, here or in a worker process, in training or not."""

import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from automodel_ckpt.errors import Stopped
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.distributed.kinds.test_training import saved
from tests.support import ranks
from tests.support.runs.training import RECIPE, installed, with_loop, write_recipe

SECONDS = 300.0
"""Less than the sleep that a signal ends, and enough for a busy machine."""


class Blocks:
    """64 samples; reading one of *at* or later takes ten minutes on the ranks *on*, and cannot be talked out of it."""

    def __init__(self, at: int = 16, on: tuple[int, ...] = (0, 1)) -> None:
        self.at, self.on = at, on

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index >= self.at and int(os.environ["RANK"]) in self.on:
            try:
                time.sleep(600)
            except Exception:
                time.sleep(600)
        tokens = [3 + (index * 7 + position * 11) % 200 for position in range(8)]
        return {"input_ids": tokens, "labels": tokens}


def stopped_in(training: Any, delay: float, signalled: tuple[int, ...]) -> tuple[str, float, int]:
    """Train; the ranks *signalled* get SIGTERM *delay* seconds after step 2. (message, seconds since, children left)"""
    sent: list[float] = []

    class Waits(LLMFinetune.loop_class):
        def step(self, *arguments: Any) -> Any:
            due = super().step(*arguments)
            if self.step_scheduler.step == 2:
                threading.Timer(delay, self.send).start()
            return due

        def send(self) -> None:
            sent.append(time.monotonic())
            if self.layout.rank in signalled:
                os.kill(os.getpid(), signal.SIGTERM)

        def stop(self) -> NoReturn:
            sent.append(time.monotonic())
            super().stop()

    try:
        training(recipe_class=with_loop(LLMFinetune, Waits))
    except Stopped as stop:
        return str(stop), sent[1] - sent[0], len(multiprocessing.active_children())
    raise AssertionError("it was not stopped")


@pytest.mark.parametrize(
    ("blocked", "signalled", "num_workers"),
    [
        pytest.param("[0, 1]", (0, 1), 0, marks=pytest.mark.further),
        ("[1]", (0,), 0),
        ("[0, 1]", (1,), 1),
    ],
)
def test_ranks_that_wait_for_data_save_and_stop_within_seconds(
    tmp_path: Path, blocked: str, signalled: tuple[int, ...], num_workers: int
) -> None:
    overrides = (
        f"--checkpoint.checkpoint_dir={tmp_path / 'run'}",
        f"--dataset={{_target_: tests.distributed.faults.test_stop_waiting.Blocks, on: {blocked}}}",
        "--dataloader.shuffle=false",
        f"--dataloader.num_workers={num_workers}",
    )
    training = partial(installed, write_recipe(tmp_path), *overrides)
    ended = ranks.run(partial(stopped_in, training, 0.5, signalled), 2, init=False)
    for message, seconds, children in ended:
        assert "after step 2, which is saved" in message
        assert seconds < SECONDS
        assert children == 0
    assert saved(tmp_path / "run") == ["epoch_0_step_2"]


def test_a_validation_that_waits_for_data_ends_too(tmp_path: Path) -> None:
    overrides = (
        f"--checkpoint.checkpoint_dir={tmp_path / 'run'}",
        "--validation_dataset={_target_: tests.distributed.faults.test_stop_waiting.Blocks, on: [0], at: 4}",
        "--step_scheduler.val_every_steps=2",
    )
    training = partial(installed, write_recipe(tmp_path, RECIPE), *overrides)
    ended = ranks.run(partial(stopped_in, training, 0.5, (0,)), 2, init=False)
    assert all(
        "after step 2, which is saved" in message and seconds < SECONDS
        for message, seconds, _ in ended
    ), ended
