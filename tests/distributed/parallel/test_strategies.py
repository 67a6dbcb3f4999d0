"""Each way of sharing a model out trains as one rank does; what a grid of ranks or a model cannot do is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from automodel_ckpt.errors import RecipeError
from tests.distributed.kinds.test_training import failure, lines_of_steps, run, run_each
from tests.support.runs.training import RECIPE

LAYOUTS: dict[str, dict[str, str]] = {
    "llama": {"hsdp": "{strategy: fsdp2, dp_replicate_size: 2}"},
    "qwen3": {
        "tp along the sequence": "{tp_size: 4, sequence_parallel: true}",
        "hsdp x tp": "{strategy: fsdp2, tp_size: 2, dp_replicate_size: 2}",
        "pp x fsdp2 x tp": "{strategy: fsdp2, pp_size: 2, tp_size: 2}",
        "pp x hsdp": "{pp_size: 2, dp_replicate_size: 2}",
    },
}
"""Llama with biases and an untied output layer; Qwen3 with a tied one and norms of single heads."""


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.further)])
def test_every_layout_of_four_ranks_trains_as_one_rank_does(tmp_path: Path, kind: str) -> None:
    options = [
        *FOUR_HEADS,
        "--step_scheduler={global_batch_size: 8, local_batch_size: 2, max_steps: 2}",
        f"--model.from_config.model_type={kind}",
    ]
    if kind == "llama":
        untied = ("tie_word_embeddings=false", "attention_bias=true")
        options += [f"--model.from_config.{setting}" for setting in untied]
    run(tmp_path, *options, name="one")
    layouts = {name: (*options, f"--distributed={sizes}") for name, sizes in LAYOUTS[kind].items()}
    # torch keeps the groups of an earlier layout with tensor parallelism.
    alone = ("tp along the sequence", "pp x fsdp2 x tp")
    run_each(tmp_path, {name: layouts[name] for name in layouts if name not in alone}, num_ranks=4)
    for name in layouts.keys() & alone:
        run(tmp_path, *layouts[name], name=name, num_ranks=4)
    expected = lines_of_steps(tmp_path / "one/training.jsonl")
    for name in layouts:
        steps = lines_of_steps(tmp_path / name / "training.jsonl")
        for field in ("loss", "grad_norm"):
            found = [step[field] for step in steps]
            assert found == pytest.approx([step[field] for step in expected], rel=2e-4), name


FOUR_HEADS = (
    "--model.from_config.num_key_value_heads=4",
    "--model.from_config.attention_dropout=0",
)
SHORT = (
    "--checkpoint.save_consolidated=false",
    "--step_scheduler.max_steps=3",
    "--lr_scheduler.decay_steps=3",
    "--step_scheduler.ckpt_every_steps=2",
)
GRID = ("--distributed.tp_size=2", "--distributed.sequence_parallel=true")


def test_a_tensor_parallel_run_logs_what_one_rank_does_and_goes_on_exactly(tmp_path: Path) -> None:
    text = RECIPE.replace("tie_word_embeddings: true", "tie_word_embeddings: false")
    options = (*FOUR_HEADS, *SHORT)
    checkpoint = tmp_path / "whole" / "epoch_0_step_2"
    back = f"--checkpoint.restore_from={checkpoint}"
    runs = {"whole": (*options, *GRID), "resumed": (*options, *GRID, back)}
    whole, resumed = run_each(tmp_path, runs, num_ranks=4, text=text)
    assert resumed == whole
    assert (
        whole[0]["rng"] == whole[1]["rng"] != whole[2]["rng"]
    )  # what a group holds in common has to stay common
    on_one_rank = {"alone": options, "on one": (*options, back)}
    run_each(tmp_path, on_one_rank, num_ranks=1, text=text)
    alone, grown, on_one = (
        lines_of_steps(tmp_path / name / "training.jsonl") for name in ("alone", "whole", "on one")
    )
    assert [r["loss"] for r in on_one] == pytest.approx([r["loss"] for r in alone[2:]], rel=1e-3)
    for field in ("loss", "grad_norm"):
        assert [r[field] for r in grown] == pytest.approx([r[field] for r in alone], rel=1e-3)
    assert [r["samples"] for r in grown] == [r["samples"] for r in alone]
    assert [r["label_tokens"] for r in grown] == [r["label_tokens"] for r in alone]
    assert sorted(p.name for p in (checkpoint / "rng").iterdir()) == [
        f"rng_global_rank_{r}.pt" for r in range(4)
    ]
    assert sorted(p.name for p in (checkpoint / "dataloader").iterdir()) == [
        f"dataloader_dp_rank_{r}.pt" for r in range(2)
    ]


def by_hand(model: nn.Module) -> dict[str, Any]:
    """A plan as a recipe may name one: torch's styles and names of styles, of the second layer only."""
    return {
        "model.layers.1.mlp.gate_proj": ColwiseParallel(),
        "model.layers.1.mlp.up_proj": "colwise",
        "model.layers.1.mlp.down_proj": RowwiseParallel(),
    }


