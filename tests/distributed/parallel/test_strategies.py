"""Each way of sharing a model out trains as one rank does; what a grid of ranks or a model cannot do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh import build_mesh
from automodel_ckpt.parallel.parallelize import Parallelism, parallelize
from automodel_ckpt.parallel.tensor_parallel import apply_plan
from automodel_ckpt.training.watch.replicated_gradients import ReplicatedGradients
from tests.distributed.kinds.test_training import failure, lines_of_steps, run, run_each
from tests.support import ranks
from tests.support.runs.parallel import layout_here, model_of, train_steps, train_steps_in_stages
from tests.support.runs.training import RECIPE

LAYOUTS: dict[str, tuple[Parallelism, dict[str, int]]] = {
    "hsdp": (Parallelism(), {"dp_replicate_size": 2}),
    "tp": (Parallelism(), {"tp_size": 4}),
    "tp along the sequence": (Parallelism(sequence_parallel=True), {"tp_size": 4}),
    "fsdp2 x tp": (Parallelism(), {"tp_size": 2}),
    "hsdp x tp": (Parallelism(strategy="fsdp2"), {"tp_size": 2, "dp_replicate_size": 2}),
    "pp x fsdp2": (Parallelism(), {"pp_size": 2}),
    "pp x hsdp": (Parallelism(), {"pp_size": 2, "dp_replicate_size": 2}),
    "pp x tp": (Parallelism(), {"pp_size": 2, "tp_size": 2}),
    "pp x fsdp2 x tp": (Parallelism(strategy="fsdp2"), {"pp_size": 2, "tp_size": 2}),
}
PLAIN = {"attention_bias": True, "tie_word_embeddings": False}


def as_one_rank_does(names: list[str], kind: str, settings: dict[str, Any]) -> list[str]:
    """On four ranks: how each layout's losses and norms differ from those of one rank; nothing where they agree."""
    found = []
    alone = train_steps(model_of(kind, **settings), layout_here(tp_size=dist.get_world_size()))
    for name in names:
        how, sizes = LAYOUTS[name]
        layout = layout_here(**sizes)
        if layout.sizes.pp > 1:
            here = train_steps_in_stages(model_of(kind, **settings), layout, how)
        else:
            here = train_steps(parallelize(model_of(kind, **settings), layout, how), layout)
        if here != [pytest.approx(step, rel=2e-4) for step in alone]:
            found.append(f"{name}: {here} instead of {alone}")
    return found


def test_every_layout_of_four_ranks_trains_as_one_rank_does() -> None:
    names = ["hsdp", "tp along the sequence", "fsdp2 x tp", "pp x fsdp2", "pp x fsdp2 x tp"]
    assert ranks.run(as_one_rank_does, 4, names, "llama", PLAIN, timeout=120) == [[]] * 4


def test_so_it_does_with_tied_weights_and_norms_of_single_heads() -> None:
    names = ["tp", "hsdp x tp", "pp x tp", "pp x hsdp"]
    assert (
        ranks.run(as_one_rank_does, 4, names, "qwen3", {"tie_word_embeddings": True}, timeout=120)
        == [[]] * 4
    )


def after_tensor_parallel() -> tuple[bool, bool, dict[str, float]]:
    """On two ranks: whether tied weights are tied, and sharded; gradients of activations over those of one rank."""
    layout = layout_here(tp_size=2)
    model: Any = parallelize(model_of(tie_word_embeddings=True), layout, Parallelism())
    weight = model.lm_head.weight
    is_tied = weight is model.model.embed_tokens.weight
    alone: Any = model_of("apertus")
    cut: Any = parallelize(model_of("apertus"), layout, Parallelism())
    tokens = torch.arange(8)[None]
    for each in (alone, cut):
        each(input_ids=tokens, labels=tokens).loss.backward()
    ratios = {}
    for name, expected in alone.model.layers[0].mlp.act_fn.named_parameters():
        found = cut.model.layers[0].mlp.act_fn.get_parameter(name).grad.to_local()
        ratios[name] = (found / expected.grad).item()
    return is_tied, isinstance(weight, DTensor), ratios


def test_cut_weights_stay_tied_and_activations_get_their_whole_gradient() -> None:
    ratios = {name: pytest.approx(1, rel=1e-4) for name in ("alpha_p", "alpha_n")}
    assert ranks.run(after_tensor_parallel, 2) == [(True, True, ratios)] * 2


