"""The load balancing loss of a mixture of experts' router, over the tokens of a whole global batch.

The loss is transformers' (``load_balancing_loss_func``; Switch Transformer, equations 4 to 6): with E experts
and the N tokens of all layers together,

    aux_loss = E * sum over the experts of (assigned / N) * (probabilities / N)

where *assigned* is how many of the top-k choices went to an expert, and *probabilities* the sum of its routing
probabilities. transformers computes it for one forward pass. As a product of two means it depends on how a batch is
divided. Here both means are over the global batch, so that the loss is the one of a single forward pass over all of it,
for any accumulation and any number of ranks.

Choices have no gradient. Once the assigned counts of the global batch are known, the loss is a sum over tokens, and
each micro-batch adds its share in a separate backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automodel_ckpt.base.device_copies import to_device
from automodel_ckpt.errors import replaced_forward_pass

SumOverRanks = Callable[..., list[float]]


@dataclass(frozen=True)
class Routing:
    """Sums over the tokens and layers of a micro-batch.

    *assigned* [E]: how often each expert was chosen, without gradient. *probabilities* [E]: the sum of each expert's
    routing probabilities. *num_rows* is the number of tokens times the number of layers.
    """

    assigned: Tensor
    probabilities: Tensor
    num_tokens: float
    num_rows: float


def routing_of(
    router_logits: Sequence[Tensor], top_k: int, is_token: Tensor | None = None
) -> Routing:
    """Sum the routing of one forward pass.

    *router_logits* contains [B * T, E] of each layer. *is_token* [B, T] is 0 for padding, which does not count; None
    means that there is no padding.
    """
    mask = None
    num_tokens = float(len(router_logits[0]))
    if is_token is not None:
        # Counted before the mask is on a GPU, where the host would wait for it.
        num_tokens = float(is_token.sum())
        mask = to_device(is_token.reshape(-1, 1).to(torch.float32), router_logits[0].device)
    assigned, probabilities = [], []
    for logits in router_logits:
        weights = torch.softmax(logits, dim=-1)
        chosen = torch.topk(weights, top_k, dim=-1).indices
        choices = torch.zeros(weights.shape, dtype=torch.float32, device=weights.device)
        choices.scatter_(1, chosen, 1.0)
        # After topk, so that ties between experts are transformers' in the model's dtype.
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        if mask is not None:
            choices, weights = choices * mask, weights * mask
        assigned.append(choices.sum(0))
        probabilities.append(weights.sum(0))
    return Routing(
        assigned=torch.stack(assigned).sum(0),
        probabilities=torch.stack(probabilities).sum(0),
        num_tokens=num_tokens,
        num_rows=num_tokens * len(router_logits),
    )


def load_balancing_loss(routing: Routing) -> Tensor:
    """The loss of one forward pass, 0-dim; equal to transformers'."""
    num_rows = max(routing.num_rows, 1.0)
    return _loss(routing.assigned / num_rows, routing.probabilities / num_rows)


def _loss(assigned: Tensor, probabilities: Tensor) -> Tensor:
    return len(assigned) * (assigned.to(probabilities.dtype) * probabilities).sum()


class RouterLoss:
    """Computes the part of the router's loss that each micro-batch adds to the loss of its global batch.

    *over* is ``global_batch``, or ``micro_batch``: then each micro-batch has a separate loss, weighted by its tokens,
    which depends on the local batch size but requires no second forward pass. *coefficient* is the weight of the loss.
    *counts_here* is false on ranks with tokens that another rank counts.
    """

    def __init__(
        self,
        coefficient: float,
        top_k: int,
        over: str,
        *,
        sum_over_ranks: SumOverRanks,
        counts_here: bool,
    ) -> None:
        self.coefficient, self.top_k, self.over = coefficient, top_k, over
        self._sum_over_ranks, self._counts_here = sum_over_ranks, counts_here
        self._noted: Routing | None = None
        self._shares: list[Tensor] = []
        self._num_tokens = 0
        self._assigned: Tensor | None = None
        self._num_rows = 0.0

    def of_logits(self, router_logits: Sequence[Tensor]) -> Tensor:
        """The loss of one forward pass without padding, from the router logits [B * T, E] of each layer; 0-dim."""
        return load_balancing_loss(routing_of(router_logits, self.top_k))

    def start_step(self, num_tokens: int) -> None:
        """Begin a global batch of *num_tokens* tokens, counted over all ranks."""
        self._num_tokens = num_tokens
        self._assigned = None
        self._shares = []

    def note(self, output: Any, is_token: Tensor | None) -> None:
        """Record the router logits in the *output* of the model for a micro-batch."""
        self._noted = routing_of(output.router_logits, self.top_k, is_token)

    def needs_counts(self, num_micro_batches: int) -> bool:
        """Whether all micro-batches require a forward pass before the first backward pass, to count the choices."""
        return self.over == "global_batch" and num_micro_batches > 1

    def take_noted(self) -> Routing:
        """Return and clear the sums of the last micro-batch.

        Raises :class:`RecipeError` if :meth:`note` was not called.
        """
        if self._noted is None:
            raise replaced_forward_pass(
                "the router's load balancing loss", "set model.router_aux_loss: false"
            )
        noted, self._noted = self._noted, None
        return noted

    def count(self, micro_batches: Sequence[Routing]) -> None:
        """Sum the choices in all micro-batches of the step, over all ranks. Collective."""
        # float64: counts are exact, so the sums do not depend on the number of ranks or their
        # order.
        counts = [routing.assigned.double() for routing in micro_batches]
        here = torch.stack(counts).sum(0)
        if not self._counts_here:
            # The rank still takes part in the sum, which is collective.
            here.zero_()
        sums = self._sum_over_ranks(*here.tolist())
        total = torch.tensor(sums, device=here.device)
        # Each token makes top_k choices in each layer.
        self._num_rows = max(float(total.sum()) / self.top_k, 1.0)
        self._assigned = total / self._num_rows

    def share(self) -> Tensor:
        """The part of the last micro-batch in the loss of the global batch, 0-dim, with gradients.

        The coefficient is not included. Collective if :meth:`count` was not called for this step, because each rank has
        one micro-batch.
        """
        routing = self.take_noted()
        if self.over == "micro_batch":
            weight = routing.num_tokens / max(self._num_tokens, 1)
            share = load_balancing_loss(routing) * weight
        else:
            if self._assigned is None:
                self.count([routing])
            assert self._assigned is not None
            share = _loss(self._assigned, routing.probabilities / self._num_rows)
        self._shares.append(share.detach())
        return share

    @property
    def value_here(self) -> float | Tensor:
        """The part of this rank's micro-batches in the loss of the global batch, without the coefficient; 0-dim on the
        device, or 0.0 if this rank counts none."""
        if not self._shares or not self._counts_here:
            return 0.0
        return torch.stack(self._shares).double().sum()