@pytest.mark.further
def test_a_plan_by_hand_trains_as_no_plan_does(tmp_path: Path) -> None:
    plan = "--distributed.tp_plan={_target_: tests.distributed.parallel.test_strategies.by_hand}"
    run(tmp_path, *FOUR_HEADS, "--step_scheduler.max_steps=2", name="alone")
    run(
        tmp_path,
        *FOUR_HEADS,
        "--step_scheduler.max_steps=2",
        "--distributed.tp_size=2",
        plan,
        num_ranks=2,
    )
    alone, grown = (lines_of_steps(tmp_path / name / "training.jsonl") for name in ("alone", "run"))
    assert [r["loss"] for r in grown] == pytest.approx([r["loss"] for r in alone], rel=1e-4)


def without_norms_of_heads(model: nn.Module) -> dict[str, Any]:
    """An incomplete plan for Qwen3: q_norm and k_norm see a rank's heads only."""
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise") | {"o_proj": "rowwise"}
    return {f"model.layers.*.self_attn.{name}": style for name, style in attention.items()}


def test_a_plan_whose_copies_would_diverge_is_refused_in_the_first_step(tmp_path: Path) -> None:
    plan = f"--distributed.tp_plan={{_target_: {__name__}.without_norms_of_heads}}"
    qwen = "--model.from_config.model_type=qwen3"
    error = failure(tmp_path, qwen, *FOUR_HEADS, "--distributed.tp_size=2", plan, num_ranks=2)
    assert isinstance(error, RecipeError)
    names = "model.layers.*.self_attn.k_norm.weight, model.layers.*.self_attn.q_norm.weight"
    assert error.problems[0].value == names


def test_what_the_model_or_the_machine_cannot_do_is_refused_before_weights_are_made(
    tmp_path: Path,
) -> None:
    one_head = ("--model.from_config.num_key_value_heads=1", "--distributed.tp_size=2")
    assert "num_key_value_heads 1" in str(failure(tmp_path, *one_head, num_ranks=2))
    offloaded = failure(tmp_path, "--distributed.cpu_offload=true", "--distributed.strategy=fsdp2")
    assert "CPU offload needs fsdp2, and the memory of a GPU" in str(offloaded)
    half = failure(tmp_path, "--model.dtype=float16")
    assert "float16 training requires a loss scaler" in str(
        half
    ) and "model.embed_tokens.weight" in str(half)
    assert not (tmp_path / "run").exists()


def cuts_tied_weights(model: nn.Module) -> dict[str, Any]:
    """A plan that shards the embedding and the output layer along different dimensions."""
    return {"model.embed_tokens": "embedding_colwise", "lm_head": "colwise_gather_output"}


def test_a_plan_that_cuts_tied_weights_differently_is_refused(tmp_path: Path) -> None:
    plan = f"--distributed.tp_plan={{_target_: {__name__}.cuts_tied_weights}}"
    text = str(failure(tmp_path, *FOUR_HEADS, "--distributed.tp_size=2", plan, num_ranks=2))
    assert "lm_head.weight" in text
    assert "shard both along the same dimension" in text


def odd_rows(tokenizer: Any) -> Any:
    """A collator that pads to 17 tokens."""

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        found = {}
        for name, filler in (("input_ids", 0), ("labels", -100)):
            rows = [[*sample[name], *[filler] * (17 - len(sample[name]))] for sample in samples]
            found[name] = torch.tensor(rows)
        return found

    return collate


def test_rows_that_context_parallel_error_along_the_sequence_are_refused(tmp_path: Path) -> None:
    collate = (
        "--dataloader.collate_fn={_target_: tests.distributed.parallel.test_strategies.odd_rows}"
    )
    error = failure(tmp_path, *GRID, collate, "--dataloader.padding_free=false", num_ranks=2)
    assert "17 tokens among 2 ranks" in str(error)
