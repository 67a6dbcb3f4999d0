"""What a command in one test, or in a fixture of a module, leaves in its process does not reach the next test."""

import logging
import os
import random
import signal

import numpy as np
import pytest
import torch

from automodel_ckpt.config.callables import trust
from automodel_ckpt.logs import timeline
from automodel_ckpt.parallel.ranks.stop import stop_request


def _run_a_command() -> None:
    """Change what commands change in their process."""
    trust.record_remote_code(trust.Trust([]))
    timeline.note_process_start(os.getpid())
    logger = logging.getLogger("automodel_ckpt")
    logger.setLevel(logging.CRITICAL)
    logger.addHandler(logging.StreamHandler())
    request = stop_request()
    request.install()
    request.note(signal.SIGTERM)
    request.finished = True
    request.on_request = print


def _assert_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that this process is as it would be before its first command."""
    monkeypatch.setenv("AUTOMODEL_CKPT_TRUST", trust.REMOTE_CODE)
    assert trust.trusts_remote_code(), "the environment says it, unless a command has recorded it"
    assert timeline._noted is None
    logger = logging.getLogger("automodel_ckpt")
    assert logger.level == logging.NOTSET
    assert not logger.handlers
    request = stop_request()
    assert not request.wanted
    assert not request.finished
    assert request.on_request is None
    assert "stop" not in getattr(signal.getsignal(signal.SIGTERM), "__module__", "")
    numbers = (random.random(), float(np.random.rand()), torch.rand(()).item())
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    assert numbers == (random.random(), float(np.random.rand()), torch.rand(()).item())


@pytest.fixture(scope="module")
def command_of_the_module() -> None:
    _run_a_command()


def test_a_fixture_of_the_module_leaves_nothing(
    command_of_the_module: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_new(monkeypatch)


def test_a_command_in_this_process_changes_what_a_process_has() -> None:
    _run_a_command()
    assert "stop" in signal.getsignal(signal.SIGTERM).__module__
    os.environ["LEFT_BY_A_TEST"] = "1"


def test_the_next_test_does_not_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _assert_new(monkeypatch)
    assert "LEFT_BY_A_TEST" not in os.environ
