"""NEFTune: uniform noise on the embeddings of tokens in training.

Source: Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", 2023. The noise of a token is uniform
between -m and m in each dimension, with m = alpha / sqrt(L * d): L is the number of tokens of its sample, and d the
size of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class EmbeddingNoise:
    """Adds noise to what the input embedding of a model returns in training mode. The noise is not a part of the model.

    Call :meth:`note_rows` before each forward pass: L is the length of a sample, not of its row. The numbers are
    drawn from the generator of the embeddings' device. Checkpoints store its state.
    """

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        """Register a hook on *embedding*, which returns a tensor [rows, T, d]. Do it after sharding: the hook then gets
        complete embeddings."""
        self.alpha = alpha
        self._lengths: Tensor | None = None
        embedding.register_forward_hook(self._add_noise)

    def note_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Note the lengths of the samples in *rows*, the inputs of the next forward pass, of shape [rows, T]."""
        self._lengths = sample_lengths(rows)

    def _add_noise(self, module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        rows = output.shape[:2]
        length, size = output.shape[-2:]
        if self._lengths is not None and self._lengths.shape == rows:
            lengths = self._lengths.to(output.device)
        else:
            lengths = torch.full(rows, float(length), device=output.device)
        largest = self.alpha / torch.sqrt(lengths * size)
        noise = torch.empty_like(output).uniform_(-1, 1)
        return output + noise * largest.unsqueeze(-1).to(output.dtype)


def sample_lengths(rows: Mapping[str, Tensor]) -> Tensor | None:
    """Return for each token the number of tokens of its sample, float32 of shape [rows, T]. None when rows are samples.

    Samples in one row begin at position 0 of ``position_ids`` [rows, T]. In a padded row, ``attention_mask`` marks the
    tokens of its sample. Positions without a token get a length of 1 or more, too.
    """
    positions = rows.get("position_ids")
    if positions is not None and positions.dim() == 2:
        # The number of the sample in its row, from 0 or 1.
        sample = (positions == 0).cumsum(1)
        counts = torch.zeros(sample.shape[0], sample.shape[1] + 1, device=sample.device)
        counts.scatter_add_(1, sample, torch.ones_like(sample, dtype=torch.float32))
        return counts.gather(1, sample)
    mask = rows.get("attention_mask")
    if mask is None or mask.dim() != 2:
        return None
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    return lengths.to(torch.float32).expand(mask.shape)
