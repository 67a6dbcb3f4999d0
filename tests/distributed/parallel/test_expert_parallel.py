"""Expert parallelism: the losses, gradients and checkpoints are those of one rank, whatever the ranks store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.expert_parallel import check_experts, divide_experts, experts_of
from tests.distributed.kinds.test_training import failure, lines_of_steps, run, run_each
from tests.support import ranks
from tests.support.models.experts import GROUPED, LATENT, SIZES
from tests.support.runs.parallel import layout_here
from tests.support.runs.training import RECIPE

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8},
    "deepseek_v3": {**GROUPED, **LATENT, "first_k_dense_replace": 1},
    "glm4_moe": {**GROUPED, "first_k_dense_replace": 1},
    "olmoe": {"num_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 8, "moe_k": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
}
# SGD shows a wrong scale of a gradient, which AdamW would hide.
SGD = (
    "--checkpoint.save_consolidated=false",
    "--optimizer={_target_: torch.optim.SGD, lr: 0.5}",
    "--lr_scheduler=null",
    "--step_scheduler.max_steps=4",
    "--step_scheduler.local_batch_size=2",
    "--step_scheduler.ckpt_every_steps=2",
)


def model_section(family: str) -> str:
    settings = {"model_type": family, **SIZES, **FAMILIES[family]}
    return f"--model.from_config={settings}"


def config_of(family: str, **settings: Any) -> Any:
    return CONFIG_MAPPING[family](**SIZES, **FAMILIES[family] | settings)


def model_of(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family), **options)


# ---------------------------------------------------------------- one layer


def outputs_and_gradients(module: Any, num_experts: int) -> list[torch.Tensor]:
    """The outputs of a module of experts, and the gradients of its inputs and parameters.

    Rank 0 has five tokens, which choose all experts; rank 1 has one token, which chooses only the first two.
    """
    torch.manual_seed(dist.get_rank())
    num_tokens = 1 if dist.get_rank() else 5
    tokens = torch.randn(num_tokens, SIZES["hidden_size"], requires_grad=True)
    chosen = torch.tensor([[0, 1]] * num_tokens)
    if dist.get_rank() == 0:
        chosen = torch.arange(10).remainder(num_experts).view(5, 2)
    weights = torch.rand(num_tokens, 2, requires_grad=True)
    output = module(tokens, chosen, weights)
    output.square().sum().backward()
    assert tokens.grad is not None
    assert weights.grad is not None
    return [output.detach(), tokens.grad, weights.grad]


def compare_families() -> None:
    for family in FAMILIES:
        expected, divided = model_of(family), model_of(family)
        mesh = init_device_mesh("cpu", (2,))
        changed = divide_experts(divided, mesh)
        originals = list(experts_of(expected).values())
        assert len(originals) == len(changed) > 0, family
        for original, module in zip(originals, changed, strict=True):
            ours = outputs_and_gradients(module, 4)
            theirs = outputs_and_gradients(original, 4)
            for found, value in zip(ours, theirs, strict=True):
                # The matrices have other sizes, for which a processor may have other kernels.
                torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5, msg=family)
            for (name, parameter), value in zip(
                module.named_parameters(), original.parameters(), strict=True
            ):
                assert isinstance(parameter.grad, DTensor)
                dist.all_reduce(value.grad)
                # The mean over the two ranks, as fsdp2 would leave it.
                mean = value.grad / 2
                torch.testing.assert_close(parameter.grad.full_tensor(), mean, msg=name)


def test_experts_of_two_ranks_compute_what_one_module_does_in_every_family() -> None:
    ranks.run(compare_families, 2)


def experts_without_tokens(implementation: str) -> None:
    """No token chooses an expert of rank 1, whose parameters get gradients of zeros.

    The implementation ``eager`` of transformers has a loop over the experts with tokens.
    """
    model = model_of("mixtral", experts_implementation=implementation)
    (module, *_) = divide_experts(model, init_device_mesh("cpu", (2,)))
    tokens = torch.randn(3, SIZES["hidden_size"])
    output = module(tokens, torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5))
    output.sum().backward()
    for parameter in module.parameters():
        gradient: Any = parameter.grad
        assert gradient.to_local().abs().sum() == 0 or dist.get_rank() == 0


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_ranks_whose_experts_get_no_token_have_gradients_of_zeros(implementation: str) -> None:
    ranks.run(experts_without_tokens, 2, implementation)


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("family", "num_ranks", "sizes"),
    [
        pytest.param(
            "qwen3_moe",
            4,
            ("--distributed.ep_size=2", "--model.activation_checkpointing=selective"),
            marks=pytest.mark.further,
        ),
        pytest.param(
            "gpt_oss",
            4,
            ("--distributed.ep_size=2", "--distributed.dp_replicate_size=2"),
            marks=pytest.mark.further,
        ),
        (
            "mixtral",
            2,
            (
                "--distributed.ep_size=2",
                "--distributed.cp_size=2",
                "--model.activation_checkpointing=true",
            ),
        ),
    ],
)
def test_a_run_logs_what_one_rank_does_and_resumes_exactly_on_any_ranks(
    family: str, num_ranks: int, sizes: tuple[str, ...], tmp_path: Path
) -> None:
    model = (*SGD, model_section(family))
    restore = "--checkpoint.restore_from={}/epoch_0_step_2"
    from_divided = restore.format(tmp_path / "divided")
    from_one = restore.format(tmp_path / "one")
    run(tmp_path, *model, name="one")
    divided = {
        "divided": (*model, *sizes),
        "resumed": (*model, *sizes, from_divided),
    }
    if num_ranks == 2:
        divided["on all"] = (*model, *sizes, from_one)
    whole, resumed, *_ = run_each(tmp_path, divided, num_ranks=num_ranks)
    assert resumed == whole
    run(tmp_path, *model, from_divided, name="on one")
    expected = lines_of_steps(tmp_path / "one/training.jsonl")
    for name in [*divided, "on one"]:
        steps = lines_of_steps(tmp_path / name / "training.jsonl")
        same = expected[-len(steps) :]
        for field in ("loss", "grad_norm"):
            found = [step[field] for step in steps]
            assert found == pytest.approx([step[field] for step in same], rel=1e-5), (name, field)


def test_an_export_has_all_experts_and_loads_in_transformers(tmp_path: Path) -> None:
    options = (*SGD, model_section("mixtral"), "--checkpoint.save_consolidated=final")
    run(tmp_path, *options, "--distributed.ep_size=2", name="divided", num_ranks=2)
    run(tmp_path, *options, name="one")
    models = []
    for name in ("divided", "one"):
        export = tmp_path / name / "epoch_0_step_4/model/consolidated"
        model, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
        assert not any(info.values())
        models.append(model.state_dict())
    divided, one = models
    for name, value in one.items():
        torch.testing.assert_close(divided[name], value, rtol=1e-4, atol=1e-6, msg=name)


# ---------------------------------------------------------------- errors


def test_models_without_experts_are_rejected(tmp_path: Path) -> None:
    error = failure(tmp_path, "--distributed.ep_size=2", text=RECIPE, num_ranks=2)
    assert "no experts" in str(error)
    assert "LlamaForCausalLM" in str(error)


def rejected() -> list[str]:
    messages = []
    for family, sizes, settings in (
        ("mixtral", {"ep_size": 2}, {"num_local_experts": 3}),
        ("mixtral", {"ep_size": 4}, {"num_local_experts": 6}),
    ):
        model: Any = AutoModelForCausalLM.from_config(config_of(family, **settings))
        with pytest.raises(RecipeError) as caught:
            check_experts(model, layout_here(**sizes))
        messages.append(str(caught.value))
    return messages


def test_experts_that_the_ranks_cannot_divide_evenly_are_rejected_with_sizes_that_fit() -> None:
    three, six = ranks.run(rejected, 4)[0]
    assert "3 experts, and 4 ranks" in three
    assert "a number of ranks that divides 3" in three
    assert "dp_replicate_size to 2" in six
    assert "ep_size to 2" in six
