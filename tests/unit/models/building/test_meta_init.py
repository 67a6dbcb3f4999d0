"""Values for models that were built without memory."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from automodel_ckpt.models.meta_init import InitialValues, allocate, initialise, on_meta
from tests.support.runs.parallel import config_of


def skeleton(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    return on_meta(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))


def drawn(config: PreTrainedConfig, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    model = skeleton(config, dtype)
    modules = dict(model.named_modules())
    allocate(model, torch.device("cpu"))
    values = InitialValues(skeleton(config, dtype), seed)
    initialise(modules, values, lambda name, module: lambda key: True)
    return model


def test_values_follow_the_seed_and_the_modules_name_only() -> None:
    before = torch.get_rng_state()
    one, same, other = (
        drawn(config_of(), 1),
        drawn(config_of(num_hidden_layers=1), 1),
        drawn(config_of(), 2),
    )
    assert torch.equal(torch.get_rng_state(), before)
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(
        one.model.layers[0].mlp.up_proj.weight, one.model.layers[1].mlp.up_proj.weight
    )


def test_values_in_16_bits_are_those_in_float32_rounded() -> None:
    model = drawn(config_of(), 1)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = drawn(config_of(), 1, dtype).state_dict()
        for name, value in model.state_dict().items():
            assert rounded[name].dtype == dtype
            assert torch.equal(rounded[name], value.to(dtype)), name


class OfItsConstructor(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.post_init()


def test_values_that_only_a_constructor_knows_are_noticed() -> None:
    assert InitialValues(skeleton(config_of("qwen3")), 0).are_complete()
    assert not InitialValues(
        on_meta(lambda: OfItsConstructor(PreTrainedConfig())), 0
    ).are_complete()
