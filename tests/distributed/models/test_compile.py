"""Compiled layers: the same training, the same names, checkpoints that go on with and without."""

import json
from pathlib import Path

import pytest
import torch

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.distributed.kinds.test_training import lines_of_steps, run
from tests.distributed.parallel.test_packing import DATA, TEXT
from tests.support.runs.training import Recipe, with_loop

# Raised inside torch._dynamo, about its own question.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

COMPILED = ("--compile.enabled", "--compile.backend=eager")
STILL = "--model.from_config.attention_dropout=0"


class CompiledLoop(LLMFinetune.loop_class):
    """Fails unless graphs of the model were compiled."""

    def end(self) -> None:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        super().end()


Compiled = with_loop(Recipe, CompiledLoop)


@pytest.mark.further
def test_a_compiled_run_trains_and_saves_like_any_other_and_goes_on_without(tmp_path: Path) -> None:
    four = (STILL, "--lr_scheduler.decay_steps=4", "--step_scheduler.max_steps=4")
    run(tmp_path, *four, name="plain", num_ranks=2)
    run(
        tmp_path,
        *COMPILED,
        *four,
        "--step_scheduler.max_steps=2",
        num_ranks=2,
        recipe_class=Compiled,
    )
    run(tmp_path, *four, num_ranks=2)
    plain, mixed = (lines_of_steps(tmp_path / name / "training.jsonl") for name in ("plain", "run"))
    assert [record["loss"] for record in mixed] == pytest.approx(
        [record["loss"] for record in plain], rel=1e-5
    )
    kept = [Manifest.read(tmp_path / name / "epoch_0_step_4").trees for name in ("plain", "run")]
    compiled = Manifest.read(tmp_path / "run/epoch_0_step_2").trees
    assert {n: t.tensors.keys() for n, t in kept[0].items()} == {
        n: t.tensors.keys() for n, t in compiled.items()
    }


@pytest.mark.further
@pytest.mark.parametrize(
    ("num_ranks", "parts"),
    [
        (
            1,
            (
                "--packed_sequence.size=64",
                "--model.attn_implementation=eager",
                "--model.activation_checkpointing",
                "--peft={r: 2, base_dir: base}",
                # As by default on a GPU.
                "--model.fused_layers",
            ),
        ),
        (2, ("--distributed.cp_size=2",)),
    ],
    ids=["packs, adapters, recomputed layers", "divided rows"],
)
def test_compiled_layers_train_to_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, parts: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    both = (STILL, *parts, "--step_scheduler.max_steps=2")
    run(tmp_path, *both, name="plain", num_ranks=num_ranks)
    run(tmp_path, *COMPILED, *both, num_ranks=num_ranks, recipe_class=Compiled)
    plain, compiled = (
        lines_of_steps(tmp_path / name / "training.jsonl") for name in ("plain", "run")
    )
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        expected = pytest.approx([record[key] for record in plain], rel=tolerance)
        assert [record[key] for record in compiled] == expected


class NotingLoop(LLMFinetune.loop_class):
    """Writes the lengths of all rows, and the number of compiled graphs, to a file."""

    def run(self) -> None:
        self.seen: set[int] = set()
        # A process inherits the counters of the one that forked it.
        self.graphs_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self.model.register_forward_pre_hook(
            lambda _, args, inputs: self.seen.add(inputs["input_ids"].shape[1]), with_kwargs=True
        )
        super().run()

    def end(self) -> None:
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        noted = {"widths": sorted(self.seen), "graphs": num_graphs - self.graphs_before}
        directory = Path(self.config.checkpoint.checkpoint_dir)
        directory.with_suffix(".json").write_text(json.dumps(noted))
        super().end()


Noting = with_loop(Recipe, NotingLoop)


@pytest.mark.further
def test_rows_of_few_widths_have_the_same_losses_and_few_graphs(tmp_path: Path) -> None:
    overrides = (
        *DATA,
        "--validation_dataset=null",
        "--step_scheduler.local_batch_size=2",
        "--step_scheduler.max_steps=4",
    )
    rounded = ("--compile.dynamic=false", "--compile.row_widths=3")
    run(tmp_path, *overrides, name="plain", text=TEXT, recipe_class=Noting)
    run(tmp_path, *overrides, *COMPILED, *rounded, name="few", text=TEXT, recipe_class=Noting)
    plain, few = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "few"))
    assert len(few["widths"]) <= 3 < len(plain["widths"])
    assert 0 < few["graphs"] <= 2 * len(few["widths"])
    free, rounded_steps = (
        lines_of_steps(tmp_path / name / "training.jsonl") for name in ("plain", "few")
    )
    for name in ("loss", "grad_norm"):
        expected = [record[name] for record in free]
        assert [record[name] for record in rounded_steps] == pytest.approx(expected, rel=5e-6)
    assert [r["tokens"] for r in rounded_steps] == [r["tokens"] for r in free]