class UsingConvolution(nn.Module):
    """A layer that uses the weight of its convolution as kernels for Mamba do, without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decay = nn.Parameter(torch.rand(4))
        self.conv1d = nn.Conv1d(4, 4, 1, groups=4, bias=False)
        self.called = nn.Conv1d(4, 4, 1, groups=4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        product = torch.nn.functional.conv1d(hidden, self.conv1d.weight, groups=4)
        mixed: torch.Tensor = self.called(product * self.decay[:, None])
        return mixed


def gradients_beside_a_plan(tp_size: int) -> dict[str, Any]:
    """The gradients of a layer without styles, on this rank."""
    model = UsingConvolution()
    if tp_size > 1:
        apply_plan(model, {}, build_mesh(layout_here(tp_size=tp_size))["tp"])
    model(torch.arange(8.0).view(1, 4, 2)).square().sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        found[name] = local.flatten().tolist()
    return found


def test_a_layer_may_use_the_weight_of_its_convolution_without_calling_it() -> None:
    assert ranks.run(gradients_beside_a_plan, 2, 2) == [gradients_beside_a_plan(1)] * 2


def by_hand(model: nn.Module) -> dict[str, Any]:
    """A plan as a recipe may name one: torch's styles and names of styles, of the second layer only."""
    return {
        "model.layers.1.mlp.gate_proj": ColwiseParallel(),
        "model.layers.1.mlp.up_proj": "colwise",
        "model.layers.1.mlp.down_proj": RowwiseParallel(),
    }


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
    run(tmp_path, *options, name="alone", text=text)
    checkpoint = tmp_path / "whole" / "epoch_0_step_2"
    back = f"--checkpoint.restore_from={checkpoint}"
    runs = {"whole": (*options, *GRID), "resumed": (*options, *GRID, back)}
    whole, resumed = run_each(tmp_path, runs, num_ranks=4, text=text)
    assert resumed == whole
    assert (
        whole[0]["rng"] == whole[1]["rng"] != whole[2]["rng"]
    )  # what a group holds in common has to stay common
    run(tmp_path, *options, back, name="on one", text=text)
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


def after_comparisons() -> list[str]:
    """On two ranks: what comparisons of gradients find, step by step."""
    mesh = build_mesh(layout_here(tp_size=2))
    model = nn.Linear(3, 4)
    for name, parameter in model.named_parameters():
        copies = distribute_tensor(parameter.detach(), mesh["tp"], [Replicate()])
        setattr(model, name, nn.Parameter(copies))
    comparison = ReplicatedGradients(model, tolerance=1e-3)
    mine = torch.zeros(4, 3)
    mine[dist.get_rank(), 0] = 1
    rounded = 1 + 1e-5 * dist.get_rank() * torch.ones(4)
    steps = {
        "none yet": (torch.zeros(4, 3), torch.ones(4)),
        "not a number": (mine * torch.inf, torch.ones(4)),
        "overflow on all ranks": (torch.full((4, 3), torch.inf), torch.ones(4)),
        "overflow on one rank": (
            torch.full((4, 3), torch.inf if dist.get_rank() else 1.0),
            torch.ones(4),
        ),
        "rounding": (torch.zeros(4, 3), rounded),
        "different": (mine, mine[:, 0]),
        "done": (mine, mine[:, 0]),
    }
    found = []
    for name, gradients in steps.items():
        for parameter, gradient in zip((model.weight, model.bias), gradients, strict=True):
            parameter.grad = DTensor.from_local(gradient, mesh["tp"], [Replicate()])
        try:
            comparison.check(dist.group.WORLD)
        except RecipeError as error:
            found.append(f"{name}: {error.problems[0].value}")
    return found


def test_a_copy_is_compared_once_as_soon_as_it_has_a_gradient() -> None:
    assert ranks.run(after_comparisons, 2) == [["different: weight"]] * 2


def test_what_the_model_or_the_machine_cannot_do_is_refused_before_weights_are_made(
    tmp_path: Path,
) -> None:
    one_head = ("--model.from_config.num_key_value_heads=1", "--distributed.tp_size=2")
    assert "num_key_value_heads 1" in str(failure(tmp_path, *one_head, num_ranks=2))
    offloaded = failure(tmp_path, "--distributed.cpu_offload=true", "--distributed.strategy=fsdp2")
    assert "CPUOffloadPolicy needs an accelerator" in str(offloaded)
    half = failure(tmp_path, "--model.dtype=float16")
    assert "float16 training requires a loss scaler" in str(
        half
    ) and "model.embed_tokens.weight" in str(half)
    assert not (tmp_path / "run").exists()


def cut_differently() -> str:
    plan = {"model.embed_tokens": "embedding_colwise", "lm_head": "colwise_gather_output"}
    with pytest.raises(RecipeError) as caught:
        parallelize(
            model_of(tie_word_embeddings=True), layout_here(tp_size=2), Parallelism(tp_plan=plan)
        )
    return str(caught.value)


def test_a_plan_that_cuts_tied_weights_differently_is_refused() -> None:
    for text in ranks.run(cut_differently, 2):
        assert "lm_head.weight" in text
        assert "shard both along the same dimension" in text


def odd_rows(tokenizer: Any) -> Any:
    """A collator that pads to odd lengths."""
    from automodel_ckpt.data.collate import PadCollator

    return PadCollator(0, 17)


def test_rows_that_context_parallel_error_along_the_sequence_are_refused(tmp_path: Path) -> None:
    collate = (
        "--dataloader.collate_fn={_target_: tests.distributed.parallel.test_strategies.odd_rows}"
    )
    error = failure(tmp_path, *GRID, collate, "--dataloader.padding_free=false", num_ranks=2)
    assert "17 tokens among 2 ranks" in str(error)
