"""On a GPU, the host queues steps without waiting, and copies that cannot be page-locked give the same bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from automodel_ckpt.checkpoint.jobs.tensor_bytes import blocks_of
from automodel_ckpt.checkpoint.saving.host_memory import lock_pages, unlock_pages
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.values.records import Control, Number
from tests.support.gpu import only_gpu
from tests.support.runs.training import Recipe, steps_of, train, with_loop, write_recipe

pytestmark = only_gpu


class Strict(TrainingLoop):
    """From the third step on, torch raises an error for every operation that makes the host wait."""

    def train_step(self, batch: GlobalBatch, control: Control) -> tuple[Number, Number]:
        if self.step_scheduler.step < 2:
            return super().train_step(batch, control)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return super().train_step(batch, control)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def masks_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow transformers to wait while it makes the mask of a forward pass: it reads the padding, or positions that the
    model has made."""
    create = modeling_llama.create_causal_mask

    def create_and_wait(*args: Any, **options: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return create(*args, **options)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_and_wait)


PACKS = (
    "--packed_sequence.size=48",
    "--step_scheduler.global_batch_size=2",
    "--step_scheduler.max_steps=12",
)
"""Packs of three samples."""


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    ("rows", "masks_wait"),
    [
        ((*PACKS, "--step_scheduler.local_batch_size=1"), False),
        ((*PACKS, "--step_scheduler.local_batch_size=2"), False),
        ((), True),
        (("--dataloader.padding_free=false",), True),
    ],
    ids=["one packed row", "packed rows", "rows of one sample", "padded rows"],
)
def test_no_operation_of_a_step_but_some_masks_waits_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: tuple[str, ...], masks_wait: bool
) -> None:
    if masks_wait:
        masks_may_wait(monkeypatch)
    overrides = (f"--checkpoint.checkpoint_dir={tmp_path / 'run'}", *rows)
    train(write_recipe(tmp_path), *overrides, recipe_class=with_loop(Recipe, Strict))
    steps = steps_of(tmp_path / "run")
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert all(math.isfinite(float.fromhex(step["loss"])) for step in steps)


def test_a_failed_registration_leaves_no_error_for_the_next_kernel() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    assert lock_pages(memory)
    # CUDA rejects memory that is registered already.
    assert not lock_pages(memory)
    assert float(torch.ones(4, device="cuda").mul_(2).sum()) == 8.0
    unlock_pages(memory)


@pytest.mark.parametrize("nbytes", [1, (1 << 20) + 3, 5 << 20])
def test_blocks_of_a_tensor_on_the_device_have_its_bytes(nbytes: int) -> None:
    expected = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    on_device = expected.cuda()
    found = b"".join(bytes(block) for block in blocks_of(on_device, block_bytes=1 << 20))
    assert found == expected.numpy().tobytes()
