"""The labels of multi-token prediction: which token each depth has to predict at each position.

Depth k (from 1) predicts at position i the label of position i + 1 + k, if both positions are in the same sample: it
does not predict across samples that share a row. The loss of a depth is the sum of its cross-entropies. The loss of a
micro-batch is the mean over the depths. The caller divides it by the label tokens of the global batch, as the main
loss. Fewer labels are predicted at a greater depth; the divisor stays the same, as in NeMo AutoModel and Megatron-LM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from automodel_ckpt.loss.causal import IGNORE_INDEX

MTP_LOSS = "mtp_loss"
"""The metric of a micro-batch that is the mean of its depths' summed losses."""


def labels_of_depths(labels: Tensor, num_depths: int, position_ids: Tensor | None = None) -> Tensor:
    """The labels [(1 + D) * B, T] of the model and of D depths, from labels [B, T] that are not shifted.

    They are shifted like the model's labels: position i predicts the label of position i + 1. *position_ids* [B, T]
    restart at 0 with each sample of a row; None, or another shape: each row is one sample.
    """
    sample = torch.zeros_like(labels)
    if position_ids is not None and position_ids.shape == labels.shape:
        sample = (position_ids == 0).cumsum(1)
    found = [labels]
    for depth in range(1, num_depths + 1):
        shifted = torch.full_like(labels, IGNORE_INDEX)
        # Column j of the result is read as the label that position j - 1 predicts. It comes from column j + depth.
        last = labels.shape[1] - depth
        if last > 1:
            targets = labels[:, 1 + depth :]
            is_same_sample = sample[:, : last - 1] == sample[:, 1 + depth :]
            shifted[:, 1:last] = targets.masked_fill(~is_same_sample, IGNORE_INDEX)
        found.append(shifted)
    return torch.cat(found)
