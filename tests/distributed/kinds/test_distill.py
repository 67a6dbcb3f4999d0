"""Knowledge distillation: losses equal to the published formulas, on several ranks, with caches, and after a kill."""

import json
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from automodel_ckpt.errors import AutomodelError, RecipeError
from tests.fixtures.distill.make_reference_losses import (
    BATCH,
    CASES,
    LR,
    NUM_STEPS,
    VOCABULARY,
    Samples,
    student,
    teacher,
    tiny_llama,
)
from tests.support import ranks
from tests.support.models.small_tokenizer import small_tokenizer
from tests.support.runs.training import build, steps_of
from tests.support.runs.training import train as run

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures/distill/losses.json").read_text())
HERE = "tests.distributed.kinds.test_distill"


def samples(tokenizer: Any = None) -> Samples:
    """The samples of the recorded runs, as a data set of a recipe."""
    return Samples()


def other_samples(tokenizer: Any = None) -> list[dict[str, list[int]]]:
    """Six samples, for mixtures and validations."""
    return [Samples()[index] for index in range(3, 9)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the student and the teacher of the recorded runs."""
    directory = tmp_path_factory.mktemp("models")
    student().save_pretrained(directory / "student")
    teacher().save_pretrained(directory / "teacher")
    return directory


def write(
    directory: Path, models: Path, case: str = "forward", more: str = "", **distill: Any
) -> Path:
    """Write the recipe of a recorded case."""
    directory.mkdir(parents=True, exist_ok=True)
    section = {"teacher": {"from_pretrained": str(models / "teacher")}, **CASES[case], **distill}
    text = f"""
recipe: distill
model: {{from_pretrained: {models / "student"}}}
tokenizer: null
distill: {json.dumps(section)}
dataset: {{_target_: {HERE}.samples}}
dataloader: {{shuffle: false}}
optimizer: {{lr: {LR}, weight_decay: 0.0}}
clip_grad_norm: null
step_scheduler: {{global_batch_size: {BATCH}, local_batch_size: 2, max_steps: {NUM_STEPS}}}
checkpoint: {{checkpoint_dir: {directory / "run"}}}
{more}"""
    path = directory / "recipe.yaml"
    path.write_text(text)
    return path


def logged(
    path: Path, names: tuple[str, ...] = ("loss", "ce_loss", "kd_loss")
) -> list[dict[str, float]]:
    lines = (path.parent / "run/training.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [{name: record[name] for name in names} for record in records if "event" not in record]


def assert_as_recorded(
    path: Path, case: str, tolerance: float = 1e-5, num_steps: int = NUM_STEPS
) -> None:
    found = logged(path)
    assert len(found) == num_steps
    for record, expected in zip(found, RECORDED[case], strict=False):
        assert record == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_have_the_losses_of_the_published_formulas(
    case: str, models: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, models, case)
    run(path)
    assert_as_recorded(path, case)


def test_all_tokens_of_a_cache_give_the_same_losses_and_later_starts_need_no_teacher(
    models: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, models, "mixed", top_k=VOCABULARY, cache_dir=str(tmp_path / "logits"))
    run(path)
    assert_as_recorded(path, "mixed", 1e-4)
    (cache,) = (tmp_path / "logits").iterdir()
    first = logged(path)

    def is_teacher_loaded(*overrides: str) -> bool:
        shutil.rmtree(tmp_path / "run")
        run(path, *overrides)
        return "the teacher is not loaded" not in (tmp_path / "run/log.txt").read_text()

    assert not is_teacher_loaded()
    assert logged(path) == first
    # Another temperature is another cache, and so is a damaged one.
    assert is_teacher_loaded("--distill.temperature=3")
    content = bytearray((cache / "00000/rest").read_bytes())
    content[-1] ^= 1
    (cache / "00000/rest").write_bytes(content)
    assert is_teacher_loaded()


class Unreadable(Samples):
    """Samples of which the last one cannot be read."""

    # Otherwise, rank 0 would read them all for a digest.
    identity = "unreadable"

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index == len(self) - 1:
            raise KeyError("text")
        return super().__getitem__(index)


def unreadable(tokenizer: Any = None) -> Unreadable:
    return Unreadable()


def test_a_sample_that_one_rank_cannot_read_ends_all_ranks_before_training(
    models: Path, tmp_path: Path
) -> None:
    more = f"\ndistributed: {{strategy: fsdp2}}\ndataset: {{_target_: {HERE}.unreadable}}"
    path = write_mixed(tmp_path, models, more, top_k=4, cache_dir=str(tmp_path / "logits"))
    ended = ranks.outcomes(run, 2, path, init=False, timeout=60)
    for outcome in ended:
        assert isinstance(outcome.error, AutomodelError)
        assert str(outcome.error).startswith("rank 1: dataset[39] could not be read")
        assert "KeyError: 'text'" in str(outcome.error)
    assert not list((tmp_path / "logits").iterdir())


SOURCES = f"""
dataset:
  _target_: automodel_ckpt.data.mixture.mixture
  sources: {{most: {{_target_: {HERE}.samples}}, few: {{_target_: {HERE}.other_samples}}}}
packed_sequence: {{size: 40}}
dataloader: {{shuffle: true}}
validation_dataset: {{_target_: {HERE}.other_samples}}
validation_datasets: {{more: {{_target_: {HERE}.samples}}, same: {{_target_: {HERE}.other_samples}}}}
step_scheduler: {{global_batch_size: 4, local_batch_size: 2, num_epochs: 2, max_steps: 8, ckpt_every_steps: 3}}
"""
LORA = "peft: {method: lora, r: 4, target_modules: [q_proj, v_proj]}"


def write_mixed(directory: Path, models: Path, more: str, **distill: Any) -> Path:
    """Write a recipe of the keys in *more*, which replace those of the recorded cases."""
    path = write(directory, models, "mixed", **distill)
    replaced = [line.partition(":")[0] for line in more.splitlines() if line[:1].isalpha()]
    kept = [
        line for line in path.read_text().splitlines() if line.partition(":")[0] not in replaced
    ]
    path.write_text("\n".join(kept) + more)
    return path


@pytest.mark.further
def test_a_killed_run_continues_exactly(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMODEL_CKPT_CACHE", str(tmp_path / "cache"))
    more = f"{SOURCES}\ndistributed: {{strategy: fsdp2}}"
    whole = write_mixed(tmp_path / "whole", models, more, top_k=8)
    killed = write_mixed(tmp_path / "killed", models, more, top_k=8)
    asynchronous = "--checkpoint.is_async=true"
    dying = partial(run, killed, asynchronous, dies_after=5)
    ended = ranks.outcomes(dying, 2, init=False)
    assert -9 in [outcome.exitcode for outcome in ended]
    both = [partial(run, killed, asynchronous), partial(run, whole)]
    resumed, expected = ranks.run_each(both, 2)
    assert resumed == expected
    assert steps_of(killed.parent / "run") == steps_of(whole.parent / "run")
    saved = {path.name for path in (killed.parent / "run/LATEST").iterdir()}
    assert "model" in saved and not any("teacher" in name for name in saved)


def test_a_resume_on_other_ranks_and_with_another_teacher_continues_and_says_so(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, models, "forward")
    ranks.run(run, 2, path, "--step_scheduler.max_steps=4", init=False)
    other = tmp_path / "other"
    shutil.copytree(models / "teacher", other)
    with caplog.at_level(logging.WARNING):
        run(path)
    assert_as_recorded(path, "forward")
    assert "the teacher is not that" not in caplog.text
    tiny_llama(32, seed=4).save_pretrained(other)
    run(path, "--step_scheduler.max_steps=11", f"--distill.teacher.from_pretrained={other}")
    assert "the teacher is not the same as for epoch_0_step_10" in caplog.text


def test_an_offloaded_teacher_has_the_same_losses(models: Path, tmp_path: Path) -> None:
    path = write(tmp_path, models, "forward", offload_teacher=True)
    run(path, "--step_scheduler.max_steps=2")
    assert_as_recorded(path, "forward", num_steps=2)


def rejected(path: Path, *overrides: str) -> tuple[str, str]:
    """Where and what the setup of a recipe rejects."""
    recipe = build(path, *overrides)
    try:
        with pytest.raises(RecipeError) as raised:
            recipe.setup()
    finally:
        recipe.close()
    (problem,) = raised.value.problems
    assert problem.hint and str(problem.value)
    return problem.where, problem.what


def test_other_vocabularies_are_errors_before_weights_are_read_unless_they_are_padded(
    models: Path, tmp_path: Path
) -> None:
    name = "distill.teacher.from_pretrained"
    path = write(tmp_path, models, "forward")
    larger = tmp_path / "larger"
    tiny_llama(16, seed=3, vocabulary=320).save_pretrained(larger)
    flag = f"--{name}={larger}"
    # Without weights: nothing may try to read them.
    weights = larger / "model.safetensors"
    weights.rename(tmp_path / "weights")
    other_size = "the teacher has another vocabulary than the student"
    assert rejected(path, flag) == (name, other_size)
    assert rejected(path, f"--{name}={tmp_path / 'nowhere'}") == (name, "no such directory")
    tokenizer = small_tokenizer(300)
    tiny_llama(16, seed=3, vocabulary=300).save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    with_tokenizer = (
        flag,
        f"--model.from_pretrained={tmp_path / 'small'}",
        f"--tokenizer.from_pretrained={tmp_path / 'small'}",
    )
    assert rejected(path, *with_tokenizer) == (name, other_size)
    renamed = PreTrainedTokenizerFast.from_pretrained(tmp_path / "small")
    renamed.add_tokens(["another"])
    renamed.save_pretrained(larger)
    other_tokens = "the teacher has another tokenizer than the student"
    assert rejected(path, *with_tokenizer) == (name, other_tokens)
    tokenizer.save_pretrained(larger)
    (tmp_path / "weights").rename(weights)
    run(path, *with_tokenizer, "--step_scheduler.max_steps=1")
    assert logged(path)[0]["kd_loss"] > 0
