"""The settings of tiny mixtures of experts, for configurations of transformers."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 304,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
