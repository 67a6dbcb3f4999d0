"""Pipeline parallelism: a rank's stage of the model in torch's schedules, for micro-batches of any shape.

torch's stages exchange tensors of one shape, but micro-batches differ in rows and length. So hidden states are sent as
[tokens, width], padded to the largest micro-batch seen so far. Every stage has the batch and removes the padding before
it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
)

from automodel_ckpt.parallel.gradients import complete_gradient, gradient_sync, local_shard
from automodel_ckpt.parallel.mesh_sizes import RankLayout

Kind = Literal["1f1b", "gpipe"]
Compute = Callable[[int, Tensor | None], Tensor]
"""The forward pass of a stage: (number of the micro-batch, hidden states [B, T, H] of the previous stage; None on the
first stage) -> hidden states [B, T, H] for the next stage; on the last stage, the summed loss, 0-dim."""


class Pipeline:
    """This rank's stage of a pipeline. Its ranks have the same micro-batches. All methods are collective."""

    def __init__(
        self,
        model: nn.Module,
        number: int,
        num_stages: int,
        group: dist.ProcessGroup,
        hidden_states: Tensor,
        device: torch.device,
        kind: Kind,
    ) -> None:
        """*model* is the stage *number* (from 0) of *num_stages*, and is already sharded.

        *group* contains the ranks of this pipeline, ordered by their stage. *hidden_states* is an empty meta tensor
        [0, H] with the width and the dtype of those that stages exchange.
        """
        self._number, self._num_stages = number, num_stages
        self._losses: list[Tensor] = []
        self._part = _Part(model, hidden_states.dtype)
        self._group = group
        self._device = device
        self._hidden_states = hidden_states
        self._kind = kind
        self._schedules: dict[tuple[bool, int], Any] = {}
        self._weight = 0.0

    def run(
        self, compute: Compute, shapes: Sequence[tuple[int, int]], weight: float | None
    ) -> list[Tensor]:
        """Run forward and backward of micro-batches of these *shapes* (rows, length), or only forward without a weight.

        Gradients belong to the sum of all losses times *weight*, and are reduced over the data parallel ranks. Returns
        the unweighted losses on the rank with the last stage, and an empty list on the others.
        """
        is_training, self._weight = weight is not None, weight or 0.0
        num = len(shapes)
        if num == 0:
            return []
        # All stages get the same shapes, so sender and receiver compute the same capacity without
        # communication.
        num_tokens = max(rows * length for rows, length in shapes)
        if num_tokens > self._part.capacity:
            self._part.capacity = num_tokens
            # Schedules contain the shape of the tensors that they exchange.
            self._schedules.clear()
        schedule = self._schedules.get((is_training, num)) or self._new_schedule(is_training, num)
        # torch splits its arguments into micro-batches, so each forward pass gets its number.
        numbers = torch.arange(num)
        args = (numbers,) if self._number == 0 else ()
        options: dict[str, Any] = {
            "numbers": numbers,
            "target": numbers if self._number == self._num_stages - 1 else None,
            "return_outputs": False,
        }
        run = schedule.step if is_training else schedule.eval
        self._part.work = (compute, shapes)
        self._losses = []
        try:
            with torch.set_grad_enabled(is_training):
                run(*args, **options)
            return self._losses
        finally:
            self._part.work = None
            self._losses = []

    def _new_schedule(self, training: bool, num_micro_batches: int) -> Any:
        # With too few micro-batches to fill the pipeline, the order of 1F1B is GPipe's order.
        fills = training and self._kind == "1f1b" and num_micro_batches >= self._num_stages
        make = Schedule1F1B if fills else ScheduleGPipe
        # By default, torch would divide the gradients by the number of micro-batches; the weight already contains the
        # divisor.
        options: dict[str, Any] = {"loss_fn": self._noted, "scale_grads": False}
        # torch 2.10 rejects fewer micro-batches than stages in all schedules, although GPipe's order works with fewer:
        # the number is set after construction.
        schedule = make(self._new_stage(), max(num_micro_batches, self._num_stages), **options)
        schedule._n_microbatches = num_micro_batches
        self._schedules[training, num_micro_batches] = schedule
        return schedule

    def _new_stage(self) -> PipelineStage:
        is_first, is_last = self._number == 0, self._number == self._num_stages - 1
        shape = (self._part.capacity, self._hidden_states.shape[1])
        hidden = self._hidden_states.new_empty(shape, requires_grad=True)
        given = torch.empty(1, dtype=torch.int64, device="meta") if is_first else hidden
        result = torch.empty((), device="meta", requires_grad=True) if is_last else hidden
        # Shapes are given, because torch 2.13 otherwise infers them by running the first
        # micro-batch twice.
        return _Stage(
            self._part,
            self._number,
            self._num_stages,
            self._device,
            input_args=given,
            output_args=result,
            group=self._group,
        )

    def _noted(self, loss: Tensor, _: Tensor) -> Tensor:
        self._losses.append(loss.detach().clone())
        return loss * self._weight


