"""What fsdp2 gathers together and in which order, on two ranks, and what a failed forward pass leaves."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModel

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.layers.adapter import add_adapters
from automodel_ckpt.models.layers.lora import Lora
from automodel_ckpt.parallel.parallelize import Parallelism, parallelize, reshard
from tests.support import ranks
from tests.support.models.sizes import model_sizes
from tests.support.runs.parallel import VOCABULARY, layout_here, model_of

LAYERS = ["model.layers.0", "model.layers.1"]
LARGE_VOCABULARY = 600
"""Embeddings of so many rows are larger than a layer, those of VOCABULARY smaller."""


def sharded_model(kind: str) -> nn.Module:
    num_rows = VOCABULARY if kind == "small" else LARGE_VOCABULARY
    model = model_of(tie_word_embeddings=kind == "tied", vocab_size=num_rows)
    if kind == "adapters":
        lora = Lora(modules_to_save=["lm_head"])
        model = add_adapters(model, lora, task_type=None, num_base_rows=num_rows).model
    return parallelize(model, layout_here(), Parallelism("fsdp2"))


def forward_after_a_failed_one() -> tuple[bool, float, float]:
    """Whether all parameters are sharded after a failure, and the next two outputs after the weights changed."""
    model = sharded_model("untied")
    tokens = torch.zeros(1, 4, dtype=torch.long)

    def fail(*_: Any) -> None:
        raise ValueError("not supported")

    handle = model.get_submodule(LAYERS[0]).register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="not supported"):
        model(input_ids=tokens, use_cache=False)
    handle.remove()
    reshard(model)
    is_sharded = all(hasattr(parameter, "to_local") for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        outputs = []
        for _ in range(2):
            outputs.append(model(input_ids=tokens, use_cache=False).logits.sum().item())
            reshard(model)
    return is_sharded, outputs[0], outputs[1]


def test_a_forward_pass_that_failed_leaves_nothing_gathered_or_prefetched() -> None:
    for is_sharded, first, second in ranks.run(forward_after_a_failed_one, 2):
        assert is_sharded
        assert first == second


def test_an_embedding_within_a_block_is_gathered_when_it_is_called_without_the_block() -> None:
    """ModernVBERT calls the embedding of ModernBERT's first block, to put image features between its results."""

    def found() -> tuple[list[str], torch.Size]:
        config = AutoConfig.for_model(
            "modernbert",
            **model_sizes(vocab=LARGE_VOCABULARY, hidden=16, inner=16, layers=2, heads=2),
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        )
        model: Any = AutoModel.from_config(config)
        forward = model.forward
        model.forward = lambda tokens: forward(inputs_embeds=model.get_input_embeddings()(tokens))
        parallelize(model, layout_here(), Parallelism("fsdp2"))
        names = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
        return names, model(torch.arange(6).view(1, 6)).last_hidden_state.shape

    names, shape = ranks.run(found, 1)[0]
    assert names == ["", "embeddings.tok_embeddings", "layers.0", "layers.1"]
    assert shape == (1, 6, 16)


class Scaled(nn.Module):
    """It has a parameter without dimensions, and one without elements, such as no register tokens (DINOv3)."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.registers = nn.Parameter(torch.empty(1, 0, 8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return torch.cat([self.registers, inputs], dim=1) * self.scale


def test_parameters_without_dimensions_are_replicated_and_those_without_elements_frozen() -> None:
    inputs = torch.randn(1, 4, 8)

    def found() -> tuple[torch.Tensor, torch.Tensor]:
        model = Scaled()
        how = Parallelism("fsdp2", compute_dtype=torch.bfloat16)
        with pytest.raises(RecipeError, match=r"(?s)without dimensions.*fsdp2, scale"):
            parallelize(model, layout_here(), how)
        model.scale.requires_grad_(False)
        sharded = parallelize(model, layout_here(), how)
        outputs = sharded(inputs)
        outputs.float().mean().backward()
        assert model.registers.grad is None
        gradient: Any = model.layers[0].weight.grad
        return outputs.detach(), gradient.full_tensor()

    plain: Any = Scaled().bfloat16()
    outputs = plain(inputs.bfloat16())
    outputs.float().mean().backward()
    for each, gradient in ranks.run(found, 2):
        assert torch.equal(each, outputs)
        assert torch.equal(gradient, plain.layers[0].weight.grad.float())
