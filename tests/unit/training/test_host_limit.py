"""The report on a GPU that computes steps faster than the host queues them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_ckpt.recipes import host_limit
from automodel_ckpt.recipes.host_limit import HostLimit

CUDA = torch.device("cuda", 0)


class Device:
    """What a GPU does: whether it has computed the gradients of a step when the update is queued."""

    is_idle = True
    num_marks = 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    state = Device()

    class Mark:
        def __init__(self, device: torch.device) -> None:
            assert device == CUDA
            state.num_marks += 1

        def is_past(self) -> bool:
            return state.is_idle

    monkeypatch.setattr(host_limit, "Mark", Mark)
    properties = SimpleNamespace(total_memory=141_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 20_400_000_000)
    return state


def config(**packing: Any) -> Any:
    packed = SimpleNamespace(**packing) if packing else None
    return SimpleNamespace(
        step_scheduler=SimpleNamespace(local_batch_size=2), packed_sequence=packed
    )


def run(limit: HostLimit, num_steps: int, num_micro_batches: int = 1, **how: bool) -> None:
    for _ in range(num_steps):
        limit.note_gradients()
        limit.note_update(num_micro_batches, **{"has_waited": False, **how})


def test_a_gpu_that_always_waits_is_reported_once_with_what_to_change(
    gpu: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "automodel_ckpt")
    limit = HostLimit(config(size=4096), CUDA, reports=True)
    run(limit, 69)
    assert caplog.text == ""
    run(limit, 1)
    assert "(50 of 50 steps)" in caplog.text
    assert (
        "local_batch_size (now 2) or packed_sequence.size (now 4096); 20.4 of 141.0 GB are used"
        in caplog.text
    )
    marks, text = gpu.num_marks, caplog.text
    run(limit, 100)
    assert (gpu.num_marks, caplog.text) == (marks, text)


def test_with_accumulation_a_larger_micro_batch_has_the_same_global_batch(
    gpu: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "automodel_ckpt")
    run(HostLimit(config(), CUDA, reports=True), 70, num_micro_batches=4)
    assert (
        "step_scheduler.local_batch_size: 4 computes the same global batch in less time"
        in caplog.text
    )
    assert "packed_sequence" not in caplog.text


def test_the_first_steps_do_not_count_and_a_tenth_may_be_different(
    gpu: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "automodel_ckpt")
    limit = HostLimit(config(), CUDA, reports=True)
    gpu.is_idle = False
    run(limit, 25)
    gpu.is_idle = True
    run(limit, 45)
    assert "(45 of 50 steps)" in caplog.text
    caplog.clear()
    limit = HostLimit(config(), CUDA, reports=True)
    run(limit, 20)
    gpu.is_idle = False
    run(limit, 6)
    gpu.is_idle = True
    run(limit, 100)
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["a CPU", "another rank", "waits"])
def test_nothing_is_reported_where_it_would_show_nothing(
    gpu: Device, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level("INFO", "automodel_ckpt")
    device = torch.device("cpu") if name == "a CPU" else CUDA
    limit = HostLimit(config(), device, reports=name != "another rank")
    run(limit, 200, has_waited=name == "waits")
    assert caplog.text == ""
    assert (gpu.num_marks > 0) == (name == "waits")
