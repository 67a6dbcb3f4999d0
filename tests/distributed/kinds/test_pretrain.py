"""The recipe pretrain: killed and resumed exactly, on two ranks, with streams, token files, z-loss and widths."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.errors import RecipeError
from tests.distributed.kinds.test_training import run_each
from tests.support import ranks
from tests.support.models.tiny_model import tiny_llama
from tests.support.runs.training import build, steps_of, train, write_recipe

DOCUMENTS = "{_target_: automodel_ckpt.examples.data.python_docs.documents"
MODEL = tiny_llama(max_position_embeddings=64, initializer_range=0.02, tie_word_embeddings=False)
TEXT = f"""
recipe: pretrain
seed: 7
{MODEL}tokenizer: {{_target_: automodel_ckpt.examples.data.python_docs.train_tokenizer, vocab_size: 300}}
dataset:
  _target_: automodel_ckpt.data.mixture.mixture
  weights: {{tokens: 0.4, stream: 0.6}}
  sources:
    tokens: {DOCUMENTS}, form: token_file, split: validation}}
    stream: {DOCUMENTS}, form: stream, split: validation, collection: docstrings, shuffle_block: 16}}
validation_dataset: {DOCUMENTS}, split: validation, collection: docstrings, seq_length: 9, truncation: right}}
packed_sequence: {{size: 32}}
pretrain: {{split_documents: true, z_loss: 1.0e-2, base_width: 16}}
optimizer: {{lr: 1e-2}}
lr_scheduler: {{name: cosine, warmup_steps: 2}}
step_scheduler:
  global_batch_size: 8
  local_batch_size: 2
  max_steps: 9
  ckpt_every_steps: 3
  ckpt_every_epochs: null
checkpoint: {{is_async: true}}
"""
NO_VALIDATION = "--validation_dataset=null"


def run(recipe: Path, name: str, *overrides: str, num_ranks: int = 1, kill: int = 0) -> Any:
    """The digests of the state at the end of a run of *recipe* in the directory *name* beside it."""
    directory = f"--checkpoint.checkpoint_dir={recipe.parent / name}"
    training = partial(train, recipe, directory, *overrides, dies_after=kill)
    outcome = ranks.outcomes(training, num_ranks, init=False)[0]
    assert kill or outcome.ok, outcome.traceback
    return outcome.value


def values_of(directory: Path) -> list[list[float]]:
    """The loss, the z-loss, the gradient norm and the label tokens of each step."""
    names = ("loss", "z_loss", "grad_norm", "label_tokens", "tokens")
    records = map(json.loads, (directory / "training.jsonl").read_text().splitlines())
    return [[record[name] for name in names] for record in records if "loss" in record]


@pytest.mark.further
def test_a_killed_run_continues_exactly_and_ranks_do_not_matter(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, TEXT)
    whole = run(recipe, "whole", NO_VALIDATION)
    run(recipe, "killed", NO_VALIDATION, "--dataloader.num_workers=2", kill=5)
    assert run(recipe, "killed", NO_VALIDATION) == whole is not None
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")
    # FSDP2 on two ranks, resumed on one.
    run(recipe, "two", NO_VALIDATION, num_ranks=2, kill=8)
    run(recipe, "two", NO_VALIDATION)
    expected = values_of(tmp_path / "whole")
    assert len(expected) == 9
    for found, own in zip(values_of(tmp_path / "two"), expected, strict=True):
        assert found == pytest.approx(own, rel=1e-5)


def test_the_z_loss_is_a_metric_and_part_of_the_gradient(tmp_path: Path) -> None:
    steps = ("--step_scheduler.max_steps=2", "--step_scheduler.ckpt_every_steps=null")
    runs = {
        "with": steps,
        "without": (*steps, NO_VALIDATION, "--pretrain.z_loss=null"),
        # The loss head with a custom loss: complete logits.
        "full": (*steps, NO_VALIDATION, "--loss_fn._target_=torch.nn.CrossEntropyLoss"),
    }
    run_each(tmp_path, runs, num_ranks=1, text=TEXT)
    first, full = (values_of(tmp_path / name)[0] for name in ("with", "full"))
    records = [
        json.loads(line) for line in (tmp_path / "without/training.jsonl").read_text().splitlines()
    ]
    plain = next(record for record in records if "loss" in record)
    assert "z_loss" not in plain
    assert first == pytest.approx(full, rel=1e-5)
    assert first[0] == pytest.approx(plain["loss"], rel=1e-6)
    assert first[2] != pytest.approx(plain["grad_norm"], rel=1e-4)
    # Nearly equal logits: the logsumexp is the loss.
    assert first[1] == pytest.approx(1e-2 * first[0] ** 2, rel=1e-2)
    [validation] = (tmp_path / "with/validation.jsonl").read_text().splitlines()
    assert json.loads(validation)["val_loss"] < 6


def test_rates_and_initial_values_by_width(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, TEXT)

    def built(*overrides: str) -> Any:
        made = build(recipe, "--checkpoint.enabled=false", *overrides)
        try:
            made.setup()
        finally:
            made.close()
        return made

    scaled, plain = built(), built("--pretrain.base_width=null")
    weights = dict(plain.model.named_parameters())
    rates = {}
    for group in scaled.optimizer.param_groups:
        for parameter in group["params"]:
            rates[id(parameter)] = (group["initial_lr"], group["weight_decay"])
    for name, parameter in scaled.model.named_parameters():
        factor, expected = 1.0, (1e-2, 0.0 if "norm" in name else 0.01)
        if "proj" in name:
            factor, expected = 0.5**0.5, (5e-3, 0.02)
        if "lm_head" in name:
            factor, expected = 0.5, (5e-3, 0.02)
        assert rates[id(parameter)] == pytest.approx(expected)
        torch.testing.assert_close(parameter.detach(), weights[name].detach() * factor)
    groups = "--optimizer={_target_: torch.optim.AdamW, lr: 1e-2, groups: [{params: ['*q_proj*'], lr: 1e-3}]}"
    by_target = built(groups)
    found = {group["initial_lr"] for group in by_target.optimizer.param_groups}
    assert found == {1e-2, 5e-3, 5e-4}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--step_scheduler.max_steps=null"], "no end.*\n.*step_scheduler.max_steps"),
        (["--dataset.num_samples=8"], "no end.*\n.*dataset.num_samples"),
        (
            ["--validation_dataset.form=stream"],
            r"no end[\s\S]*validation_dataset[\s\S]*streaming",
        ),
        (
            ["--pretrain.split_documents=false"],
            r"a sample is longer than a pack[\s\S]*hint:\s+set pretrain.split_documents true, or packed",
        ),
        (["--model.from_config.tie_word_embeddings=true"], "tied to the embedding"),
        (["--optimizer={_target_: torch.optim.SGD, lr: 1e-2}"], r"for AdamW[\s\S]*torch.optim.SGD"),
    ],
)
def test_what_a_recipe_cannot_have_is_an_error(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    recipe = build(write_recipe(tmp_path, TEXT), "--checkpoint.enabled=false", *overrides)
    try:
        with pytest.raises(RecipeError, match=message):
            recipe.setup()
    finally:
        recipe.close()
