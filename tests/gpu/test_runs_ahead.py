"""On a GPU, the host queues steps without waiting."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.support.gpu import only_gpu
from tests.support.runs.training import Recipe, steps_of, train, with_loop, write_recipe

pytestmark = only_gpu


class Strict(LLMFinetune.loop_class):
    """From the third step on, torch raises an error for every operation that makes the host wait."""

    def train_step(self, batch: Any, control: Any) -> Any:
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
