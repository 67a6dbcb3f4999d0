"""The loss head under each strategy, beside full logits."""

from pathlib import Path

import pytest

from tests.distributed.kinds.test_training import lines, lines_of_steps, run_each
from tests.support.runs.training import RECIPE, VALIDATION

ENDS = "['*embed_tokens*', 'lm_head*']"
EMBEDDING = "['*embed_tokens*']"
SHORT = (
    "--model.from_config.attention_dropout=0",
    "--step_scheduler.max_steps=2",
    "--checkpoint.save_consolidated=false",
)
FULL = "--loss_fn={_target_: torch.nn.CrossEntropyLoss}"


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (1, [("single", "false", ENDS)]),
        (2, [("tp", "false", ENDS)]),
        pytest.param(
            2,
            [
                ("ddp", "false", "[]"),
                ("fsdp2", "true", "[]"),
                ("fsdp2", "true", EMBEDDING),
                ("tp", "true", "[]"),
            ],
            marks=pytest.mark.further,
        ),
    ],
    ids=["one rank", "two ranks", "others"],
)
def test_it_trains_as_full_logits_do(
    tmp_path: Path, num_ranks: int, cases: list[tuple[str, str, str]]
) -> None:
    runs = {}
    for strategy, tied, frozen in cases:
        layout = "tp_size=2" if strategy == "tp" else f"strategy={strategy}"
        name = f"{strategy}, tied {tied}"
        runs[name] = (
            *SHORT,
            f"--distributed.{layout}",
            f"--model.from_config.tie_word_embeddings={tied}",
            f"--model.freeze={frozen}",
        )
        runs[f"{name}, full"] = (*runs[name], FULL)
    run_each(tmp_path, runs, num_ranks=num_ranks, text=RECIPE + VALIDATION)
    for name in runs:
        if f"{name}, full" not in runs:
            continue
        ours, full = (tmp_path / each for each in (name, f"{name}, full"))
        check_steps(ours, full)
        mine, theirs = (lines(directory / "validation.jsonl")[-1] for directory in (ours, full))
        assert mine["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4), name
        assert mine["val_accuracy"] == theirs["val_accuracy"], name


def check_steps(ours: Path, full: Path) -> None:
    mine, theirs = (lines_of_steps(directory / "training.jsonl") for directory in (ours, full))
    for field in ("loss", "grad_norm"):
        expected = [record[field] for record in theirs]
        assert [record[field] for record in mine] == pytest.approx(expected, rel=1e-4), ours.name


@pytest.mark.further
def test_a_sharded_model_that_caps_its_logits_trains_as_on_full_ones(tmp_path: Path) -> None:
    gemma = (
        *SHORT,
        "--distributed.strategy=fsdp2",
        "--model.from_config.model_type=gemma2",
        "--model.from_config.head_dim=8",
        "--model.from_config.final_logit_softcapping=0.5",
    )
    run_each(tmp_path, {"ours": gemma, "full": (*gemma, FULL)}, num_ranks=2)
    check_steps(tmp_path / "ours", tmp_path / "full")
