"""With learning rates by width, the best learning rate of a narrow model is that of a wide one."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_ckpt.config.keys.optimizer import OptimizerConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.training.parts.optimizers import build_optimizer
from automodel_ckpt.training.parts.width import factor_of, scale_initial_values

BASE = 32
RATES = (4e-3, 1.6e-2, 6.4e-2)


def config_of(width: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        initializer_range=0.1,
        tie_word_embeddings=False,
        max_position_embeddings=16,
    )


def batches() -> list[torch.Tensor]:
    """Sequences in which two tokens determine the next one."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(25):
        tokens = torch.randint(0, 64, (16, 16), generator=generator)
        for position in range(2, 16):
            tokens[:, position] = (3 * tokens[:, position - 1] + tokens[:, position - 2]) % 64
        found.append(tokens)
    return found


def best_rate(width: int, *, is_scaled: bool) -> float:
    """The one of :data:`RATES` with the lowest mean loss of the last steps."""
    losses = {}
    for rate in RATES:
        torch.manual_seed(1)
        config = config_of(width)
        model = LlamaForCausalLM(config)
        factor = factor_of(config, BASE) if is_scaled else 1.0
        if factor != 1:
            scale_initial_values(model, factor)
        optimizer, _ = build_optimizer(
            OptimizerConfig(lr=rate), model, add_up=list, takes_own_steps=False, width_factor=factor
        )
        last = []
        for tokens in batches():
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last.append(loss.item())
        losses[rate] = sum(last[-5:])
    return min(losses, key=losses.__getitem__)


def test_the_best_learning_rate_is_the_same_for_another_width() -> None:
    assert best_rate(BASE, is_scaled=True) == RATES[1]
    assert best_rate(8 * BASE, is_scaled=True) == RATES[1]
    # Otherwise it depends on the width.
    assert best_rate(8 * BASE, is_scaled=False) == RATES[0]


def test_a_tied_output_layer_has_no_factor() -> None:
    tied = config_of(BASE)
    tied.tie_word_embeddings = True
    with pytest.raises(RecipeError, match=r"tied to the embedding[\s\S]*base_width"):
        factor_of(tied, BASE)
