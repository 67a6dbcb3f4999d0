"""Expert parallelism: the losses, gradients and checkpoints are those of one rank, whatever the ranks store."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.kinds.test_training import failure, lines_of_steps, run_each
from tests.support.models.experts import SIZES
from tests.support.runs.training import EXPORT, RECIPE

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8},
}
# SGD shows a wrong scale of a gradient, which AdamW would hide.
SGD = (
    "--optimizer={_target_: torch.optim.SGD, lr: 0.5}",
    "--lr_scheduler=null",
    "--step_scheduler.max_steps=4",
    "--step_scheduler.local_batch_size=2",
    "--step_scheduler.ckpt_every_steps=2",
)


def model_section(family: str) -> str:
    settings = {"model_type": family, **SIZES, **FAMILIES[family]}
    return f"--model.from_config={settings}"


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("family", "num_ranks", "sizes"),
    [
        pytest.param(
            "qwen3_moe",
            4,
            ("--distributed.ep_size=2", "--model.activation_checkpointing=true"),
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
    back = f"--checkpoint.restore_from={tmp_path / 'divided/epoch_0_step_2'}"
    divided = {"divided": (*model, *sizes, EXPORT), "resumed": (*model, *sizes, back)}
    whole, resumed = run_each(tmp_path, divided, num_ranks=num_ranks)
    assert resumed == whole
    run_each(tmp_path, {"one": (*model, EXPORT), "on one": (*model, back)}, num_ranks=1)
    expected = lines_of_steps(tmp_path / "one/training.jsonl")
    for name in ("divided", "resumed", "on one"):
        steps = lines_of_steps(tmp_path / name / "training.jsonl")
        same = expected[-len(steps) :]
        for field in ("loss", "grad_norm"):
            found = [step[field] for step in steps]
            assert found == pytest.approx([step[field] for step in same], rel=1e-5), (name, field)
    of_divided, of_one = (exported(tmp_path / name) for name in ("divided", "one"))
    for name, value in of_one.items():
        torch.testing.assert_close(of_divided[name], value, rtol=1e-4, atol=1e-6, msg=name)


def exported(run_directory: Path) -> dict[str, torch.Tensor]:
    """What transformers reads of a run's export, which has all experts."""
    export = run_directory / "epoch_0_step_4/model/consolidated"
    model, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(info.values())
    return dict(model.state_dict())


# ---------------------------------------------------------------- errors


def test_models_without_experts_are_rejected(tmp_path: Path) -> None:
    error = failure(tmp_path, "--distributed.ep_size=2", text=RECIPE, num_ranks=2)
    assert "no experts" in str(error)
    assert "LlamaForCausalLM" in str(error)


def test_experts_that_the_ranks_cannot_divide_evenly_are_rejected(tmp_path: Path) -> None:
    section = model_section("mixtral").replace("'num_local_experts': 4", "'num_local_experts': 3")
    sizes = ("--distributed.ep_size=2", "--step_scheduler.local_batch_size=2")
    error = str(failure(tmp_path, section, *sizes, num_ranks=4))
    assert "3 experts, and 4 ranks" in error
    assert "the ranks that shard the model divide 3" in error
