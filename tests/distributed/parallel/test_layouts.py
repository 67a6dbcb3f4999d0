"""Each kind of training on each layout of ranks that its guide names, through ckpt-train; the others are errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from automodel_ckpt.cli.train import main
from tests.distributed.kinds.test_pretrain import TEXT as PRETRAIN
from tests.distributed.kinds.test_sequence_classification import topics
from tests.distributed.kinds.test_vlm import prepare as vlm
from tests.distributed.kinds.test_vlm_distill import prepare as vlm_distill
from tests.distributed.parallel.test_expert_parallel import model_section
from tests.support import ranks
from tests.support.runs.pair_recipes import write_embedding, write_reranker
from tests.support.runs.preference import step_records, write_run
from tests.support.runs.training import write_recipe
from tests.unit.training.runs.test_seq2seq import MODELS
from tests.unit.training.runs.test_seq2seq import write as write_seq2seq

LAYOUTS = {
    "fsdp2": ("--distributed.strategy=fsdp2",),
    "ddp": ("--distributed.strategy=ddp",),
    "hsdp": ("--distributed.strategy=fsdp2", "--distributed.dp_replicate_size=2"),
    "tp": ("--distributed.tp_size=2",),
    "sp": ("--distributed.tp_size=2", "--distributed.sequence_parallel=true"),
    "cp": ("--distributed.cp_size=2",),
    "pp": ("--distributed.pp_size=2",),
    "ep": ("--distributed.ep_size=2",),
}
SHORT = (
    "--trust=tests",
    "--step_scheduler.max_steps=2",
    "--step_scheduler.global_batch_size=4",
    "--step_scheduler.local_batch_size=2",
    "--step_scheduler.ckpt_every_steps=null",
    "--checkpoint.save_consolidated=false",
)


def pretrain(directory: Path) -> Path:
    text = PRETRAIN.replace("num_key_value_heads: 2", "num_key_value_heads: 4")
    return write_recipe(directory, text)


def kto(directory: Path) -> Path:
    recipe = write_run(directory, "kto")
    rows = [{"prompt": f"w{n}", "completion": f"w{n + 1}", "label": n % 2} for n in range(8)]
    (directory / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe.write_text(recipe.read_text().replace("preference.pairs", "kto.judged_completions"))
    return recipe


@dataclass(frozen=True)
class Kind:
    """How a recipe is written, the layouts that other tests do not train it with, and the layouts that are errors."""

    write: Callable[[Path], Path]
    works: str
    rejected: str
    options: tuple[str, ...] = ()


PAIRS = "cp pp"
NO_VALIDATION = "--validation_dataset=null"
EXPERTS = model_section("mixtral").replace(
    "'max_position_embeddings': 32", "'max_position_embeddings': 64"
)
KINDS = {
    "pretrain": Kind(pretrain, "ddp sp cp pp", "", (NO_VALIDATION,)),
    "pretrain of experts": Kind(
        pretrain, "ep", "", (NO_VALIDATION, EXPERTS, "--pretrain.base_width=null")
    ),
    "vlm_finetune": Kind(partial(vlm, family="llava"), "hsdp tp cp", "pp"),
    "dpo": Kind(partial(write_run, recipe="dpo"), "sp", PAIRS),
    "orpo": Kind(partial(write_run, recipe="orpo"), "fsdp2 ddp tp", PAIRS),
    "reward_model": Kind(partial(write_run, recipe="reward_model"), "ddp", PAIRS),
    "kto": Kind(kto, "ddp", PAIRS),
    "sequence_classification": Kind(topics, "fsdp2 tp", PAIRS),
    "embedding": Kind(partial(write_embedding, kind="llama"), "fsdp2", PAIRS),
    "reranker": Kind(partial(write_reranker, kind="llama"), "tp", PAIRS),
    "seq2seq": Kind(lambda path: write_seq2seq(path, MODELS["tied"]), "", "tp cp pp"),
    "vlm_distill": Kind(vlm_distill, "ddp tp", PAIRS),
}


FIRST = {"vlm_finetune"}
"""Rows with images. The others share their code, and test_strategies.py has rows of text."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FIRST else pytest.mark.further) for name in KINDS],
)
def test_a_kind_trains_on_the_layouts_of_its_guide_as_on_one_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    kind = KINDS[name]
    recipe = kind.write(tmp_path)

    def train(run: str, *layout: str) -> int:
        place = f"--checkpoint.checkpoint_dir={tmp_path / run}"
        return main([str(recipe), place, *SHORT, *kind.options, *layout])

    works, rejected = kind.works.split(), kind.rejected.split()
    trainings = [partial(train, layout, *LAYOUTS[layout]) for layout in (*works, *rejected)]
    codes = ranks.run_each(trainings, 2)
    assert codes == [[0, 0]] * len(works) + [[2, 2]] * len(rejected)
    text = capfd.readouterr().err
    assert all(f"distributed.{layout}_size" in text for layout in rejected)
    if works:
        assert train("one") == 0
    for layout in works:
        steps, expected = step_records(tmp_path / layout), step_records(tmp_path / "one")
        assert len(steps) == len(expected) == 2
        for step, other in zip(steps, expected, strict=True):
            assert step["loss"] == pytest.approx(other["loss"], rel=1e-4), layout
            assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3), layout
