"""The settings of tiny mixtures of experts, for configurations of transformers."""

from typing import Any

from tests.support.models.sizes import model_sizes

SIZES: dict[str, Any] = {
    **model_sizes(hidden=16, inner=16, layers=2, vocab=304, heads=2, kv_heads=2, positions=32),
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "n_group": 2,
    "topk_group": 1,
}
"""Experts in groups, as in DeepSeek-V3."""
LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
"""Latent attention, as in DeepSeek-V3."""
