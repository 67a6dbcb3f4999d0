"""The recipe from end to end on real ranks: what it logs, validates, saves, refuses, and how it ends."""

import json
import math
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from automodel_ckpt.errors import RecipeError, Stopped
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.support import ranks
from tests.support.runs.training import (
    EXPORT,
    RECIPE,
    VALIDATION,
    installed,
    killed_after,
    steps_of,
    train,
    write_recipe,
)
from tests.support.runs.training_parts import (
    RandomInValidation,
    Signalled,
    SignalledInStep,
    SignalledInValidation,
    WithMore,
)

SIX = "--step_scheduler.max_steps=6"
"""An epoch, saved at 5 and 6."""
STREAM = ("--dataset={_target_: tests.support.runs.training_parts.Stream, length: 20}",)


def run(
    directory: Path,
    *overrides: str,
    num_ranks: int = 1,
    name: str = "run",
    text: str = RECIPE,
    recipe_class: type[LLMFinetune] | None = None,
) -> list[dict[str, str]]:
    """Train in ``directory/name``; the ranks' digests at the end."""
    arguments = (f"--checkpoint.checkpoint_dir={directory / name}", *overrides)
    training = partial(train, write_recipe(directory, text), *arguments, recipe_class=recipe_class)
    return ranks.run(training, num_ranks, init=False)


def run_each(
    directory: Path,
    runs: Mapping[str, tuple[str, ...]],
    *,
    num_ranks: int,
    text: str = RECIPE,
    recipe_class: type[LLMFinetune] | None = None,
) -> list[list[dict[str, str]]]:
    """Train with the overrides of each run, in the directory of its name, in the same processes; the ranks' digests."""
    recipe = write_recipe(directory, text)
    trainings = []
    for name, overrides in runs.items():
        place = f"--checkpoint.checkpoint_dir={directory / name}"
        trainings.append(partial(train, recipe, place, *overrides, recipe_class=recipe_class))
    return ranks.run_each(trainings, num_ranks)


def failure(directory: Path, *overrides: str, num_ranks: int = 1, **options: Any) -> BaseException:
    """The error with which every rank ends, apart from one that is behind and loses the connection to the others."""
    arguments = (f"--checkpoint.checkpoint_dir={directory / 'run'}", *overrides)
    recipe = write_recipe(directory, options.pop("text", RECIPE))
    ended = ranks.outcomes(partial(train, recipe, *arguments, **options), num_ranks, init=False)
    errors = [outcome.error for outcome in ended]
    assert all(error is not None for error in errors), ended
    found = [error for error in errors if not isinstance(error, dist.DistNetworkError)]
    assert len({str(error) for error in found}) == 1, errors
    assert found[0] is not None
    return found[0]


def saved(directory: Path) -> list[str]:
    return sorted(
        path.name for path in directory.iterdir() if path.is_dir() and not path.is_symlink()
    )


