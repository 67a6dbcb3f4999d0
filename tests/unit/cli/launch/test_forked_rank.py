"""What a forked rank inherits from its launcher."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from automodel_ckpt.cli.launch import forked_rank
from automodel_ckpt.cli.launch.failure_directory import FailureDirectory


def test_a_rank_connects_when_all_ranks_of_its_node_have_been_forked(tmp_path: Path) -> None:
    directory = FailureDirectory(tmp_path)
    directory.register_process(0, 0)
    waiting = threading.Thread(target=forked_rank.await_forks, args=(directory, 0, 2, 1))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    directory.register_process(0, 1)
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_rank_of_several_nodes_connects_when_all_nodes_have_forked_theirs(tmp_path: Path) -> None:
    directory = FailureDirectory(tmp_path)
    directory.attempt = 0
    for rank in range(2):
        directory.register_process(0, rank)
    waiting = threading.Thread(target=forked_rank.await_forks, args=(directory, 0, 2, 2))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    directory.mark_forked()
    waiting.join(5)
    assert not waiting.is_alive()


def test_an_attempt_whose_ranks_ended_before_they_registered_does_not_count(tmp_path: Path) -> None:
    directory = FailureDirectory(tmp_path)
    directory.register_process(0, 0)
    directory.attempt = 1
    directory.mark_forked()
    # The launcher reports how the ranks of the last attempt ended.
    assert directory.last_attempt() == 0


def test_a_rank_does_not_wait_forever_for_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_rank, "FORKS_SECONDS", 0.05)
    forked_rank.await_forks(FailureDirectory(tmp_path), 0, 2, 1)
