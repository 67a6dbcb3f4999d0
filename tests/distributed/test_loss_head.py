"""The loss head under each strategy, beside full logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_training import lines, lines_of_steps, run
from tests.support.training import RECIPE, VALIDATION

FULL = "--loss_fn={_target_: torch.nn.CrossEntropyLoss}"


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
@pytest.mark.parametrize("frozen", ["[]", "['*embed_tokens*', 'lm_head*']"])
def test_it_trains_as_full_logits_do(tmp_path: Path, strategy: str, num_ranks: int, tied: str, frozen: str) -> None:
    if tied == "true" and frozen != "[]":
        frozen = "['*embed_tokens*']"
    overrides = (
        f"--distributed.strategy={strategy}",
        f"--model.from_config.tie_word_embeddings={tied}",
        f"--model.freeze={frozen}",
        "--model.from_config.attention_dropout=0",
        "--step_scheduler.max_steps=4",
    )
    run(tmp_path, *overrides, name="ours", num_ranks=num_ranks, text=RECIPE + VALIDATION)
    run(tmp_path, *overrides, FULL, name="full", num_ranks=num_ranks, text=RECIPE + VALIDATION)
    ours, full = (lines_of_steps(tmp_path / name / "training.jsonl") for name in ("ours", "full"))
    for field in ("loss", "grad_norm"):
        assert [r[field] for r in ours] == pytest.approx([r[field] for r in full], rel=1e-4)
    values = [lines(tmp_path / name / "validation.jsonl")[-1]["val_loss"] for name in ("ours", "full")]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_a_model_that_caps_its_logits_trains_on_full_ones(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gemma = ("--model.from_config.model_type=gemma2", "--model.from_config.head_dim=8")
    run(tmp_path, *gemma, "--step_scheduler.max_steps=1")
    assert "computed from full logits: Gemma2ForCausalLM" in capfd.readouterr().err