def losses(checkpoint: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((checkpoint / "losses.json").read_text())
    return content


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_logs_hold_each_step_each_save_and_each_validation(tmp_path: Path) -> None:
    run(tmp_path, text=RECIPE + VALIDATION)
    records = lines(tmp_path / "run/training.jsonl")
    steps = [record for record in records if "event" not in record]
    assert [record["step"] for record in steps] == list(range(1, 13))
    fields = {
        "step",
        "epoch",
        "timestamp",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "label_tokens",
        "tps",
        "tps_per_gpu",
        "mem",
        "seconds",
        "samples",
    }
    assert all(record.keys() == fields for record in steps)
    events = [record for record in records if "event" in record]
    assert [event["step"] for event in events] == [5, 10, 12]
    expected = {
        "event",
        "step",
        "stall_seconds",
        "total_seconds",
        "bytes",
        "bytes_per_second",
        "free_bytes",
        "pruned",
        "export_command",
    }
    assert all(event.keys() == expected for event in events)
    rates = [(record["tps"], record["tps_per_gpu"]) for record in steps]
    assert all(of_all == of_rank for of_all, of_rank in rates), "there is one rank"
    validations = lines(tmp_path / "run/validation.jsonl")
    assert [record["step"] for record in validations] == [5, 10, 12]
    measured = {"val_loss", "val_accuracy", "val_perplexity"}
    assert all(
        record.keys() == {"step", "epoch", "timestamp", *measured, "label_tokens"}
        for record in validations
    )
    assert saved(tmp_path / "run") == ["epoch_0_step_5", "epoch_1_step_10", "epoch_1_step_12"]
    for record in validations:
        content = losses(tmp_path / f"run/epoch_{record['epoch']}_step_{record['step']}")
        assert {name: content[name] for name in measured} == {n: record[n] for n in measured}
        assert content["train_loss"] == steps[record["step"] - 1]["loss"]
    text = (tmp_path / "run/log.txt").read_text()
    for record in validations:
        step, loss = record["step"], steps[record["step"] - 1]["loss"]
        # One line about the step, its validation and its save.
        line = rf" step +{step}/12  .*  loss {loss:.4f}  .*tok/s  mem \d.*  validation loss {record['val_loss']:.4f}"
        assert len(re.findall(rf"{line}.*  saved epoch_\d_step_{step}: ", text)) == 1
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in text.splitlines())
    assert "state: model" not in text


def test_validation_leaves_no_trace_in_the_training_even_if_it_draws_random_numbers(
    tmp_path: Path,
) -> None:
    run(tmp_path, SIX, name="without")
    every_step = "--step_scheduler.val_every_steps=1"
    run(
        tmp_path,
        SIX,
        every_step,
        name="with",
        text=RECIPE + VALIDATION,
        recipe_class=RandomInValidation,
    )
    assert steps_of(tmp_path / "with") == steps_of(tmp_path / "without")


def test_a_better_validation_asks_for_a_save_when_told_to(tmp_path: Path) -> None:
    overrides = ("--step_scheduler.ckpt_on_best", "--step_scheduler.ckpt_every_steps=null")
    run(tmp_path, *overrides, "--step_scheduler.val_every_steps=2", text=RECIPE + VALIDATION)
    values = {
        record["step"]: record["val_loss"] for record in lines(tmp_path / "run/validation.jsonl")
    }
    best, improving = math.inf, set()
    for step, value in values.items():
        if value < best:
            best, improving = value, improving | {step}
    assert {int(name.rpartition("_")[2]) for name in saved(tmp_path / "run")} == improving | {12}
    assert len(improving) > 1


def test_a_finished_run_says_so_and_touches_nothing_but_a_torn_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def times() -> dict[Path, int]:
        found = (tmp_path / "run").rglob("*")
        return {path: path.stat().st_mtime_ns for path in found if path.name != "training.jsonl"}

    run(tmp_path)
    before, logged = times(), (tmp_path / "run/training.jsonl").read_bytes()
    (tmp_path / "run/training.jsonl").write_bytes(logged + b'{"step": 13, "lo')
    capfd.readouterr()
    run(tmp_path)
    assert "already complete at step 12" in capfd.readouterr().err
    assert times() == before and (tmp_path / "run/training.jsonl").read_bytes() == logged


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.further), 2])
def test_a_signal_to_one_rank_saves_once_on_all_and_the_same_command_goes_on(
    tmp_path: Path, num_ranks: int
) -> None:
    whole = run(tmp_path, SIX, name="whole", num_ranks=num_ranks)
    error = failure_or_own(tmp_path, num_ranks)
    assert "after step 3" in error
    assert saved(tmp_path / "run") == ["epoch_0_step_3"]
    assert run(tmp_path, SIX, num_ranks=num_ranks) == whole
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")


def failure_or_own(directory: Path, num_ranks: int) -> str:
    """What the ranks say that were stopped; each names the signal that it got itself."""
    arguments = (f"--checkpoint.checkpoint_dir={directory / 'run'}", SIX)
    training = partial(installed, write_recipe(directory), *arguments, recipe_class=Signalled)
    ended = ranks.outcomes(training, num_ranks, init=False)
    assert all(isinstance(outcome.error, Stopped) for outcome in ended), ended
    return str(ended[-1].error)


