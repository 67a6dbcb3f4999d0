"""The plain script that failures of this project are compared with: it continues from its newest complete save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import ranks
from tools import torchrun_dcp
from tools.crash import losses
from tools.crash.trainer import Trainer


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.further), True])
def test_a_start_continues_from_the_newest_complete_save(tmp_path: Path, is_async: bool) -> None:
    (tmp_path / "run" / "step_9").mkdir(parents=True)
    assert ranks.run(lambda: trained(tmp_path, 5, is_async), 1) == [5]
    assert ranks.run(lambda: trained(tmp_path, 6, is_async), 1) == [6]
    steps = [mark.step for mark in Trainer([], tmp_path, {}).marks(0)]
    assert steps == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    assert losses.completed(Trainer([], tmp_path, {}).marks(0)) == 6


def trained(base: Path, num_steps: int, is_async: bool) -> int:
    os.environ.update(CRASH_MARKS=str(base), RANK="0")
    state = torchrun_dcp.State()
    found = torchrun_dcp.newest(base / "run")
    if found is not None:
        state.load(found)
    torchrun_dcp.train(state, base / "run", num_steps, 4, is_async=is_async)
    return state.step
