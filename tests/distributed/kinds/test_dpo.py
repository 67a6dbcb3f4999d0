"""DPO and ORPO: losses as TRL's, also after a kill; the reference is always the start."""

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config

from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import RecipeError
from tests.support import ranks
from tests.support.runs.preference import recorded, step_records, write_run
from tests.support.runs.training import steps_of, train

MEASURES = ("accuracy", "margin", "reward_chosen", "reward_rejected")
LORA = "--peft={r: 2, alpha: 8, target_modules: [q_proj, v_proj]}"
LIKE_TRL = "tests.support.runs.compared_recipes.LoraLikeTrl"


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("sigmoid", ["--dpo.beta=0.3"]),
        ("ipo", ["--dpo={beta: 0.4, loss: ipo}"]),
        ("hinge", ["--dpo={beta: 0.5, loss: hinge}"]),
        ("robust", ["--dpo={beta: 0.3, loss: robust, label_smoothing: 0.2}"]),
        ("smoothed", ["--dpo={beta: 0.3, label_smoothing: 0.2}"]),
        ("lora", ["--dpo.beta=0.6", LORA, f"--recipe={LIKE_TRL}"]),
        ("orpo", ["--orpo.beta=0.25"]),
    ],
)
def test_losses_and_rewards_are_those_of_trl(tmp_path: Path, case: str, options: list[str]) -> None:
    train(write_run(tmp_path, "orpo" if case == "orpo" else "dpo"), *options)
    expected = recorded()["runs"][case]
    steps = step_records(tmp_path / "run")
    losses = [step["loss"] for step in steps]
    assert losses == pytest.approx(expected["losses"], abs=1e-5, rel=1e-5)
    assert max(losses) - min(losses) > 0.05
    for step, logged in zip(steps, expected["measures"], strict=True):
        assert step["pairs"] == 4
        for name in MEASURES:
            assert step[name] == pytest.approx(logged[name], abs=2e-4, rel=2e-4), name


JUDGED = "automodel_ckpt.data.kto.judged_completions"
HALF_LORA = "--peft={r: 2, target_modules: all-linear, init: orthogonal, dropout: 0.5}"


