"""The values that the parts of a run pass to each other: what all ranks agreed on, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from automodel_ckpt.distributed.agree import sum_over_ranks


@dataclass(frozen=True, slots=True)
class Control:
    """What all ranks agreed on before a step: the global batch's size in tokens, whether to stop, and whether a save in
    the background has failed."""

    num_label_tokens: int
    num_tokens: int
    stop: bool
    save_failed: bool = False

    def summed(self, group: ProcessGroup | None) -> Control:
        """Combine the values of all ranks: tokens are summed, and a flag is set if any rank sets it. A collective."""
        num_label_tokens, num_tokens, stop, save_failed = sum_over_ranks(
            group, self.num_label_tokens, self.num_tokens, self.stop, self.save_failed
        )
        return Control(int(num_label_tokens), int(num_tokens), stop > 0, save_failed > 0)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step: the global batch's mean loss (NaN without labels), gradient norm and learning rate.

    *aux_loss* is the load balancing loss of a mixture of experts, without its coefficient; None where there is none.
    """

    loss: float
    grad_norm: float
    lr: float
    aux_loss: float | None = None


@dataclass(frozen=True, slots=True)
class Validation:
    """The mean loss over the label tokens of the whole validation set."""

    loss: float
    num_label_tokens: int
