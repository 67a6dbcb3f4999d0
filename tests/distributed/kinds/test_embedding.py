"""The recipe ``embedding``: any ranks compute the gradient of one process; runs are resumed exactly."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, BertForMaskedLM

from automodel_ckpt.cli.ckpt import main as run_ckpt
from tests.support import ranks
from tests.support.runs import pair_recipes
from tests.support.runs.like_one_process import Way, check_killed_run, check_like_one_process
from tests.support.runs.preference import TENSOR_PARALLEL

LORA = ("--peft.r=4", "--peft.dropout=0.0", "--optimizer.lr=0.01")
METRICS = ("val_loss", "val_accuracy", "val_mrr", "val_recall_at_10")
BATCH = (
    "--step_scheduler.global_batch_size=12",
    "--checkpoint.save_consolidated=false",
    "--step_scheduler.max_steps=4",
)
WAYS: dict[str, tuple[str, ...]] = {
    "fsdp2": ("--step_scheduler.local_batch_size=3",),
    "ddp": ("--step_scheduler.local_batch_size=6", "--distributed.strategy=ddp"),
    "ddp_accumulated": ("--step_scheduler.local_batch_size=2", "--distributed.strategy=ddp"),
    "tp": ("--step_scheduler.local_batch_size=4", *TENSOR_PARALLEL),
}


training = pair_recipes.training
logged = partial(pair_recipes.logged, count="pairs", metrics=METRICS)


def run(recipe: Path, name: str, num_ranks: int, *overrides: str) -> list[float]:
    """Train in the directory *name*; the values that it logs."""
    ranks.run(training(recipe, name, *overrides), num_ranks, init=False)
    return logged(recipe.parent / name)


@pytest.mark.parametrize(
    ("kind", "common", "ways"),
    [
        ("bert", (), ("fsdp2", "ddp", "ddp_accumulated")),
        ("bert", ("--embedding.negatives=own",), ("ddp_accumulated",)),
        # Adapters of the pooler would have no gradient, for which ddp would wait.
        pytest.param("bert", LORA, ("ddp",), marks=pytest.mark.further),
        pytest.param(
            "llama", ("--embedding.attention=bidirectional",), ("tp",), marks=pytest.mark.further
        ),
        pytest.param("llama", LORA, ("tp",), marks=pytest.mark.further),
    ],
)
def test_ranks_train_like_one_process(
    tmp_path: Path, kind: str, common: tuple[str, ...], ways: tuple[str, ...]
) -> None:
    # The third global batch has one pair, so that a rank has none of it.
    both = (*BATCH, "--dataset.max_samples=25", *common)
    recipe = pair_recipes.write_embedding(tmp_path, kind, 1)
    whole = "--step_scheduler.local_batch_size=12"
    chosen = {name: Way(WAYS[name], both) for name in ways}
    check_like_one_process(recipe, training, logged, chosen, whole)


INTERRUPTED = (
    *BATCH,
    "--step_scheduler.local_batch_size=3",
    "--step_scheduler.max_steps=6",
    "--checkpoint.save_consolidated=false",
    "--step_scheduler.ckpt_every_steps=2",
    "--model.config_overrides={hidden_dropout_prob: 0.2, attention_probs_dropout_prob: 0.1}",
)


@pytest.mark.further
def test_a_killed_run_continues_exactly_with_asynchronous_saves(tmp_path: Path) -> None:
    recipe = pair_recipes.write_embedding(tmp_path, "bert", 1)
    # Accumulated, so that each step draws the numbers of its dropout twice.
    check_killed_run(recipe, training, *INTERRUPTED, "--checkpoint.is_async")


def test_old_names_of_bert_files_are_those_of_its_backbone_and_head(tmp_path: Path) -> None:
    recipe = pair_recipes.write_embedding(tmp_path, "bert")
    config = AutoConfig.from_pretrained(tmp_path / "base")
    tensors = {}
    for name, tensor in BertForMaskedLM(config).state_dict().items():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        tensors[old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor.clone()
    assert "cls.predictions.transform.LayerNorm.gamma" in tensors
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    training(recipe, "run", *BATCH, "--step_scheduler.local_batch_size=12")()
    before = tensors["bert.encoder.layer.0.output.LayerNorm.gamma"]
    assert run_ckpt(["export", str(tmp_path / "run/LATEST"), "-o", str(tmp_path / "out")]) == 0
    after = AutoModel.from_pretrained(tmp_path / "out").state_dict()
    trained = after["encoder.layer.0.output.LayerNorm.weight"]
    assert 0 < (trained - before).abs().max() < 0.1
