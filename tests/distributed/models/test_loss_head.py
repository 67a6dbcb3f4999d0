"""The loss head under each strategy, beside full logits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.distributed.kinds.test_training import lines, lines_of_steps
from tests.support import ranks
from tests.support.runs.training import RECIPE, VALIDATION, train, write_recipe

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
        (2, [("fsdp2", "true", "[]"), ("tp", "false", ENDS)]),
        pytest.param(
            2,
            [("ddp", "false", "[]"), ("fsdp2", "true", EMBEDDING), ("tp", "true", "[]")],
            marks=pytest.mark.further,
        ),
    ],
    ids=["one rank", "two ranks", "others"],
)
def test_it_trains_as_full_logits_do(
    tmp_path: Path, num_ranks: int, cases: list[tuple[str, str, str]]
) -> None:
    recipe = write_recipe(tmp_path, RECIPE + VALIDATION)
    runs = {
        f"{strategy}, tied {tied}, frozen {frozen}": (
            "--distributed.tp_size=2" if strategy == "tp" else f"--distributed.strategy={strategy}",
            f"--model.from_config.tie_word_embeddings={tied}",
            f"--model.freeze={frozen}",
        )
        for strategy, tied, frozen in cases
    }
    named = {
        (name, kind): (tmp_path / str(number) / kind, ranks.free_port())
        for number, name in enumerate(runs)
        for kind in ("ours", "full")
    }

    def all_cases() -> None:
        for (name, kind), (directory, port) in named.items():
            os.environ["MASTER_PORT"] = str(port)
            train(
                recipe,
                *runs[name],
                *(FULL,) * (kind == "full"),
                *SHORT,
                f"--checkpoint.checkpoint_dir={directory}",
            )

    ranks.run(all_cases, num_ranks, init=False, timeout=150)
    for name in runs:
        ours, full = (named[name, kind][0] for kind in ("ours", "full"))
        mine, theirs = (lines_of_steps(directory / "training.jsonl") for directory in (ours, full))
        for field in ("loss", "grad_norm"):
            assert [r[field] for r in mine] == pytest.approx(
                [r[field] for r in theirs], rel=1e-4
            ), name
        mine, theirs = (lines(directory / "validation.jsonl")[-1] for directory in (ours, full))
        assert mine["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4), name
        assert mine["val_accuracy"] == theirs["val_accuracy"], name


@pytest.mark.further
def test_a_sharded_model_that_caps_its_logits_trains_as_on_full_ones(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, RECIPE + VALIDATION)
    gemma = ("--model.from_config.model_type=gemma2", "--model.from_config.head_dim=8")
    cap = "--model.from_config.final_logit_softcapping=0.5"
    ports = {"ours": ranks.free_port(), "full": ranks.free_port()}

    def both() -> None:
        for kind, port in ports.items():
            os.environ["MASTER_PORT"] = str(port)
            train(
                recipe,
                *gemma,
                cap,
                "--distributed.strategy=fsdp2",
                *(FULL,) * (kind == "full"),
                *SHORT,
                f"--checkpoint.checkpoint_dir={tmp_path / kind}",
            )

    ranks.run(both, 2, init=False, timeout=150)
    ours, full = (lines_of_steps(tmp_path / kind / "training.jsonl") for kind in ports)
    for field in ("loss", "grad_norm"):
        assert [r[field] for r in ours] == pytest.approx([r[field] for r in full], rel=1e-4)
