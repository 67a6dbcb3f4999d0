"""A run in pipeline stages: what it logs, how it goes on, on the same ranks and on others, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.distributed.kinds.test_training import failure, lines_of_steps, run, run_each
from tests.support.runs.training import RECIPE, VALIDATION

TEXT = (
    (RECIPE + VALIDATION)
    .replace("attention_dropout: 0.2", "attention_dropout: 0.0")
    .replace("num_key_value_heads: 2", "num_key_value_heads: 4")
)
GROUPS = "--optimizer.groups=[{params: [model.norm.weight], lr: 5e-3}, {params: ['*.layers.0.*'], weight_decay: 0.5}]"
"""Either stage has no parameter of one of these groups."""
SHORT = (
    GROUPS,
    "--checkpoint.save_consolidated=false",
    "--step_scheduler.max_steps=4",
    "--lr_scheduler.decay_steps=4",
    "--step_scheduler.ckpt_every_steps=2",
)
STAGES = "--distributed.pp_size=2"


def test_a_pipeline_logs_what_one_rank_does_and_goes_on_exactly_and_on_other_ranks(
    tmp_path: Path,
) -> None:
    back = f"--checkpoint.restore_from={tmp_path / 'whole' / 'epoch_0_step_2'}"
    runs = {"whole": (*SHORT, STAGES), "resumed": (*SHORT, STAGES, back)}
    whole, resumed = run_each(tmp_path, runs, num_ranks=2, text=TEXT)
    assert resumed == whole
    assert whole[0]["rng"] != whole[1]["rng"]
    run_each(tmp_path, {"alone": SHORT, "on one": (*SHORT, back)}, num_ranks=1, text=TEXT)
    alone, *others = (
        lines_of_steps(tmp_path / name / "training.jsonl") for name in ("alone", "whole", "on one")
    )
    for records in others:
        expected = alone[-len(records) :]
        for field in ("loss", "grad_norm", "lr"):
            assert [r[field] for r in records] == pytest.approx(
                [r[field] for r in expected], rel=1e-4
            )
        for field in ("step", "samples", "tokens", "label_tokens"):
            assert [r[field] for r in records] == [r[field] for r in expected]
    one, two = (lines_of_steps(tmp_path / name / "validation.jsonl") for name in ("alone", "whole"))
    assert [r["val_loss"] for r in two] == pytest.approx([r["val_loss"] for r in one], rel=1e-5)
    assert [r["val_accuracy"] for r in two] == [r["val_accuracy"] for r in one]
    assert [r["label_tokens"] for r in two] == [r["label_tokens"] for r in one]
    assert sorted(p.name for p in (tmp_path / "whole/epoch_0_step_4/rng").iterdir()) == [
        f"rng_global_rank_{rank}.pt" for rank in range(2)
    ]


FOUR_LAYERS = TEXT.replace("num_hidden_layers: 2", "num_hidden_layers: 4")
# SGD shows a wrong scale of a gradient, which AdamW would hide.
SGD = (
    "--checkpoint.save_consolidated=false",
    "--optimizer={_target_: torch.optim.SGD, lr: 0.5}",
    "--lr_scheduler=null",
    "--step_scheduler.max_steps=4",
    "--step_scheduler.ckpt_every_steps=2",
    "--step_scheduler.local_batch_size=2",
)


@pytest.mark.parametrize(
    ("num_ranks", "options", "peft"),
    [
        pytest.param(2, (STAGES,), True, marks=pytest.mark.further),
        pytest.param(4, (STAGES, "--distributed.cp_size=2"), False, marks=pytest.mark.further),
    ],
)
def test_stages_with_divided_rows_and_adapters_log_what_one_rank_does(
    num_ranks: int, options: tuple[str, ...], peft: bool, tmp_path: Path
) -> None:
    common = SGD
    if peft:
        base = f"base_dir: {tmp_path / 'base'}"
        common = (*SGD, f"--peft={{r: 4, modules_to_save: [lm_head], {base}}}")
        common = (*common, "--model.from_config.tie_word_embeddings=false")
    run(tmp_path, *common, name="alone", text=FOUR_LAYERS)
    back = f"--checkpoint.restore_from={tmp_path / 'whole' / 'epoch_0_step_2'}"
    run(tmp_path, *common, *options, name="whole", num_ranks=num_ranks, text=FOUR_LAYERS)
    run(tmp_path, *common, back, name="on one", text=FOUR_LAYERS)
    alone = lines_of_steps(tmp_path / "alone/training.jsonl")
    for name in ("whole", "on one"):
        steps = lines_of_steps(tmp_path / name / "training.jsonl")
        expected = alone[-len(steps) :]
        for field in ("loss", "grad_norm"):
            found = [step[field] for step in steps]
            assert found == pytest.approx([step[field] for step in expected], rel=1e-5)
    one, two = (lines_of_steps(tmp_path / name / "validation.jsonl") for name in ("alone", "whole"))
    assert [r["val_loss"] for r in two] == pytest.approx([r["val_loss"] for r in one], rel=1e-5)
    assert [r["val_accuracy"] for r in two] == [r["val_accuracy"] for r in one]


class OwnObjective(LLMFinetune.objective_class):
    """Computes the loss in its own way."""

    def loss(self, micro_batch: Any) -> Any:
        return super().loss(micro_batch)


class OwnLoss(LLMFinetune):
    """A recipe with a different objective."""

    objective_class = OwnObjective


def test_what_a_pipeline_cannot_do_is_refused_before_weights_are_made(tmp_path: Path) -> None:
    deep = failure(tmp_path, "--distributed.pp_size=3", num_ranks=3)
    assert "there are more pipeline stages than layers" in str(deep)
    own = failure(tmp_path, STAGES, num_ranks=2, recipe_class=OwnLoss)
    assert "OwnObjective.loss" in str(own)
    frozen = failure(
        tmp_path, STAGES, "--model.freeze=['model.embed_tokens*', 'model.layers.0.*']", num_ranks=2
    )
    assert "stage 0 of 2" in str(frozen)
    assert not (tmp_path / "run").exists()
