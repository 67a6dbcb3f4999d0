"""The recipe ``reranker``: any ranks train like one process; runs are resumed exactly."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.runs import pair_recipes
from tests.support.runs.like_one_process import Way, check_killed_run, check_like_one_process
from tests.support.runs.preference import TENSOR_PARALLEL

TEMPLATE = "--reranker.template=find {{ query }} ba {{ document }}"
WAYS: dict[str, tuple[str, ...]] = {
    "fsdp2": ("--step_scheduler.local_batch_size=3",),
    "ddp": ("--step_scheduler.local_batch_size=2", "--distributed.strategy=ddp"),
    "tp": ("--step_scheduler.local_batch_size=4", *TENSOR_PARALLEL),
}


METRICS = ("val_loss", "val_accuracy", "val_mrr")
training = pair_recipes.training
logged = partial(pair_recipes.logged, count="queries", metrics=METRICS)


@pytest.mark.parametrize(
    ("kind", "common", "ways"),
    [
        ("bert", (), ("ddp",)),
        pytest.param(
            "llama",
            (TEMPLATE, "--reranker.attention=bidirectional"),
            ("tp",),
            marks=pytest.mark.further,
        ),
        pytest.param(
            "llama",
            (TEMPLATE, "--peft={r: 4, target_modules: all-linear}"),
            ("fsdp2",),
            marks=pytest.mark.further,
        ),
    ],
)
def test_ranks_train_like_one_process(
    tmp_path: Path, kind: str, common: tuple[str, ...], ways: tuple[str, ...]
) -> None:
    # The third global batch has one query, so that a rank has none of it.
    both = ("--step_scheduler.global_batch_size=12", "--dataset.max_samples=25", *common)
    recipe = pair_recipes.write_reranker(tmp_path, kind)
    whole = "--step_scheduler.local_batch_size=12"
    chosen = {name: Way(WAYS[name], both) for name in ways}
    check_like_one_process(recipe, training, logged, chosen, whole)


@pytest.mark.further
def test_a_killed_run_continues_exactly(tmp_path: Path) -> None:
    recipe = pair_recipes.write_reranker(tmp_path)
    arguments = (
        "--step_scheduler.local_batch_size=3",
        "--step_scheduler.max_steps=6",
        "--step_scheduler.ckpt_every_steps=2",
        "--model.config_overrides={hidden_dropout_prob: 0.2, attention_probs_dropout_prob: 0.1}",
    )
    check_killed_run(recipe, training, *arguments)