def stopped(directory: Path, *overrides: str, recipe_class: type[LLMFinetune]) -> str:
    """The message of a run in ``directory/run`` on one rank that ends for a signal."""
    arguments = (
        write_recipe(directory, RECIPE + VALIDATION),
        f"--checkpoint.checkpoint_dir={directory / 'run'}",
    )
    (ended,) = ranks.outcomes(
        partial(installed, *arguments, *overrides, recipe_class=recipe_class), 1, init=False
    )
    assert isinstance(ended.error, Stopped), ended
    return str(ended.error)


def test_a_validation_that_a_signal_cut_off_is_made_up_for_once(tmp_path: Path) -> None:
    every = ("--step_scheduler.val_every_steps=3",)
    whole = run(tmp_path, *every, name="whole", text=RECIPE + VALIDATION)
    assert "after step 3" in stopped(tmp_path, *every, recipe_class=SignalledInValidation)
    training = partial(
        train, write_recipe(tmp_path, RECIPE + VALIDATION), *every, recipe_class=killed_after(4)
    )
    ranks.outcomes(
        partial(training, f"--checkpoint.checkpoint_dir={tmp_path / 'run'}"), 1, init=False
    )
    assert [record["step"] for record in lines(tmp_path / "run/validation.jsonl")] == [3]
    assert run(tmp_path, *every, text=RECIPE + VALIDATION) == whole
    values = [
        [
            (record["step"], record["val_loss"])
            for record in lines(tmp_path / name / "validation.jsonl")
        ]
        for name in ("whole", "run")
    ]
    assert values[0] == values[1] and len(values[0]) == 6
    best = {os.readlink(tmp_path / name / "LOWEST_VAL") for name in ("whole", "run")}
    assert len(best) == 1 and not (tmp_path / "run/late_validations.json").exists(), (
        "only the signal saved step 3"
    )


@pytest.mark.parametrize(
    "recipe_class",
    [pytest.param(SignalledInStep, marks=pytest.mark.further), SignalledInValidation],
)
def test_a_signal_before_the_last_save_leaves_validation_and_export_to_the_next_start(
    tmp_path: Path, recipe_class: type[LLMFinetune], capfd: pytest.CaptureFixture[str]
) -> None:
    last = ("--step_scheduler.max_steps=5", EXPORT)
    assert "after step 5, which is saved" in stopped(tmp_path, *last, recipe_class=recipe_class)
    assert not (tmp_path / "run/epoch_0_step_5/model/consolidated").exists()
    run(tmp_path, *last, text=RECIPE + VALIDATION)
    assert (tmp_path / "run/epoch_0_step_5/model/consolidated/config.json").is_file()
    assert [record["step"] for record in lines(tmp_path / "run/validation.jsonl")] == [5]
    assert os.readlink(tmp_path / "run/LOWEST_VAL") == "epoch_0_step_5"
    assert "already complete at step 5" in capfd.readouterr().err


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.further), 1])
def test_a_stream_that_ends_early_is_saved_once_at_its_end(
    tmp_path: Path, num_workers: int
) -> None:
    overrides = (*STREAM, "--step_scheduler.max_steps=100", "--step_scheduler.num_epochs=1")
    overrides += (EXPORT,)
    run(
        tmp_path,
        *overrides,
        f"--dataloader.num_workers={num_workers}",
        "--step_scheduler.ckpt_every_steps=null",
    )
    assert saved(tmp_path / "run") == ["epoch_0_step_3"]
    assert (tmp_path / "run/epoch_0_step_3/model/consolidated/config.json").is_file()
    assert [len(record["samples"]) for record in steps_of(tmp_path / "run")] == [8, 8, 4]


