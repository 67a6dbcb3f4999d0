"""The report on a GPU that computes steps faster than the host queues them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_ckpt.training.watch import host_limit
from automodel_ckpt.training.watch.host_limit import HostLimit

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


def limit_of(
    *,
    global_batch_size: int = 2,
    device: torch.device = CUDA,
    rank: int = 0,
    pp: int = 1,
    **packing: Any,
) -> HostLimit:
    """The watch of a rank that computes micro-batches of 2 samples."""
    steps = SimpleNamespace(local_batch_size=2, global_batch_size=global_batch_size)
    packed = SimpleNamespace(**packing) if packing else None
    config: Any = SimpleNamespace(step_scheduler=steps, packed_sequence=packed)
    layout: Any = SimpleNamespace(rank=rank, device=device, sizes=SimpleNamespace(dp=1, pp=pp))
    return HostLimit(config, layout)


class OnDevice(torch.Tensor):
    """A tensor that says to be on a GPU."""

    device = CUDA  # type: ignore[assignment]


NORM = torch.ones(()).as_subclass(OnDevice)


def run(limit: HostLimit, num_steps: int, grad_norm: float | torch.Tensor = NORM) -> None:
    for _ in range(num_steps):
        limit.note_gradients()
        limit.note_update(grad_norm)


def test_a_gpu_that_always_waits_is_reported_once_with_what_to_change(
    gpu: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "automodel_ckpt")
    limit = limit_of(size=4096)
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


@pytest.mark.parametrize(
    ("global_batch_size", "pp", "advised"), [(8, 1, 4), (6, 1, 6), (8, 2, 4), (8, 4, None)]
)
def test_with_accumulation_a_larger_micro_batch_has_the_same_global_batch(
    gpu: Device,
    caplog: pytest.LogCaptureFixture,
    global_batch_size: int,
    pp: int,
    advised: int | None,
) -> None:
    caplog.set_level("INFO", "automodel_ckpt")
    run(limit_of(global_batch_size=global_batch_size, pp=pp), 70)
    expected = "step_scheduler.local_batch_size (now 2)"
    if advised is not None:
        expected = f"step_scheduler.local_batch_size: {advised} computes the same global batch"
    assert expected in caplog.text
    assert "packed_sequence" not in caplog.text


def test_the_first_steps_do_not_count_and_a_tenth_may_be_different(
    gpu: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "automodel_ckpt")
    limit = limit_of()
    gpu.is_idle = False
    run(limit, 25)
    gpu.is_idle = True
    run(limit, 45)
    assert "(45 of 50 steps)" in caplog.text
    caplog.clear()
    limit = limit_of()
    run(limit, 20)
    gpu.is_idle = False
    run(limit, 6)
    gpu.is_idle = True
    run(limit, 100)
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["a CPU", "another rank", "reads the norm", "offloaded state"])
def test_nothing_is_reported_where_it_would_show_nothing(
    gpu: Device, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level("INFO", "automodel_ckpt")
    device = torch.device("cpu") if name == "a CPU" else CUDA
    limit = limit_of(device=device, rank=int(name == "another rank"))
    norms: dict[str, float | torch.Tensor] = {"reads the norm": 1.0}
    norms["offloaded state"] = torch.ones(())
    run(limit, 200, norms.get(name, NORM))
    assert caplog.text == ""
    assert (gpu.num_marks > 0) == (name in norms)
