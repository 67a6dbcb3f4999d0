"""Weights are read from files into tensors of any device and type, and copied from a GPU with locked pages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from automodel_ckpt.checkpoint.formats import reading
from automodel_ckpt.checkpoint.formats.reading import read_tree
from automodel_ckpt.checkpoint.parts.manifest import Tree
from automodel_ckpt.checkpoint.saving.background import lock_pages, unlock_pages
from automodel_ckpt.checkpoint.state.storable import blocks_of
from automodel_ckpt.convert.open import open_weights
from tests.support.gpu import both_devices, only_gpu


@pytest.mark.parametrize("parallel_from", [1, 1 << 40], ids=["threads", "one thread"])
@pytest.mark.parametrize("device", both_devices())
def test_blocks_of_any_tensor_have_the_values_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, parallel_from: int
) -> None:
    # Larger than a block, by rows, within rows and within the last dimension; smaller; without dimensions; empty.
    shapes = [(700, 33), (3, 5, 4096), (9000,), (3, 2), (), (0, 4)]
    monkeypatch.setattr(reading, "_PARALLEL_FROM_BYTES", parallel_from)
    monkeypatch.setattr(reading, "_SERIAL_ELEMENTS", 1000)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 4096)
    torch.manual_seed(0)
    saved: dict[str, torch.Tensor] = {}
    targets: dict[str, torch.Tensor] = {}
    for number, shape in enumerate(shapes):
        for stored_type in (torch.float32, torch.bfloat16):
            for target_type in (torch.float32, torch.bfloat16, torch.float64):
                name = f"{number}.{stored_type}.{target_type}"
                saved[name] = torch.randn(shape).to(stored_type)
                targets[name] = torch.zeros(shape, dtype=target_type, device=device)
        name = f"{number}.transposed"
        saved[name] = torch.randn(shape)
        targets[name] = torch.zeros(shape[::-1], device=device).permute(
            tuple(reversed(range(len(shape))))
        )
    save_file(saved, tmp_path / "model.safetensors")
    source = open_weights(tmp_path).modules["model"]
    state: dict[str, Any] = dict(targets)
    read_tree(source.root, Tree("", dict(source.tensors), {}), state)
    for name, target in targets.items():
        assert torch.equal(target.cpu(), saved[name].to(target.dtype)), name


@only_gpu
def test_a_failed_registration_leaves_no_error_for_the_next_kernel() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    assert lock_pages(memory)
    # CUDA rejects memory that is registered already.
    assert not lock_pages(memory)
    assert float(torch.ones(4, device="cuda").mul_(2).sum()) == 8.0
    unlock_pages(memory)


@only_gpu
@pytest.mark.parametrize("nbytes", [1, (1 << 20) + 3, 5 << 20])
def test_blocks_of_a_tensor_on_the_device_have_its_bytes(nbytes: int) -> None:
    expected = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    on_device = expected.cuda()
    found = b"".join(bytes(block) for block in blocks_of(on_device, block_bytes=1 << 20))
    assert found == expected.numpy().tobytes()