def test_max_time_ends_with_a_save_and_the_next_start_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = ("--step_scheduler.num_epochs=null", "--step_scheduler.max_steps=100000")
    overrides += ("--step_scheduler.ckpt_every_steps=null", "--lr_scheduler=null")
    for _ in range(2):
        run(tmp_path, *overrides, "--step_scheduler.max_time=0.2")
    assert capfd.readouterr().err.count("max_time (0.2 s) ended the run at step") == 2
    steps = [record["step"] for record in steps_of(tmp_path / "run")]
    names = [int(name.rpartition("_")[2]) for name in saved(tmp_path / "run")]
    assert len(names) == 2
    assert max(names) == steps[-1]
    assert steps == list(range(1, len(steps) + 1))


def test_a_global_batch_without_labels_changes_nothing_and_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = "--dataset={_target_: tests.support.runs.training_parts.SomeWithoutLabels}"
    overrides = (data, "--dataloader.shuffle=false", "--step_scheduler.num_epochs=1")
    run(tmp_path, *overrides, "--step_scheduler.ckpt_every_steps=1", num_ranks=2)
    first, second = lines_of_steps(tmp_path / "run/training.jsonl")
    assert (first["loss"], first["grad_norm"], first["label_tokens"]) == (None, 0.0, 0)
    assert second["loss"] > 0
    assert "step 1: no label in the whole global batch" in capfd.readouterr().err


def lines_of_steps(path: Path) -> list[dict[str, Any]]:
    return [record for record in lines(path) if "event" not in record]


def test_a_recipe_with_more_state_saves_and_restores_it(tmp_path: Path) -> None:
    eight = ("--lr_scheduler.decay_steps=8", "--step_scheduler.max_steps=8")
    options: dict[str, Any] = {"recipe_class": WithMore}
    whole = run(tmp_path, *eight, name="whole", **options)
    run(tmp_path, *eight, SIX, **options)
    again = run(tmp_path, *eight, **options)
    assert again == whole
    checkpoint = tmp_path / "run/epoch_1_step_8"
    assert (checkpoint / "latest_eval.pt").is_file()
    assert (checkpoint / "value_head").is_dir()


@pytest.mark.further
def test_selected_activations_of_shards_are_recomputed_and_a_killed_run_continues(
    tmp_path: Path,
) -> None:
    sharded = (SIX, "--distributed.strategy=fsdp2", "--distributed.mixed_precision=bfloat16")
    selective = "--model.activation_checkpointing=selective"
    run(tmp_path, *sharded, name="kept", num_ranks=2)
    run(tmp_path, *sharded, selective, "--step_scheduler.max_steps=3", name="run", num_ranks=2)
    run(tmp_path, *sharded, selective, name="run", num_ranks=2)
    kept, selected = steps_of(tmp_path / "kept"), steps_of(tmp_path / "run")
    assert [record["loss"] for record in kept] == [record["loss"] for record in selected]


WRONG = {
    "--model.from_config.hidden_sise=8": "did you mean hidden_size",
    "--model.from_config.model_type=lama": "did you mean llama",
    "--model.from_config.hidden_size=30": "transformers rejects",
    "--model.from_config.vocab_size=299": "300 tokens; the model's vocab_size is 299",
    "--model.from_config.max_position_embeddings=15": "longer than the model's context",
    "--model.freeze=['*embed_tokns*']": "no parameter's name matches",
    "--model.freeze=['*']": "no parameter is left to train",
    "--loss_fn={_target_: torch.nn.CrossEntropyLoss, reduction: mean}": "has to be the sum",
    "--lr_scheduler={name: constant, warmup_steps: 3}": "does not use warmup_steps",
    "--lr_scheduler.kwargs={cycles: 3}": "cannot be computed",
    "--distributed.backend=smoke-signals": "unknown torch.distributed backend",
}


def test_what_is_wrong_with_the_recipe_is_refused_before_training(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    place = f"--checkpoint.checkpoint_dir={tmp_path / 'run'}"

    def errors() -> dict[str, str]:
        found = {}
        for override in WRONG:
            with pytest.raises(RecipeError) as caught:
                train(recipe, place, override)
            found[override] = str(caught.value)
        return found

    (found,) = ranks.run(errors, 1, init=False)
    for override, what in WRONG.items():
        assert what in found[override]
    assert not os.path.exists(tmp_path / "run")
