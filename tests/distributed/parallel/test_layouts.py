"""Each kind of training on each layout of ranks that its guide names, and after a kill; other layouts are errors."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from automodel_ckpt.cli.train import main
from tests.distributed.kinds.test_distill import write as write_distill
from tests.distributed.kinds.test_pretrain import TEXT as PRETRAIN
from tests.distributed.kinds.test_sequence_classification import topics
from tests.distributed.kinds.test_vlm import prepare as vlm
from tests.distributed.kinds.test_vlm_distill import PACKED
from tests.distributed.kinds.test_vlm_distill import prepare as vlm_distill
from tests.distributed.parallel.test_expert_parallel import model_section
from tests.fixtures.distill.make_reference_losses import student, teacher
from tests.support import ranks
from tests.support.models.mtp import model_section as mtp_section
from tests.support.runs.pair_recipes import write_embedding, write_reranker
from tests.support.runs.preference import step_records, write_run
from tests.support.runs.training import steps_of, write_recipe
from tests.support.runs.training import train as train_here
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
BATCHES = ("--step_scheduler.global_batch_size=4", "--step_scheduler.local_batch_size=2")
SHORT = (
    *BATCHES,
    "--trust=tests",
    "--step_scheduler.max_steps=2",
    "--step_scheduler.ckpt_every_steps=null",
    "--checkpoint.save_consolidated=false",
)
WITH_HEAD = "--peft={r: 2, alpha: 8, target_modules: [q_proj, v_proj], modules_to_save: [lm_head]}"
LORA = "--peft={r: 4, target_modules: all-linear, dropout: 0.0}"


def pretrain(directory: Path) -> Path:
    text = PRETRAIN.replace("num_key_value_heads: 2", "num_key_value_heads: 4")
    return write_recipe(directory, text)


def distill(directory: Path) -> Path:
    student().save_pretrained(directory / "student")
    teacher().save_pretrained(directory / "teacher")
    return write_distill(directory, directory, "mixed")


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
ONE_LEFT = "--dataset.max_samples=5"
"""The second global batch has one sample, so that a rank has none of it."""
TEMPLATE = "--reranker.template=find {{ query }} ba {{ document }}"
SWITCH = MODELS["tied"].replace(
    "model_type: t5",
    "model_type: switch_transformers, num_experts: 4, num_sparse_encoder_layers: 1,"
    " num_sparse_decoder_layers: 1, router_jitter_noise: 0.0",
)
"""A model that calls only the experts that a token of the micro-batch chooses."""
KINDS = {
    "pretrain": Kind(pretrain, "ddp sp cp pp", "", (NO_VALIDATION,)),
    "pretrain of experts": Kind(
        pretrain, "ep", "", (NO_VALIDATION, EXPERTS, "--pretrain.base_width=null")
    ),
    "vlm_finetune": Kind(partial(vlm, family="llava"), "hsdp cp", "pp"),
    "vlm_finetune, tensor parallel": Kind(partial(vlm, family="llava"), "tp", ""),
    "dpo": Kind(partial(write_run, recipe="dpo"), "fsdp2 tp sp", PAIRS),
    "dpo, precomputed": Kind(
        partial(write_run, recipe="dpo"), "ddp", "", ("--dpo.precompute=true",)
    ),
    # The reference is then computed by the original of the output layer, the policy by its copy.
    "dpo of adapters": Kind(partial(write_run, recipe="dpo"), "fsdp2", "", (WITH_HEAD,)),
    "dpo of adapters, tensor parallel": Kind(
        partial(write_run, recipe="dpo"), "tp", "", (WITH_HEAD,)
    ),
    "orpo": Kind(partial(write_run, recipe="orpo"), "fsdp2 ddp tp", PAIRS),
    "reward_model": Kind(partial(write_run, recipe="reward_model"), "ddp tp", PAIRS, (ONE_LEFT,)),
    "kto": Kind(kto, "ddp tp", PAIRS, (ONE_LEFT,)),
    "kto of adapters": Kind(kto, "fsdp2", "", (ONE_LEFT, LORA)),
    "sequence_classification": Kind(topics, "fsdp2 ddp tp", PAIRS, (ONE_LEFT,)),
    "embedding": Kind(
        partial(write_embedding, kind="llama"),
        "fsdp2 tp",
        PAIRS,
        ("--embedding.attention=bidirectional",),
    ),
    "embedding of an encoder": Kind(
        partial(write_embedding, num_negatives=1), "fsdp2 ddp", "", (ONE_LEFT,)
    ),
    "embedding of own negatives": Kind(
        partial(write_embedding, num_negatives=1),
        "ddp",
        "",
        ("--embedding.negatives=own", "--step_scheduler.local_batch_size=1"),
    ),
    "embedding of adapters": Kind(
        partial(write_embedding, kind="llama", num_negatives=1), "ddp tp", "", (LORA,)
    ),
    "reranker": Kind(
        partial(write_reranker, kind="llama"),
        "fsdp2 tp",
        PAIRS,
        (TEMPLATE, "--reranker.attention=bidirectional"),
    ),
    "reranker of an encoder": Kind(write_reranker, "ddp", "", (ONE_LEFT,)),
    "seq2seq": Kind(partial(write_seq2seq, model=MODELS["tied"]), "fsdp2 ddp", "tp cp pp"),
    "seq2seq of experts": Kind(partial(write_seq2seq, model=SWITCH), "fsdp2 ddp", ""),
    "vlm_distill": Kind(vlm_distill, "ddp tp", PAIRS),
    "distill": Kind(distill, "fsdp2 ddp tp sp", "", ("--dataloader.pad_to_multiple_of=16",)),
}


FIRST = {"embedding of an encoder", "dpo of adapters"}
"""Documents of all ranks, and a reference. Others share their code; test_strategies.py has rows of text."""


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
        check_validation(tmp_path / layout, tmp_path / "one")


def check_validation(run: Path, expected: Path) -> None:
    """Compare the metrics of the last validation of two runs, if they have one."""
    if not (expected / "validation.jsonl").exists():
        return
    found, other = (step_records(each, "validation")[-1] for each in (run, expected))
    for name in [name for name in other if name.startswith("val_")]:
        assert found[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


MTP = "--model.mtp={loss_scaling_factor: 0.3, num_depths: 2}"
VLM_LORA = "--peft={r: 4, target_modules: '*.language_model.*'}"
ENCODER_DROPOUT = (
    "--model.config_overrides={hidden_dropout_prob: 0.2, attention_probs_dropout_prob: 0.1}"
)
RESUMED: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "noise and multi-token prediction": (
        write_recipe,
        (mtp_section("glm4_moe"), MTP, "--model.neftune_alpha=5", "--distributed.strategy=fsdp2"),
    ),
    "reward_model": (KINDS["reward_model"].write, (LORA,)),
    "kto": (kto, (LORA,)),
    "sequence_classification": (topics, ("--model.from_config.attention_dropout=0.2",)),
    "embedding": (
        KINDS["embedding of an encoder"].write,
        (ENCODER_DROPOUT, "--step_scheduler.local_batch_size=1"),
    ),
    "reranker": (write_reranker, (ENCODER_DROPOUT,)),
    "seq2seq": (
        KINDS["seq2seq"].write,
        ("--model.from_config.dropout_rate=0.2", "--ema={decay: 0.9}"),
    ),
    "vlm_distill": (vlm_distill, (*PACKED, "--model.freeze=[]", VLM_LORA)),
}
"""How a recipe is written, and its options. Other kinds have such a test in their own files."""


@pytest.mark.further
@pytest.mark.parametrize("name", RESUMED)
def test_a_killed_run_with_asynchronous_saves_continues_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("AUTOMODEL_CKPT_CACHE", str(tmp_path / "cache"))
    write, more = RESUMED[name]
    recipe = write(tmp_path)
    options = (
        *BATCHES,
        "--checkpoint.is_async=true",
        "--step_scheduler.max_steps=5",
        "--step_scheduler.ckpt_every_steps=2",
        *more,
    )

    def trained(run: str, dies_after: int = 0) -> dict[str, str]:
        place = f"--checkpoint.checkpoint_dir={tmp_path / run}"
        return train_here(recipe, place, *options, dies_after=dies_after)

    ended = ranks.outcomes(trained, 2, "killed", 3, init=False)
    assert -9 in [outcome.exitcode for outcome in ended]
    resumed, whole = ranks.run_each([partial(trained, run) for run in ("killed", "whole")], 2)
    assert resumed == whole
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")
