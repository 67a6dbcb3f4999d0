"""Code that reads properties of a GPU when it is imported leaves a launcher able to fork ranks that use the GPU."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_ckpt.cli.launch.forked_run import import_before_forks
from automodel_ckpt.cli.launch.gpu_properties import without_initializing_cuda

Patch = pytest.MonkeyPatch


@pytest.fixture
def initialized(monkeypatch: Patch) -> list[int]:
    """Two GPUs; the processes that have initialized CUDA to read their properties, as this process knows them."""
    processes: list[int] = []

    def read(device: Any) -> SimpleNamespace:
        processes.append(os.getpid())
        if isinstance(device, torch.cuda.device):
            device = device.idx
        elif not isinstance(device, int):
            device = torch.device(device or "cuda").index or 0
        if device >= 2:
            raise AssertionError("Invalid device id")
        return SimpleNamespace(
            major=9, minor=device, name="NVIDIA H200", total_memory=150 << 30, uuid=b"x", _hidden=1
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", read)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(processes))
    return processes


def test_properties_that_imported_code_reads_come_from_another_process(
    initialized: list[int],
) -> None:
    found = []

    def prepare() -> Any:
        # As bitsandbytes and torchao do when they are imported.
        found.append(torch.cuda.get_device_capability())
        found.append(torch.cuda.get_device_capability(torch.cuda.device(1)))
        found.append(torch.cuda.get_device_capability("cuda:1"))
        found.append(torch.cuda.get_device_properties(torch.device("cuda")).total_memory)
        found.append(torch.cuda.get_device_name(torch.cuda.current_device()))
        return "the recipe", "its class"

    assert import_before_forks(prepare) == ("the recipe", "its class")
    assert found == [(9, 0), (9, 1), (9, 1), 150 << 30, "NVIDIA H200"]
    assert initialized == []
    # A rank reads them itself.
    assert torch.cuda.get_device_capability(1) == (9, 1)
    assert initialized == [os.getpid()]


def test_gpus_are_counted_by_another_process_once(
    initialized: list[int], monkeypatch: Patch, tmp_path: Path
) -> None:
    # As where NVML cannot count them: the count by CUDA leaves no process that could be forked.
    counted_by = tmp_path / "pids"

    def count() -> int:
        with counted_by.open("a") as file:
            print(os.getpid(), file=file)
        return 2

    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with without_initializing_cuda():
        assert [torch.cuda.device_count(), torch.cuda.device_count()] == [2, 2]
    [pid] = counted_by.read_text().split()
    assert int(pid) != os.getpid() and torch.cuda.device_count is count


def test_a_forked_process_reads_properties_itself(initialized: list[int], tmp_path: Path) -> None:
    # It may use CUDA: the ranks of a launcher are such processes.
    reader = tmp_path / "pid"
    with without_initializing_cuda():
        child = os.fork()
        if child == 0:
            try:
                torch.cuda.get_device_capability(0)
                reader.write_text(str(initialized))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    assert reader.read_text() == str([child])


def test_the_initialization_of_cuda_reads_properties_in_this_process(
    initialized: list[int], monkeypatch: Patch
) -> None:
    # torch reads them before it calls itself initialized. A process that is forked then cannot use CUDA.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda._tls, "is_initializing", True, raising=False)
    with without_initializing_cuda():
        torch.cuda.get_device_capability(0)
    assert initialized == [os.getpid()]
