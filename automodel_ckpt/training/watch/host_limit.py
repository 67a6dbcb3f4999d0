"""Whether a GPU computes steps faster than the host queues them: reported once, with what to change."""

from __future__ import annotations

import logging

import torch

from automodel_ckpt.base.units import counted
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.training.values.readback import Mark, Number

log = logging.getLogger("automodel_ckpt")

_FIRST_STEPS = 20
"""Steps that are not counted: kernels are compiled in some of them."""
_STEPS = 50
"""Steps that are counted."""
_MOST = 0.9
"""There is a report if the GPU waits in at least this share of the counted steps."""


class HostLimit:
    """Counts the steps whose backward passes a GPU has computed when the host has just queued the update.

    The GPU is then idle between some of the operations of a step. A model of a billion parameters on one row of 4,096
    tokens is an example. Call :meth:`note_gradients` and :meth:`note_update` in each step.
    """

    def __init__(self, config: RecipeConfig, layout: RankLayout) -> None:
        """Only the first rank counts, and only on a GPU."""
        self._config = config
        self._sizes = layout.sizes
        self._device = layout.device
        self._is_counting = layout.rank == 0 and layout.device.type == "cuda"
        self._gradients: Mark | None = None
        self._num_steps = 0
        self._num_waits = 0

    def note_gradients(self) -> None:
        """Note that all backward passes of a step are queued."""
        if self._is_counting:
            self._gradients = Mark(self._device)

    def note_update(self, grad_norm: Number) -> None:
        """Note that the update is queued.

        The step shows nothing if *grad_norm* is on the host, which then waited for the gradients: an optimizer that
        reads the norm, or has its state on the CPU.
        """
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            return
        if not isinstance(grad_norm, torch.Tensor) or grad_norm.device.type != self._device.type:
            return
        self._num_steps += 1
        if self._num_steps <= _FIRST_STEPS:
            return
        self._num_waits += gradients.is_past()
        if self._num_steps < _FIRST_STEPS + _STEPS:
            return
        self._is_counting = False
        if self._num_waits >= _MOST * _STEPS:
            log.info(
                "the GPU is idle at times: it computes steps faster than this process queues them (%d of %s); %s",
                self._num_waits,
                counted(_STEPS, "step"),
                self._advice(),
            )

    def _advice(self) -> str:
        steps = self._config.step_scheduler
        local = steps.local_batch_size
        larger = self._larger_micro_batch()
        if larger is not None:
            text = f"step_scheduler.local_batch_size: {larger} computes the same global batch in less time"
        else:
            text = f"more samples per step take hardly more time: step_scheduler.local_batch_size (now {local})"
            if self._config.packed_sequence is not None:
                text += f" or packed_sequence.size (now {self._config.packed_sequence.size})"
        total = torch.cuda.get_device_properties(self._device).total_memory
        used = torch.cuda.max_memory_allocated(self._device)
        return f"{text}; {used / 1e9:.1f} of {total / 1e9:.1f} GB are used"

    def _larger_micro_batch(self) -> int | None:
        """The next size of micro-batches that divides the global batch; None: stages or ranks would have too few."""
        steps = self._config.step_scheduler
        num_micro_batches = steps.global_batch_size // (steps.local_batch_size * self._sizes.dp)
        for factor in range(2, num_micro_batches // self._sizes.pp + 1):
            if num_micro_batches % factor == 0:
                return factor * steps.local_batch_size
        return None