class _Part(nn.Module):
    """This rank's stage as torch's schedules call it. *capacity* is the number of tokens in exchanged tensors."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype, self.capacity = model, dtype, 0
        self.work: tuple[Compute, Sequence[tuple[int, int]]] | None = None

    def forward(self, given: Tensor, *, numbers: Tensor) -> Tensor:
        """Compute micro-batch *numbers* [1] from *given* [capacity, H]; the first stage ignores *given*, which is 1-D.

        Returns hidden states [capacity, H], or on the last stage the loss, 0-dim.
        """
        assert self.work is not None
        (compute, shapes), number = self.work, int(numbers)
        rows, length = shapes[number]
        hidden = None
        if given.dim() == 2:
            hidden = given[: rows * length].reshape(rows, length, -1)
        output = compute(number, hidden)
        if output.dim() == 0:
            return output
        return self._padded(output)

    def _padded(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, T, H] as [capacity, H] in the dtype of the exchange."""
        flat = hidden.flatten(0, 1).to(self.dtype)
        if flat.shape[0] < self.capacity:
            flat = F.pad(flat, (0, 0, 0, self.capacity - flat.shape[0]))
        # The next stage always sends a gradient back, also if nothing up to here is trained.
        if torch.is_grad_enabled() and not flat.requires_grad:
            return flat.requires_grad_()
        return flat.contiguous()


class _Stage(PipelineStage):  # type: ignore[misc,unused-ignore]
    """A torch stage that reduces gradients over the data parallel ranks only in the last backward pass of a step."""

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        part: Any = self.submod
        # torch does this only for a submod that is an FSDPModule or DDP itself; here, _Part wraps
        # it.
        with gradient_sync(part.model, enabled=last_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


class TiedEnds:
    """Tied parameters that the first and the last stage both store: their gradients are summed over the two."""

    def __init__(self, parameters: Iterable[nn.Parameter], layout: RankLayout) -> None:
        """*parameters* are the tied ones of this rank: none on other stages. Collective: every rank calls it once."""
        self._parameters = list(parameters)
        self._group: dist.ProcessGroup | None = None
        per_stage = layout.world_size // layout.sizes.pp
        # new_group is collective: every rank creates the groups of the first and the last stage of all pipelines.
        for index in range(per_stage):
            ends = [index, layout.world_size - per_stage + index]
            group = dist.new_group(ends)
            if layout.rank in ends:
                self._group = group
        self._is_last = layout.pp_rank == layout.sizes.pp - 1

    def sum_gradients(self) -> None:
        """Sum the gradients over both stages, after the backward passes of a step."""
        for parameter in self._parameters:
            # A tensor parallel plan may leave the gradients of the two stages in different layouts.
            complete_gradient(parameter)
            if parameter.grad is not None:
                dist.all_reduce(local_shard(parameter.grad), group=self._group)

    @property
    def counted_elsewhere(self) -> frozenset[int]:
        """Ids of this rank's parameters that only the first stage counts in sums over all stages."""
        if not self._is_last:
            return frozenset()
        return frozenset(id(parameter) for parameter in self._parameters)
