"""Parameters that the class of a model creates in float32 although the model is in 16 bits."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, XLNetConfig

from automodel_ckpt.models.meta_init import constants_in, float32_kept, float32_names
from automodel_ckpt.models.quantize import cast_to
from tests.support.models.sizes import model_sizes

SIZES: dict[str, Any] = model_sizes(vocab=32, hidden=16, inner=16, layers=2, heads=2)
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


def test_factors_of_activations_in_files_are_cast_with_the_layers() -> None:
    """MiniMax multiplies activations by decays that its files contain; in float32, the next layer would fail."""
    config = AutoConfig.for_model(
        "minimax",
        **model_sizes(vocab=40, hidden=16, inner=16, layers=2, heads=2, kv_heads=1),
        head_dim=8,
        block_size=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["linear_attention", "full_attention"],
    )
    model = AutoModelForCausalLM.from_config(config)
    decays = constants_in(model, torch.bfloat16)
    assert "model.layers.0.self_attn.slope_rate" in decays
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16()
    for name, buffer in model.named_buffers():
        if name in decays:
            buffer.data = buffer.bfloat16()
    assert model(torch.arange(8)[None], use_cache=False).logits.isfinite().all()
