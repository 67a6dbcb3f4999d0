"""The loss of scores in lists: the first of each list has to be the highest (listwise softmax)."""

from __future__ import annotations

import torch


def listwise_losses(
    scores: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss [Q] of each list, and the rank [Q] of its first score, from 1.

    *scores* [R] are those of the lists one after another, *counts* [Q] the lengths of the lists. The loss is the
    cross-entropy of choosing the first one by a softmax over the list. An equal score counts as a better one, so that
    equal scores are never right.
    """
    counts = counts.to(scores.device)
    longest = int(counts.max()) if len(counts) else 1
    is_there = torch.arange(longest, device=scores.device) < counts.unsqueeze(1)
    lists = scores.new_full(is_there.shape, -torch.inf).masked_scatter(is_there, scores)
    losses = lists.logsumexp(dim=1) - lists[:, 0]
    ranks = (lists.detach() >= lists.detach()[:, :1]).sum(dim=1)
    return losses, ranks
