"""Samples that share rows, and packs, on real ranks: the losses of padded ones, on any number of ranks, and exact."""

import re
from pathlib import Path

import pytest

from automodel_ckpt.errors import RecipeError
from tests.distributed.kinds.test_training import failure, lines, lines_of_steps, run, run_each
from tests.support.runs.training import RECIPE, steps_of

FILE = Path(__file__).parents[2] / "fixtures" / "pairs.jsonl"
PAIRS = f"{{_target_: automodel_ckpt.data.text.prompt_completion, path: {FILE}, seq_length: 64}}"
"""40 samples of very different lengths."""

TEXT = RECIPE.replace("max_position_embeddings: 32", "max_position_embeddings: 64")
DATA = (
    f"--dataset={PAIRS}",
    f"--validation_dataset={PAIRS}",
    "--model.from_config.attention_dropout=0",
)
PACKED = (*DATA, "--packed_sequence.size=96", "--step_scheduler.local_batch_size=1")


def losses_of(directory: Path) -> list[float]:
    return [record["loss"] for record in lines_of_steps(directory / "training.jsonl")]


@pytest.mark.parametrize(
    ("attention", "logged"),
    [
        ("null", "attention is limited to each sample (sdpa)"),
        pytest.param(
            "sdpa", "sdpa attention separates them by their position ids", marks=pytest.mark.further
        ),
    ],
)
def test_sharing_rows_gives_the_training_of_padded_samples(
    tmp_path: Path, attention: str, logged: str
) -> None:
    overrides = (
        *DATA,
        f"--model.attn_implementation={attention}",
        "--step_scheduler.local_batch_size=4",
    )
    run(tmp_path, *overrides, name="shared", text=TEXT)
    log = (tmp_path / "shared/log.txt").read_text()
    assert f"packing samples without padding; {logged}" in log
    run(tmp_path, *overrides, "--dataloader.padding_free=false", name="padded", text=TEXT)
    shared, padded = (
        lines_of_steps(tmp_path / name / "training.jsonl") for name in ("shared", "padded")
    )
    assert [r["loss"] for r in shared] == pytest.approx([r["loss"] for r in padded], rel=1e-4)
    assert [r["label_tokens"] for r in shared] == [r["label_tokens"] for r in padded]
    assert [r["tokens"] for r in shared] == [r["tokens"] for r in padded]
    ours, theirs = (
        lines(tmp_path / name / "validation.jsonl")[-1] for name in ("shared", "padded")
    )
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4)
    assert 0 < ours["val_accuracy"] == theirs["val_accuracy"]


def test_one_and_two_ranks_train_on_the_same_packs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, *PACKED, name="one", text=TEXT)
    assert re.search(
        r"packed 40 samples into \d+ packs of 96 tokens, \d+\.\d\d% of them empty",
        capfd.readouterr().err,
    )
    run(tmp_path, *PACKED, name="two", num_ranks=2, text=TEXT)
    one, two = (lines_of_steps(tmp_path / name / "training.jsonl") for name in ("one", "two"))
    assert [r["samples"] for r in one] == [r["samples"] for r in two]
    assert len({tuple(sorted(r["samples"])) for r in one}) > 1
    assert losses_of(tmp_path / "one") == pytest.approx(losses_of(tmp_path / "two"), rel=1e-4)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.further), 2])
def test_a_packed_run_goes_on_exactly(tmp_path: Path, num_ranks: int) -> None:
    overrides = (
        *PACKED,
        "--lr_scheduler.decay_steps=8",
        "--model.from_config.attention_dropout=0.2",
    )
    four = (*overrides, "--step_scheduler.max_steps=4")
    runs = {"whole": four, "run": (*overrides, "--step_scheduler.max_steps=2")}
    whole, _ = run_each(tmp_path, runs, num_ranks=num_ranks, text=TEXT)
    again = run(tmp_path, *four, num_ranks=num_ranks, text=TEXT)
    assert again == whole
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")


def test_a_model_that_lets_samples_see_each_other_refuses_packs_and_pads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start, end = TEXT.index("  from_config"), TEXT.index("tokenizer:")
    bloom = "  from_config: {model_type: bloom, hidden_size: 32, n_layer: 2, n_head: 4}\n"
    text = TEXT.replace(TEXT[start:end], bloom)
    error = failure(tmp_path, f"--dataset={PAIRS}", "--packed_sequence.size=96", text=text)
    assert isinstance(error, RecipeError)
    assert "BloomForCausalLM, eager attention" in str(error)
    run(tmp_path, f"--dataset={PAIRS}", "--step_scheduler.max_steps=1", text=text)
    assert "samples are padded to the longest" in capfd.readouterr().err


def test_packs_smaller_than_a_sample_are_refused(tmp_path: Path) -> None:
    error = failure(tmp_path, *DATA, "--packed_sequence.size=32", text=TEXT)
    assert isinstance(error, RecipeError)
    assert "a sample is longer than a pack" in str(error)
