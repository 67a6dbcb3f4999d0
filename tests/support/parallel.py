"""Tiny models on any layout of real ranks, and a few steps with them whose losses can be compared."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from automodel_ckpt.distributed.mesh import RankLayout
from automodel_ckpt.distributed.parallelize import clip_gradients, gradient_sync
from automodel_ckpt.distributed.sizes import share_out

VOCABULARY = 37  # divisible by nothing
GLOBAL_BATCH = 8
TOKENS = 8


def layout_here(**sizes: int) -> RankLayout:
    """The place of this process in a grid of all ranks there are."""
    shared = share_out(dist.get_world_size(), **sizes)
    group = dist.group.WORLD
    assert group is not None
    return RankLayout(dist.get_rank(), shared, dist.get_rank(), torch.device("cpu"), group)


def config_of(kind: str = "llama", **settings: Any) -> Any:
    """Two layers; heads and widths that four ranks can share."""
    common: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": VOCABULARY, "initializer_range": 0.3, "head_dim": 8,
    }  # fmt: skip
    return (Qwen3Config if kind == "qwen3" else LlamaConfig)(**common | settings)


def model_of(kind: str = "llama", **settings: Any) -> nn.Module:
    """The same weights whenever it is called."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(kind, **settings))
    return model.train()


def train_steps(model: nn.Module, layout: RankLayout, num_steps: int = 2) -> list[tuple[float, float]]:
    """(mean loss, gradient norm) of each of a few steps of AdamW over the same global batches on any layout."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    return [_step(model, layout, optimizer, number) for number in range(num_steps)]


def _step(model: nn.Module, layout: RankLayout, optimizer: torch.optim.Optimizer, number: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, TOKENS), generator=generator)
    mine = tokens.tensor_split(layout.dp_size)[layout.dp_rank]
    num_labels, total = GLOBAL_BATCH * (TOKENS - 1), torch.zeros((), dtype=torch.float64)
    micro_batches = mine.chunk(2)
    for index, part in enumerate(micro_batches, start=1):
        with gradient_sync(model, enabled=index == len(micro_batches)):
            logits = model(input_ids=part, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            (loss * layout.dp_size / num_labels).backward()
        total += loss.item() if layout.reports else 0.0
    norm = clip_gradients(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    if layout.world_size > 1:
        dist.all_reduce(total)
    return total.item() / num_labels, norm
