"""What the config of a mixture of experts states about the loss of its routers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, Qwen3MoeConfig

from automodel_ckpt.models.model_checks import RouterSettings, router_settings, unused_coefficient


@pytest.mark.parametrize(
    ("config", "settings", "unused"),
    [
        (
            Qwen3MoeConfig(
                output_router_logits=True, router_aux_loss_coef=0.5, num_experts_per_tok=2
            ),
            RouterSettings(0.5, 2),
            None,
        ),
        (Qwen3MoeConfig(router_aux_loss_coef=0.5), None, 0.5),
        (Qwen3MoeConfig(router_aux_loss_coef=0.0), None, None),
        (LlamaConfig(), None, None),
        (None, None, None),
    ],
)
def test_a_coefficient_without_the_request_for_the_loss_is_unused(
    config: Any, settings: RouterSettings | None, unused: float | None
) -> None:
    model = nn.Identity()
    model.config = config
    assert router_settings(model) == settings
    assert unused_coefficient(model) == unused
