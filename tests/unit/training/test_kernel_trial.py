"""A kernel is used after its trial, and otherwise replaced: where Triton is absent, or fails."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_ckpt.training.kernel_trial import tried

DEVICE = torch.device("cpu")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What an import of a name returns; Triton is installed."""
    modules: dict[str, Any] = {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    return modules


def test_the_module_is_returned_after_its_trial(modules: dict[str, Any]) -> None:
    devices: list[torch.device] = []
    module = SimpleNamespace(try_once=devices.append)
    modules["automodel_ckpt.training.some_kernel"] = module
    assert tried("some_kernel", DEVICE, "It computes") is module
    assert devices == [DEVICE]


def test_a_failure_is_logged_with_its_first_line(
    modules: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(device: torch.device) -> None:
        raise OSError("no compiler\nand more")

    modules["automodel_ckpt.training.some_kernel"] = SimpleNamespace(try_once=fails)
    with caplog.at_level("INFO", logger="automodel_ckpt"):
        assert tried("some_kernel", DEVICE, "It computes") is None
    (record,) = caplog.records
    expected = "It computes without Triton, whose kernel fails here: OSError: no compiler"
    assert record.getMessage() == expected


def test_nothing_is_imported_or_logged_without_triton(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level("DEBUG", logger="automodel_ckpt"):
        assert tried("some_kernel", DEVICE, "It computes") is None
    assert not caplog.records
