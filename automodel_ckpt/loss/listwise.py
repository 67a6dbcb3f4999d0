"""The loss of scores in lists: the first of each list has to be the highest (listwise softmax)."""

from __future__ import annotations

import torch
from torch import Tensor


def listwise_losses(scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The loss [Q] of each list, and the rank [Q] of its first score, from 1.

    *scores* [R] has the lists one after another, *counts* [Q] the lengths of the lists. The loss is the
    cross-entropy of choosing the first one by a softmax over the list. An equal score counts as a better one, so that
    equal scores are never right.
    """
    # Computed where the counts are, on the host: a GPU would have to finish its work first, and again in the backward
    # pass of a mask.
    counts = counts.cpu()
    longest = int(counts.max()) if len(counts) else 1
    number = torch.arange(len(counts)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    position = torch.arange(len(number)) - first
    places = (number * longest + position).to(scores.device)
    empty = scores.new_full((len(counts) * longest,), -torch.inf)
    lists = empty.index_copy(0, places, scores).view(-1, longest)
    losses = lists.logsumexp(dim=1) - lists[:, 0]
    ranks = (lists.detach() >= lists.detach()[:, :1]).sum(dim=1)
    return losses, ranks
