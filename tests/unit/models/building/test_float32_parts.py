"""Parameters that the class of a model creates in float32 although the model is in 16 bits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    XLNetConfig,
)

from automodel_ckpt.models.inspect.float32_parts import constants_in, float32_kept, float32_names
from automodel_ckpt.models.quantize import cast_to

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GATES = {f"model.layers.{layer}.mlp.gate.wg.weight" for layer in range(2)}


def mixture() -> Any:
    """A mixture whose routers are linear layers in float32. No list of its class names them."""
    config = AutoConfig.for_model(
        "hunyuan_v1_moe",
        **SIZES,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=2,
        moe_topk=[1, 1],
        pad_token_id=0,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    assert not model._keep_in_fp32_modules_strict
    return model


def test_parameters_that_the_class_creates_in_float32_are_kept() -> None:
    model = mixture()
    assert float32_names(model, torch.bfloat16) == GATES
    assert not float32_names(model, None)
    assert float32_kept(model) == {"BF16": GATES, "F16": GATES}
    cast_to(model, torch.bfloat16)
    types = {name: each.dtype for name, each in model.named_parameters()}
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    assert types == {name: each.dtype for name, each in plain.named_parameters()}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_names_with_adapters_and_of_other_pipeline_stages_are_found() -> None:
    model = mixture()
    config = LoraConfig(r=2, target_modules=["q_proj", "wg"])
    names = float32_names(get_peft_model(model, config), torch.bfloat16)
    inserted = {name.replace("wg.", "wg.base_layer.") for name in GATES}
    assert names == {f"base_model.model.{name}" for name in inserted}

    stage = mixture()
    stage.model.layers[1] = nn.Identity()
    assert float32_kept(stage)["BF16"] == GATES


def test_parameters_that_the_model_cannot_use_in_float32_are_cast() -> None:
    """XLNet multiplies hidden states in bfloat16 by matrices in float32, which is an error of torch."""
    config = XLNetConfig(vocab_size=32, d_model=16, n_layer=1, n_head=2, d_inner=16)
    built: Any = AutoModel.from_config(config, dtype=torch.bfloat16)
    created = {name for name, each in built.named_parameters() if each.dtype == torch.float32}
    assert "layer.0.rel_attn.q" in created
    model = AutoModel.from_config(config)
    assert not float32_names(model, torch.bfloat16)
    # from_pretrained reads them in float32.
    assert float32_kept(model)["BF16"] == created


class Positions(PreTrainedModel):
    """Adds positions, which it creates in float32, to embeddings, and normalizes the sums."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(32, 16)
        self.positions = nn.Parameter(torch.zeros(16, dtype=torch.float32))
        self.norm = nn.LayerNorm(16)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(input_ids)
        sums = embedded + self.positions
        if self.config.converts:
            sums = sums.to(embedded.dtype)
        outputs: torch.Tensor = self.norm(sums)
        return outputs


@pytest.mark.parametrize("converts", [False, True])
def test_they_are_cast_where_torch_rejects_the_types_of_values(converts: bool) -> None:
    """Without values, torch accepts a layer normalization in bfloat16 of inputs in float32."""
    config: Any = LlamaConfig()
    config.converts = converts
    model: Any = Positions(config)
    plain = model._from_config(config, dtype=torch.bfloat16)
    with nullcontext() if converts else pytest.raises(RuntimeError, match="mixed dtype"):
        plain(torch.zeros(1, 2, dtype=torch.long))
    names = {"positions"} if converts else set()
    assert float32_names(model, torch.bfloat16) == names


class Decays(PreTrainedModel):
    """Multiplies activations by decays that its files contain."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(32, 16)
        self.start = torch.rand(1, device="cpu")
        self.register_buffer("decays", torch.ones(16, 16))
        self.norm = nn.BatchNorm1d(16)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(input_ids)
        decays = self.decays
        if self.config.converts:
            decays = decays.to(embedded.dtype)
        outputs: torch.Tensor = embedded @ decays
        return outputs


@pytest.mark.parametrize("converts", [False, True])
def test_buffers_of_files_are_cast_only_if_the_model_needs_it(converts: bool) -> None:
    """MiniMax multiplies by such decays. A bias that selects experts is more exact in float32."""
    config: Any = LlamaConfig()
    config.converts = converts
    names = set() if converts else {"decays"}
    model = Decays(config)
    state = torch.get_rng_state()
    assert constants_in(model, torch.bfloat16) == names
    assert torch.equal(torch.get_rng_state(), state)
