"""The type that a run computes in is the same under each strategy; what is kept and saved is not touched by it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.recipes.trainable import Trainable
from tests.distributed.test_training import lines_of_steps
from tests.support import ranks
from tests.support.training import train, write_recipe

MIXED = "--distributed.mixed_precision=bfloat16"
LINEAR = ("--lr_scheduler.decay_steps=3", "--step_scheduler.max_steps=3")


class Watched(LLMFinetune):
    """Fails unless each projection computes in bfloat16 while the weights and their moments are float32."""

    def build_trainable(
        self, config: RecipeConfig | None = None, *, is_trained: bool = True
    ) -> Trainable:
        self.seen: set[torch.dtype] = set()
        trainable = super().build_trainable(config, is_trained=is_trained)
        for name, module in trainable.model.named_modules():
            if name.endswith("q_proj"):
                module.register_forward_hook(self.note)
        return trainable

    def note(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.seen.add(output.dtype)

    def close(self) -> None:
        if self.loop.last_step is not None:
            assert self.seen == {torch.bfloat16}
            kept = [
                *self.model.parameters(),
                *(s["exp_avg"] for s in self.optimizer.state.values()),
            ]
            assert {tensor.dtype for tensor in kept} == {torch.float32}
        super().close()


@pytest.mark.parametrize(
    ("strategy", "num_ranks"), [("single", 1), ("single", 2), ("ddp", 2), ("fsdp2", 2)]
)
def test_each_strategy_computes_in_bfloat16_and_keeps_float32(
    tmp_path: Path, strategy: str, num_ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cut = (
        "--distributed.tp_size=2"
        if (strategy, num_ranks) == ("single", 2)
        else "--distributed.tp_size=1"
    )
    overrides = (
        f"--distributed.strategy={strategy}",
        cut,
        "--model.from_config.attention_dropout=0",
        *LINEAR,
    )
    recipe, ports = write_recipe(tmp_path), [ranks.free_port() for _ in range(2)]

    def both() -> None:
        os.environ["MASTER_PORT"] = str(ports[0])
        train(
            recipe,
            *overrides,
            MIXED,
            f"--checkpoint.checkpoint_dir={tmp_path / 'mixed'}",
            recipe_class=Watched,
        )
        os.environ["MASTER_PORT"] = str(ports[1])
        train(recipe, *overrides, f"--checkpoint.checkpoint_dir={tmp_path / 'plain'}")

    ranks.run(both, num_ranks, init=False)
    assert "computing in bfloat16" in capfd.readouterr().err
    mixed, plain = (
        lines_of_steps(tmp_path / name / "training.jsonl") for name in ("mixed", "plain")
    )
    assert [r["loss"] for r in mixed] == pytest.approx([r["loss"] for r in plain], rel=0.05)
    assert [r["loss"] for r in mixed] != [r["loss"] for r in plain]
