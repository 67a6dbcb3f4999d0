"""Parameters that a model's class creates without gradients, in a model that is read from files."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.config.sections.model import ModelConfig
from automodel_ckpt.recipes.model.deferred_model import build_deferred

BIAS = "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"
"""It selects experts, and stays in float32, so that each rank builds the complete model."""


def test_they_are_not_trained(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"moe_num_experts": 4, "moe_intermediate_size": 8, "moe_k": 2}
    config = AutoConfig.for_model(
        "ernie4_5_moe", vocab_size=32, hidden_size=16, intermediate_size=16, **sizes, **experts
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    deferred = build_deferred(
        ModelConfig(from_pretrained=str(tmp_path), dtype="bfloat16"),
        AutoConfig.from_pretrained(tmp_path),
        base=str(tmp_path),
        auto_class=AutoModelForCausalLM,
        seed=1,
        group=None,
    )
    assert deferred.materialise is None
    frozen = [name for name, each in deferred.model.named_parameters() if not each.requires_grad]
    assert frozen == [BIAS]