def write_gpt2(directory: Path, rate: float) -> None:
    """Write a base whose layers are modules of torch, and whose attention calls a function."""
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), rate)
    size = {"vocab_size": 43, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(GPT2Config(**size, **rates, pad_token_id=0))
    model.save_pretrained(directory)


@pytest.mark.parametrize(
    ("recipe", "base", "options"),
    [
        ("dpo", "llama", (HALF_LORA,)),
        ("dpo", "gpt2", ("--dpo.precompute=true",)),
        pytest.param("orpo", "gpt2", (), marks=pytest.mark.further),
        pytest.param("kto", "gpt2", (), marks=pytest.mark.further),
    ],
)
def test_preferences_are_learned_without_dropout_unless_the_recipe_wants_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recipe: str, base: str, options: Any
) -> None:
    path = write_run(tmp_path, recipe)
    if recipe == "kto":
        rows = [{"prompt": f"w{n}", "completion": f"w{n + 1}", "label": n % 2} for n in range(8)]
        (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        options = (f"--dataset._target_={JUDGED}", "--step_scheduler.num_epochs=1")

    def trained(name: str, rate: float, *more: str) -> list[float]:
        rates: tuple[str, ...] = ()
        if base == "gpt2":
            write_gpt2(tmp_path / "model", rate)
        else:
            rates = (f"--model.config_overrides.attention_dropout={rate}", f"--peft.dropout={rate}")
        words = (f"--checkpoint.checkpoint_dir={tmp_path / name}", "--step_scheduler.max_steps=2")
        no_files = "--checkpoint.save_consolidated=false"
        assert main([str(path), *options, *rates, *words, no_files, *more]) == 0
        return losses_of(tmp_path / name)

    without = trained("without", 0.0)
    assert "dropout" not in capfd.readouterr().err
    assert trained("off", 0.5) == without
    assert capfd.readouterr().err.count("dropout is off") == 1
    assert trained("kept", 0.5, "--dropout=true") != without
    if recipe == "dpo":
        assert without[0] == pytest.approx(math.log(2), abs=1e-6)
    written = "".join(file.read_text() for file in (tmp_path / "off").rglob("*config.json"))
    assert re.search(r"drop(out)?\": 0.5", written)


def arguments_of(directory: Path, name: str, *options: str) -> tuple[str, ...]:
    return (f"--checkpoint.checkpoint_dir={directory / name}", "--dpo.beta=0.3", *options)


def losses_of(directory: Path) -> list[float]:
    return [step["loss"] for step in step_records(directory)]


EXACT: dict[str, tuple[int, tuple[str, ...]]] = {
    "full": (1, ("--checkpoint.is_async=true",)),
    "adapters on two ranks": (2, (LORA, "--step_scheduler.local_batch_size=2")),
    "precomputed": (1, ("--dpo.precompute=true",)),
}


@pytest.mark.parametrize(
    "case", ["full", *(pytest.param(case, marks=pytest.mark.further) for case in [*EXACT][1:])]
)
def test_a_killed_run_continues_bit_for_bit(tmp_path: Path, case: str) -> None:
    num_ranks, options = EXACT[case]
    recipe = write_run(tmp_path, "dpo")
    options = (*options, "--step_scheduler.max_steps=7")

    def trained(name: str, dies_after: int = 0) -> dict[str, str]:
        return train(recipe, *arguments_of(tmp_path, name, *options), dies_after=dies_after)

    ended = ranks.outcomes(trained, num_ranks, "interrupted", 6, init=False)
    assert -9 in [outcome.exitcode for outcome in ended]
    both = [partial(trained, name) for name in ("interrupted", "whole")]
    resumed, whole = ranks.run_each(both, num_ranks)
    assert resumed == whole
    assert steps_of(tmp_path / "interrupted") == steps_of(tmp_path / "whole")
    # With the resumed policy as the reference, step 5 would have the loss of two equal models.
    assert abs(losses_of(tmp_path / "whole")[4] - math.log(2)) > 0.01


def first_step(directory: Path, *options: str, recipe: str = "dpo") -> dict[str, Any]:
    """The record of the first step of a run."""
    written = write_run(directory, recipe)
    words = ("--step_scheduler.max_steps=1", "--checkpoint.save_consolidated=false", *options)
    train(written, *words)
    [record] = step_records(directory / "run")
    return record


def test_orpo_learns_the_prompt_unless_learn_prompt_is_false(tmp_path: Path) -> None:
    for name in ("whole", "answer"):
        (tmp_path / name).mkdir()
    whole = first_step(tmp_path / "whole", recipe="orpo")
    answer = first_step(tmp_path / "answer", "--orpo.learn_prompt=false", recipe="orpo")
    # The reward is beta times the mean log-probability of the tokens of the answer.
    assert answer["sft_loss"] == pytest.approx(-answer["reward_chosen"] / 0.1, rel=1e-5)
    assert whole["sft_loss"] != pytest.approx(answer["sft_loss"], rel=1e-3)
    assert whole["reward_chosen"] == answer["reward_chosen"]


def test_a_named_reference_is_another_model(tmp_path: Path) -> None:
    write_run(tmp_path, "dpo")
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    model.save_pretrained(other)
    record = first_step(tmp_path, f"--dpo.reference={other}")
    assert record["loss"] != pytest.approx(math.log(2), abs=1e-2)
    for wrong, what in (("missing", "no such directory"), ("other", "this model is an encoder")):
        if wrong == "other":
            BertConfig().save_pretrained(other)
        with pytest.raises(RecipeError, match=what) as raised:
            first_step(tmp_path, f"--dpo.reference={tmp_path / wrong}")
        assert raised.value.problems[0].where == "dpo.reference"


def test_a_reference_without_finite_scores_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path, "dpo")
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.lm_head.weight[5] = torch.inf
    model.save_pretrained(other)
    with pytest.raises(RecipeError, match="log-probability of the reference is not finite"):
        first_step(tmp_path, f"--dpo.reference={other}", "--dpo.precompute=true")


def test_validations_measure_accuracies_and_rewards_of_each_set(tmp_path: Path) -> None:
    recipe = write_run(tmp_path, "dpo")
    pairs = f"_target_: automodel_ckpt.data.preference.pairs, path: {tmp_path / 'pairs.jsonl'}"
    options = (
        f"--validation_dataset={{{pairs}}}",
        f"--validation_datasets={{few: {{{pairs}, max_samples: 7}}}}",
        "--step_scheduler.val_every_steps=10",
        "--dpo.precompute=true",
        "--checkpoint.best_metric_key=val_accuracy",
        "--checkpoint.best_mode=max",
    )
    train(recipe, *options)
    lines = (tmp_path / "run" / "validation.jsonl").read_text().splitlines()
    record = json.loads(lines[-1])
    for measure in ("loss", *MEASURES):
        assert math.isfinite(record[f"val_{measure}"])
        assert math.isfinite(record[f"val_{measure}_few"])
    assert record["val_accuracy"] > 0.6
    assert record["val_margin"] == pytest.approx(
        record["val_reward_chosen"] - record["val_reward_rejected"], rel=1e-6
    )
    assert record["pairs"] == 40


def test_precomputed_scores_give_the_losses_of_a_reference_in_memory(tmp_path: Path) -> None:
    recipe = write_run(tmp_path, "dpo")

    def losses(name: str, *options: str) -> list[float]:
        words = arguments_of(tmp_path, name, "--step_scheduler.max_steps=3", *options)
        train(recipe, "--checkpoint.save_consolidated=false", *words)
        return losses_of(tmp_path / name)

    precomputed = losses("precomputed", "--dpo.precompute=true")
    assert precomputed == pytest.approx(losses("live"), rel=1e-6)
