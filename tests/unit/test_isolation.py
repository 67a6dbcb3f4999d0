"""A test leaves nothing for those that follow in its process: here, the first one for the second one."""

from __future__ import annotations

import logging
import os
import signal

import pytest

from automodel_ckpt.config import trust
from automodel_ckpt.distributed.stop import stop_request
from automodel_ckpt.hub_retries import quiet_retries
from automodel_ckpt.training import start_time


def test_a_command_in_this_process_changes_what_a_process_has() -> None:
    trust.record_remote_code(trust.Trust([]))
    start_time.note_process_start(os.getpid())
    logger = logging.getLogger("automodel_ckpt")
    logger.setLevel(logging.CRITICAL)
    logger.addHandler(logging.StreamHandler())
    os.environ["LEFT_BY_A_TEST"] = "1"
    request = stop_request()
    request.note(signal.SIGTERM)
    request.finished = True
    request.on_request = print
    quiet_retries()


def test_the_next_test_does_not_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMODEL_CKPT_TRUST", trust.REMOTE_CODE)
    assert trust.trusts_remote_code(), "the environment says it, unless a command has recorded it"
    assert start_time.noted() is None
    logger = logging.getLogger("automodel_ckpt")
    assert logger.level != logging.CRITICAL
    assert not any(type(handler) is logging.StreamHandler for handler in logger.handlers)
    assert "LEFT_BY_A_TEST" not in os.environ
    request = stop_request()
    assert not request.wanted
    assert not request.finished
    assert request.on_request is None
    assert not logging.getLogger("huggingface_hub.utils._http").filters
