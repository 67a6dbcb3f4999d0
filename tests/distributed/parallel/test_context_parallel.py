"""Rows cut along the sequence train as whole ones do, wherever samples begin and however heads are shared."""

from pathlib import Path

import pytest

from tests.distributed.kinds.test_training import failure, lines, lines_of_steps, run, run_each
from tests.support.runs.training import RECIPE, VALIDATION

GRIDS = {
    "hsdp": "{strategy: fsdp2, cp_size: 2, dp_replicate_size: 2}",
    "ddp, keys repeated": "{strategy: ddp, cp_size: 4}",
    "tp": "{cp_size: 2, tp_size: 2}",
    "pp": "{cp_size: 2, pp_size: 2}",
}
FLAT = (
    "--model.from_config.attention_dropout=0",
    "--step_scheduler.max_steps=4",
    "--checkpoint.save_consolidated=false",
    "--lr_scheduler.decay_steps=4",
    "--step_scheduler.ckpt_every_steps=2",
    "--packed_sequence.size=32",
    "--step_scheduler.global_batch_size=4",
    "--step_scheduler.local_batch_size=2",
)
CUT = ("--distributed.cp_size=2", "--model.activation_checkpointing=true")


def test_a_run_with_divided_rows_logs_what_one_rank_does_and_goes_on_exactly_and_on_one_rank(
    tmp_path: Path,
) -> None:
    text = RECIPE + VALIDATION
    saved = f"--checkpoint.restore_from={tmp_path / 'cut/epoch_0_step_2'}"
    runs = {"cut": (*FLAT, *CUT), "resumed": (*FLAT, *CUT, saved)}
    whole, resumed = run_each(tmp_path, runs, num_ranks=2, text=text)
    assert resumed == whole
    assert whole[0]["rng"] != whole[1]["rng"]  # dropout has to differ between slices
    run_each(tmp_path, {"alone": FLAT, "on one": (*FLAT, saved)}, num_ranks=1, text=text)
    alone = lines_of_steps(tmp_path / "alone/training.jsonl")
    for name in ("cut", "on one"):
        steps = lines_of_steps(tmp_path / name / "training.jsonl")
        same = alone[-len(steps) :]
        assert [r["samples"] for r in steps] == [r["samples"] for r in same]
        for field in ("loss", "grad_norm", "label_tokens", "tokens"):
            assert [r[field] for r in steps] == pytest.approx([r[field] for r in same], rel=1e-4), (
                name,
                field,
            )
    assert validations(tmp_path / "cut") == pytest.approx(validations(tmp_path / "alone"), rel=1e-4)


@pytest.mark.further
def test_divided_rows_train_as_complete_ones_on_every_grid(tmp_path: Path) -> None:
    options = (*FLAT, "--step_scheduler.max_steps=2", "--model.from_config.num_attention_heads=4")
    run(tmp_path, *options, name="one")
    grids = {name: (*options, f"--distributed={sizes}") for name, sizes in GRIDS.items()}
    run_each(tmp_path, grids, num_ranks=4)
    expected = lines_of_steps(tmp_path / "one/training.jsonl")
    for name in grids:
        steps = lines_of_steps(tmp_path / name / "training.jsonl")
        for field in ("loss", "grad_norm"):
            found = [step[field] for step in steps]
            assert found == pytest.approx([step[field] for step in expected], rel=2e-4), name


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            "{model_type: mamba, hidden_size: 16, num_hidden_layers: 2}",
            "tokens outside of attention (Conv1d",
        ),
        pytest.param(
            "{model_type: bloom, hidden_size: 16, n_layer: 2, n_head: 2}",
            "transformers' attention interface",
            marks=pytest.mark.further,
        ),
    ],
)
def test_a_model_whose_tokens_meet_outside_of_attention_is_refused(
    tmp_path: Path, section: str, said: str
) -> None:
    text = (
        RECIPE[: RECIPE.index("model:")]
        + f"model: {{from_config: {section}}}\n"
        + RECIPE[RECIPE.index("tokenizer:") :]
    )
    assert said in str(failure(tmp_path, "--distributed.cp_size=2", num_ranks=2, text=text))


def validations(directory: Path) -> list[float]:
    found = []
    for line in lines(directory / "validation.jsonl"):
        found += [line["val_loss"], line["val_accuracy"]]
    return found


def test_rows_that_cannot_be_divided_evenly_are_refused(tmp_path: Path) -> None:
    collate = (
        "--dataloader.collate_fn={_target_: tests.distributed.parallel.test_strategies.odd_rows}"
    )
    error = failure(
        tmp_path, "--distributed.cp_size=2", collate, "--dataloader.padding_free=false", num_ranks=2
    )
    assert "17 tokens among 2 ranks" in str(error) and "leave cp_size out" in str(error)
