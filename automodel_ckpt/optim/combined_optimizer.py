"""Several optimizers that step together, such as Muon for matrices and AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict

Update = Callable[[Tensor, ValueDict], None]
"""Updates a parameter, with the options of its group."""


def update_each(
    optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None, update: Update
) -> float | None:
    """Call *update* for each parameter of *optimizer* that has a gradient.

    Returns the result of *closure*, which computes the gradients; None without one.
    """
    loss = loss_of(closure)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                update(parameter, group)
    return loss


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return the result of *closure*, which computes gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class CombinedOptimizer(Optimizer):
    """Optimizers of different parameters as one: clipping, LR schedulers and checkpoints see its parameter groups.

    The parameter groups and the state are the same objects as the *optimizers* have, so a change on either side is
    seen by the other.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        # Defaults of one optimizer would be added to the groups of the others.
        super().__init__(groups, {})
        self.defaults = dict(optimizers[0].defaults)
        self.optimizers = list(optimizers)
        for optimizer in optimizers:
            # Adagrad has a state from the beginning.
            self.state.update(optimizer.state)
        self._share_state()

    @property
    def optional_state(self) -> frozenset[str]:
        """Names of state that a checkpoint may lack, of all optimizers."""
        names = [getattr(optimizer, "optional_state", ()) for optimizer in self.optimizers]
        return frozenset().union(*names)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients. Returns what a *closure* returns, which computes the gradients."""
        # Called once here; each optimizer would compute the gradients again.
        loss = loss_of(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or with *set_to_none* false make them zero."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def __getstate__(self) -> ValueDict:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: ValueDict) -> None:
        super().__setstate__(state)
        # load_state_dict comes here with new objects for the state and the parameter groups.
        self._share_state()

    def _share_state(self) -> None:
        start = 0
        for optimizer in self.optimizers:
            end = start + len(optimizer.param_groups)
            # Each optimizer refers to the state of all parameters, and uses only the state of its
            # groups.
            optimizer.__setstate__(
                {"state": self.state, "param_groups": self.param_groups[start:end]}
            )
            start = end
