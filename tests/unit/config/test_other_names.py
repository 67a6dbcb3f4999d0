"""Hints about keys and values: the names of other trainers, keys in the wrong section, and mistakes in YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from automodel_ckpt.config.callables import allowlist
from automodel_ckpt.config.callables.prepare import prepare
from automodel_ckpt.config.callables.trust import Trust
from automodel_ckpt.config.help.plugin_help import signature
from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.config.other_names import OTHER_NAMES
from automodel_ckpt.config.overrides import parse
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import keys_of
from automodel_ckpt.errors import RecipeError
from tests.support.runs.recipes import SMALLEST


def problem(tmp_path: Path, text: str, *words: str) -> str:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(SMALLEST + text)
    line = parse(words)
    with pytest.raises(RecipeError) as failure:
        prepare(load_recipe(recipe, line.overrides, problems=line.problems), Trust())
    return str(failure.value)


def arguments_of_data_builders() -> set[str]:
    names: set[str] = set()
    for entry in allowlist.ALLOWED["dataset"]:
        names |= set(signature(getattr(entry, "name", "")) or ())
    return names


def test_every_counterpart_is_a_key_or_an_argument_of_a_data_builder() -> None:
    known = set(keys_of(RecipeConfig))
    known |= {f"dataset.{name}" for name in arguments_of_data_builders()}
    for name, counterpart in OTHER_NAMES.items():
        assert set(counterpart.keys) <= known, name
        assert counterpart.keys or counterpart.note, name


def test_no_name_is_a_top_level_key_or_section_here() -> None:
    top_level = {key for key in keys_of(RecipeConfig) if "." not in key}
    assert not top_level & OTHER_NAMES.keys()


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("learning_rate: 1e-5\n", [], "here: optimizer.lr"),
        ("optimizer: {learning_rate: 1e-5}\n", [], "here: optimizer.lr"),
        ("", ["--checkpoint.files_per_node", "1"], "remove it: each rank writes its own files"),
        ("", ["--per_device_train_batch_size", "4"], "here: step_scheduler.local_batch_size"),
        (
            "gradient_accumulation_steps: 4\n",
            [],
            "here: step_scheduler.global_batch_size (local_batch_size x ranks x accumulation steps)",
        ),
        ("output_dir: out\n", [], "here: checkpoint.checkpoint_dir"),
        ("max_seq_length: 512\n", [], "here: dataset.seq_length"),
        ("  max_seq_length: 512\n", [], "did you mean dataset.seq_length?"),
        ("bf16: true\n", [], "here: distributed.mixed_precision"),
        ("precision: bf16\n", [], "here: distributed.mixed_precision"),
        ("seq_length: 64\n", [], "here: dataset.seq_length"),
        ("optimizer: {name: adamw}\n", [], "here: optimizer (_target_: torch.optim.SGD)"),
        ("", ["--model.name", "x"], "here: model.from_pretrained"),
        ("peft: {lora_r: 8}\n", [], "here: peft.r"),
        ("use_liger_kernel: true\n", [], "computed in chunks without a key"),
        ("bf16: true\n", [], "here: distributed.mixed_precision: bfloat16"),
        ("", ["--bf16", "false"], "here: distributed.mixed_precision: none"),
        ("", ["--fp16"], "here: distributed.mixed_precision: bfloat16"),
        ("", ["--stage", "sft"], "here: recipe: llm_finetune"),
        ("", ["--stage=rm"], "here: recipe: reward_model"),
        ("rl: kto\n", [], "here: recipe: kto"),
        ("", ["--output_dir", "x"], "here: checkpoint.checkpoint_dir"),
        ("", ["--output-dir=x"], "here: checkpoint.checkpoint_dir"),
        ("", ["--learning-rate", "1e-5"], "here: optimizer.lr"),
        ("", ["--push_to_hub"], "here: hub.repo (a section: hub: {repo: ORG/NAME})"),
        ("", ["--peft.rank", "8"], "here: peft.r"),
        ("peft: {dim: 8}\n", [], "here: peft.r"),
        ("", ["--wandb_project", "x"], "here: logging.trackers ({wandb: {project: x}})"),
        ("", ["--wandb.project", "x"], "here: logging.trackers ({wandb:"),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(
    tmp_path: Path, text: str, words: list[str], hint: str
) -> None:
    assert hint in problem(tmp_path, text, *words)


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("", ["--lr", "1e-4"], "did you mean optimizer.lr?"),
        ("extend: base.yaml\n", [], "did you mean extends?"),
        ("", ["--wandb.project", "x"], "here: logging.trackers"),
        ("strategy: ddp\n", [], "did you mean distributed.strategy"),
        ("optimizer: {max_steps: 3}\n", [], "did you mean step_scheduler.max_steps?"),
        ("loss_fn: mine.focal\n", [], "name a class or function in loss_fn._target_"),
        ("optimizer: torch.optim.SGD\n", [], "name a class or function in optimizer._target_"),
        ("", ["--optimizer.betas", "0.9, 0.95"], "write a list as [A, B]"),
        ("", ["--step_scheduler.max_steps", "1.5"], "correct the value"),
        ("", ["--step_scheduler.max_steps", "inf"], "correct the value"),
        ("", ["--model.from_pretrained", ""], "model.from_pretrained must be non-empty"),
        ("", ["--checkpoint.checkpoint_dir", "./some/x/../model"], "to another directory"),
    ],
)
def test_a_hint_names_what_was_probably_meant(
    tmp_path: Path, text: str, words: list[str], hint: str
) -> None:
    assert hint in problem(tmp_path, text, *words)
