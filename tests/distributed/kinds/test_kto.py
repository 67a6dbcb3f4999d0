"""The recipe ``kto``: the steps of TRL, the same results whatever divides the global batch, and exact resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fixtures.preference import tiny_policy
from tests.support.runs.preference import (
    TENSOR_PARALLEL,
    check_resumes,
    step_records,
    train_layouts,
    write_recorded,
)
from tests.support.runs.training import train

RECORDED = json.loads((Path(tiny_policy.__file__).parent / "trl_kto.json").read_text())
RECIPE = """
recipe: kto
model: {from_pretrained: %(base)s}
dataset: {_target_: automodel_ckpt.data.kto.judged_completions, path: %(rows)s, seq_length: 32}
optimizer: {lr: %(learning_rate)s, weight_decay: %(weight_decay)s}
clip_grad_norm: %(max_grad_norm)s
dataloader: {shuffle: false}
step_scheduler: {global_batch_size: 4, local_batch_size: 2}
checkpoint: {checkpoint_dir: %(run)s}
"""
NAMES = ("loss", "kl", "accuracy", "reward_desirable", "reward_undesirable", "desirable")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The recipe of TRL's runs, with its model and its rows."""
    return write_recorded(tmp_path, RECIPE, RECORDED, RECORDED["rows"])


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_ten_steps_are_those_of_trl(recipe: Path, name: str) -> None:
    run = RECORDED["runs"][name]
    given = run["options"]
    options = (
        f"--kto.beta={given['beta']}",
        f"--kto.desirable_weight={given['desirable_weight']}",
        f"--kto.undesirable_weight={given['undesirable_weight']}",
    )
    train(recipe, *options)
    steps = step_records(recipe.parent / "run")
    assert len(steps) == len(run["steps"]) == 10
    for mine, theirs in zip(steps, run["steps"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert mine["kl"] == pytest.approx(theirs["kl"], abs=1e-4, rel=2e-4)
        assert mine["reward_desirable"] == pytest.approx(
            theirs["rewards/chosen"], abs=1e-4, rel=2e-4
        )
        assert mine["reward_undesirable"] == pytest.approx(
            theirs["rewards/rejected"], abs=1e-4, rel=2e-4
        )
        assert mine["samples"] == 4
    assert max(step["kl"] for step in steps) > 1


VALIDATED = (
    "--validation_dataset={_target_: automodel_ckpt.data.kto.judged_completions, path: %s, max_samples: 11}",
    "--validation_datasets.good={_target_: automodel_ckpt.data.kto.judged_completions, path: %s, max_samples: 1}",
    "--checkpoint.save_consolidated=false",
)
SHORT = ("--step_scheduler.max_steps=5", "--dataset.max_samples=17")
"""17 samples: the last global batch of the epoch has one sample."""
LORA = "--peft={r: 4, target_modules: all-linear, dropout: 0.0}"


@pytest.mark.further
def test_the_ranks_and_the_micro_batches_change_nothing(recipe: Path) -> None:
    rows = recipe.parent / "rows.jsonl"
    options = [option % rows if "%s" in option else option for option in VALIDATED]
    fsdp2 = "--distributed.strategy=fsdp2"
    layouts = {
        "one": (1, ("--step_scheduler.local_batch_size=4",)),
        "tp": (2, TENSOR_PARALLEL),
        "lora": (1, (LORA,)),
        "lora fsdp2": (2, (LORA, fsdp2, "--step_scheduler.local_batch_size=1")),
    }
    steps, validations = train_layouts(recipe, layouts, *SHORT, *options)
    for name in layouts:
        expected = "lora" if name.startswith("lora") else "one"
        for mine, theirs in zip(steps[name], steps[expected], strict=True):
            assert numbers(mine) == pytest.approx(numbers(theirs), rel=2e-3, abs=2e-4, nan_ok=True)
        assert validations[name]["samples"] == 11
        for key, value in validations[expected].items():
            if key.startswith("val_") and value is not None:
                assert validations[name][key] == pytest.approx(value, rel=2e-3, abs=2e-4)
    # The fifth step has one sample, without another completion.
    fifth = steps["one"][4]
    assert (fifth["samples"], fifth["kl"]) == (1, 0)
    assert fifth["reward_desirable"] is None and fifth["reward_undesirable"] is not None
    assert validations["one"]["val_reward_undesirable_good"] is None
    assert validations["one"]["val_kl"] > 0 and validations["one"]["val_kl_good"] == 0
    # The adapters start as their base, which stays the reference.
    assert steps["lora"][0]["loss"] == 0.5
    assert steps["lora"][3]["reward_desirable"] != steps["one"][3]["reward_desirable"]


def numbers(step: dict[str, Any]) -> list[float]:
    """The metrics of a step; NaN for those without samples, which the log has as null."""
    return [math.nan if step[name] is None else step[name] for name in NAMES]


@pytest.mark.further
def test_a_killed_run_continues_exactly_and_on_two_ranks_as_well(recipe: Path) -> None:
    options = (*SHORT, "--checkpoint.is_async=true", "--step_scheduler.ckpt_every_steps=2", LORA)
    resumed, expected = check_resumes(recipe, *options)
    last = numbers(expected[3])
    assert numbers(resumed[3]) == pytest.approx(last, rel=2e-3, abs=2e-4, nan_ok=True)


def test_a_named_reference_is_another_model(recipe: Path) -> None:
    other = AutoModelForCausalLM.from_config(tiny_policy.config())
    torch.manual_seed(1)
    other.save_pretrained(recipe.parent / "other")
    options = (f"--kto.reference={recipe.parent / 'other'}", "--step_scheduler.max_steps=1")
    train(recipe, *options)
    [step] = step_records(recipe.parent / "run")
    assert step["loss"] != pytest.approx(0.5, abs=1e-3)
