"""The router's load balancing loss: that of one pass of transformers over the global batch, however it is divided."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.distributed.kinds.test_training import failure, lines_of_steps, run
from tests.support import ranks
from tests.support.models import experts
from tests.support.models.whole_state import whole_state
from tests.support.runs.training import build, write_recipe
from tests.support.runs.training_parts import uneven

COEFFICIENT = 0.5
SIZES = experts.SIZES | {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8},
}
ONE_STEP = (
    "--dataset={_target_: tests.support.runs.training_parts.uneven, num_samples: 8}",
    "--dataloader.shuffle=false",
    "--optimizer={_target_: torch.optim.SGD, lr: 1.0}",
    "--clip_grad_norm=null",
    "--lr_scheduler=null",
    "--step_scheduler.max_steps=1",
)
SPLITS: dict[str, tuple[int, tuple[str, ...]]] = {
    "padded": (1, ("--step_scheduler.local_batch_size=8", "--dataloader.padding_free=false")),
    "accumulated": (
        1,
        ("--step_scheduler.local_batch_size=2", "--model.activation_checkpointing=true"),
    ),
    "packed": (1, ("--packed_sequence.size=10", "--step_scheduler.local_batch_size=2")),
    "sharded": (2, ("--step_scheduler.local_batch_size=1", "--distributed.strategy=fsdp2")),
    "replicated": (2, ("--step_scheduler.local_batch_size=4", "--distributed.strategy=ddp")),
}


def model_section(family: str) -> str:
    settings = {"model_type": family, **SIZES, **EXPERTS[family]}
    return (
        "--model.from_config={"
        + ", ".join(f"{key}: {value}" for key, value in settings.items())
        + "}"
    )


def one_step(
    recipe_file: Path, *overrides: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights before a step of SGD with a learning rate of 1, and its gradients."""
    recipe = build(recipe_file, *overrides)
    try:
        recipe.setup()
        before = whole_state(recipe.model, with_buffers=False)
        recipe.run()
        after = whole_state(recipe.model, with_buffers=False)
        return before, {name: before[name] - after[name] for name in after}
    finally:
        recipe.close()


def reference(
    family: str, weights: dict[str, torch.Tensor]
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, router's loss and gradients of transformers for the global batch in one padded forward pass."""
    model: Any = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**SIZES, **EXPERTS[family]), attn_implementation="eager"
    )
    model.load_state_dict(weights)
    samples = uneven(8)
    width = max(len(sample["input_ids"]) for sample in samples)
    tokens = torch.tensor(
        [sample["input_ids"] + [0] * (width - len(sample["input_ids"])) for sample in samples]
    )
    labels = torch.tensor(
        [sample["labels"] + [-100] * (width - len(sample["labels"])) for sample in samples]
    )
    mask = torch.tensor(
        [[1] * len(s["labels"]) + [0] * (width - len(s["labels"])) for s in samples]
    )
    output = model(input_ids=tokens, attention_mask=mask, use_cache=False)
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    (loss + COEFFICIENT * output.aux_loss).backward()
    return (
        loss.item(),
        output.aux_loss.item(),
        {name: p.grad for name, p in model.named_parameters()},
    )


@pytest.mark.parametrize(
    ("family", "splits"),
    [
        ("mixtral", ("accumulated", "packed")),
        ("qwen3_moe", ("sharded",)),
        pytest.param("mixtral", ("padded", "replicated"), marks=pytest.mark.further),
    ],
)
def test_the_loss_and_its_gradient_are_those_of_one_forward_pass_over_the_global_batch(
    family: str, splits: tuple[str, ...], tmp_path: Path
) -> None:
    for split in splits:
        num_ranks, overrides = SPLITS[split]
        directory = f"--checkpoint.checkpoint_dir={tmp_path / split}"
        step = partial(
            one_step,
            write_recipe(tmp_path),
            directory,
            *ONE_STEP,
            model_section(family),
            *overrides,
        )
        weights, gradients = ranks.run(step, num_ranks, init=False)[0]
        loss, aux_loss, expected = reference(family, weights)
        (line,) = lines_of_steps(tmp_path / split / "training.jsonl")
        assert line["loss"] == pytest.approx(loss, rel=1e-6), split
        assert line["aux_loss"] == pytest.approx(aux_loss, rel=1e-6), split
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=1e-4, atol=2e-6, msg=f"{split}: {name}"
            )


def test_it_can_be_left_out_or_computed_for_each_micro_batch_and_no_pipeline_drops_it(
    tmp_path: Path,
) -> None:
    found = {}
    for over in ("false", "micro_batch"):
        overrides = (*ONE_STEP, model_section("mixtral"), f"--model.router_aux_loss={over}")
        run(tmp_path, *overrides, "--step_scheduler.local_batch_size=2", name=over)
        (found[over],) = lines_of_steps(tmp_path / over / "training.jsonl")
    assert "aux_loss" not in found["false"]
    assert found["micro_batch"]["aux_loss"] > 1
    assert found["micro_batch"]["loss"] == found["false"]["loss"]
    assert found["micro_batch"]["grad_norm"] != found["false"]["grad_norm"]
    refused = failure(
        tmp_path, *ONE_STEP, model_section("mixtral"), "--distributed.pp_size=2", num_ranks=2
    )
    assert "a pipeline stage has only some" in str(refused)
