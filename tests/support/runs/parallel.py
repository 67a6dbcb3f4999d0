"""Tiny models on any layout of real ranks, and a few steps with them whose losses can be compared."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    Qwen3Config,
)

from automodel_ckpt.parallel.gradients import clip_gradients, gradient_sync
from automodel_ckpt.parallel.mesh_sizes import RankLayout, share_out
from tests.support.models.sizes import model_sizes

VOCABULARY = 37  # divisible by nothing
GLOBAL_BATCH = 8
TOKENS = 8


def layout_here(**sizes: int) -> RankLayout:
    shared = share_out(dist.get_world_size(), **sizes)
    group = dist.group.WORLD
    assert group is not None
    return RankLayout(dist.get_rank(), shared, dist.get_rank(), torch.device("cpu"), group)


def config_of(kind: str = "llama", **settings: Any) -> Any:
    """Two layers; heads and widths that four ranks can share."""
    common: dict[str, Any] = {
        **model_sizes(hidden=32, inner=48, layers=2, heads=4, kv_heads=4, vocab=VOCABULARY),
        "initializer_range": 0.3,
        "head_dim": 8,
    }
    classes: dict[str, Any] = {
        "llama": LlamaConfig,
        "qwen3": Qwen3Config,
        "granite": GraniteConfig,
        "apertus": ApertusConfig,
    }
    return classes[kind](**common | settings)


def model_of(kind: str = "llama", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(kind, **settings))
    return model.train()


def train_steps(
    model: nn.Module, layout: RankLayout, num_steps: int = 2
) -> list[tuple[float, float]]:
    """(mean loss, gradient norm) of each of a few steps of AdamW over the same global batches on any layout."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True
    )
    return [
        _step(model, layout, optimizer, number, partial(_passes, model))
        for number in range(num_steps)
    ]


def global_batch(number: int) -> torch.Tensor:
    """The tokens of step *number* of all ranks together."""
    generator = torch.Generator().manual_seed(number)
    # Later steps have longer rows, for which stages of a pipeline exchange larger tensors.
    length = TOKENS if number else TOKENS // 2
    return torch.randint(0, VOCABULARY, (GLOBAL_BATCH, length), generator=generator)


def _step(
    model: nn.Module,
    layout: RankLayout,
    optimizer: torch.optim.Optimizer,
    number: int,
    passes: Callable[[Sequence[torch.Tensor], float], float],
    clip: Callable[[Iterable[nn.Parameter], float], float] = clip_gradients,
) -> tuple[float, float]:
    tokens = global_batch(number)
    mine = tokens.tensor_split(layout.dp_size)[layout.dp_rank]
    num_labels = tokens[:, 1:].numel()
    loss = passes(mine.chunk(2), layout.dp_size / num_labels)
    total = torch.tensor(loss if layout.reports else 0.0, dtype=torch.float64)
    norm = clip(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    if layout.world_size > 1:
        dist.all_reduce(total)
    return total.item() / num_labels, norm


def _passes(model: nn.Module, micro_batches: Sequence[torch.Tensor], weight: float) -> float:
    total = 0.0
    for index, part in enumerate(micro_batches, start=1):
        with gradient_sync(model, enabled=index == len(micro_batches)):
            loss = _loss(model(input_ids=part, use_cache=False).logits, part)
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
