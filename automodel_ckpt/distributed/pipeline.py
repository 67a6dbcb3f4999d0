"""One stage of a pipeline and the ranks before and after it: torch's schedules, for micro-batches of any shape.

torch's stages exchange tensors of one shape. Micro-batches differ in rows and length, so that hidden states travel as
[tokens, width] in a tensor with room for the largest micro-batch seen so far; every stage has the batch itself and
knows how much of it counts. Nothing is computed for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from automodel_ckpt.distributed.mesh import RankLayout
from automodel_ckpt.distributed.parallelize import complete_gradient, gradient_sync

Kind = Literal["1f1b", "gpipe"]


class Compute(Protocol):
    """What a stage does with a micro-batch."""

    def __call__(self, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Of the micro-batch *number* and the *hidden* states [B, T, H] of the stage before (None on the first), the
        hidden states for the next; on the last stage the summed loss, 0-dim."""


@dataclass(frozen=True, slots=True)
class StageTensorSpec:
    """The hidden states between stages: their width and type."""

    width: int
    dtype: torch.dtype


def idle_share(num_micro_batches: int, num_stages: int) -> float:
    """The part of a step that each stage waits for the others, where all are equally slow: from 0 to 1.

    Source: Huang et al., "GPipe", arXiv:1811.06965, section 3.2; the same for 1F1B.
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


class Pipeline:
    """This rank's stage. Ranks of one pipeline hold the same micro-batches and call everything together."""

    def __init__(
        self,
        model: nn.Module,
        layout: RankLayout,
        group: dist.ProcessGroup,
        wire: StageTensorSpec,
        kind: Kind = "1f1b",
    ) -> None:
        """*model* is the stage's, shared out; *group* has the ranks of its pipeline in the order of the stages."""
        self.stage, self.num_stages = layout.pp_rank, layout.sizes.pp
        self._part = _Part(model, wire)
        self._group, self._device, self._wire, self._kind = group, layout.device, wire, kind
        self._schedules: dict[tuple[bool, int], PipelineScheduleSingle] = {}
        self._weight = 1.0

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def train(
        self, compute: Compute, shapes: Sequence[tuple[int, int]], weight: float
    ) -> list[torch.Tensor]:
        """Forward and backward of micro-batches of these *shapes* (rows, length); gradients are of the sum of their
        losses times *weight*, and are reduced over the data parallel ranks. Returns the losses on the last stage."""
        self._weight = weight
        return self._run(compute, shapes, training=True)

    def evaluate(self, compute: Compute, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Forward only, without gradients. Returns the losses on the last stage."""
        return self._run(compute, shapes, training=False)

    def _run(
        self, compute: Compute, shapes: Sequence[tuple[int, int]], *, training: bool
    ) -> list[torch.Tensor]:
        part, num = self._part, len(shapes)
        if num == 0:
            return []
        self._make_room(max(rows * length for rows, length in shapes))
        schedule = self._schedules.get((training, num)) or self._new_schedule(training, num)
        numbers = torch.arange(num)
        # torch cuts its arguments into micro-batches: each gets the number of its own.
        args = (numbers,) if self.is_first else ()
        options: dict[str, Any] = {
            "numbers": numbers,
            "target": numbers if self.is_last else None,
            "return_outputs": False,
        }
        part.work, part.losses = (compute, shapes), []
        try:
            with torch.set_grad_enabled(training):
                (schedule.step if training else schedule.eval)(*args, **options)
            return part.losses
        finally:
            part.work, part.losses = None, []

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens > self._part.room:
            self._part.room = num_tokens
            self._schedules.clear()

    def _new_schedule(self, training: bool, num_micro_batches: int) -> PipelineScheduleSingle:
        stage = self._new_stage()
        # 1F1B has to fill the pipeline. Where a batch cannot, what is left of its order is GPipe's.
        fills = training and self._kind == "1f1b" and num_micro_batches >= self.num_stages
        make = Schedule1F1B if fills else ScheduleGPipe
        # torch 2.10 rejects fewer micro-batches than stages in all schedules, although GPipe's order works with fewer:
        # the number is set after construction.
        schedule = make(
            stage, max(num_micro_batches, self.num_stages), loss_fn=self._noted, scale_grads=False
        )
        schedule._n_microbatches = num_micro_batches
        return self._schedules.setdefault((training, num_micro_batches), schedule)

    def _new_stage(self) -> PipelineStage:
        hidden = torch.empty(
            self._part.room,
            self._wire.width,
            dtype=self._wire.dtype,
            device="meta",
            requires_grad=True,
        )
        given = torch.empty(1, dtype=torch.int64, device="meta") if self.is_first else hidden
        result = torch.empty((), device="meta", requires_grad=True) if self.is_last else hidden
        return _Stage(
            self._part,
            self.stage,
            self.num_stages,
            self._device,
            input_args=given,
            output_args=result,
            group=self._group,
        )

    def _noted(self, loss: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        self._part.losses.append(loss.detach().clone())
        return loss * self._weight


class _Part(nn.Module):
    """The stage's module as torch's schedules call it."""

    def __init__(self, model: nn.Module, wire: StageTensorSpec) -> None:
        super().__init__()
        self.model, self.wire, self.room = model, wire, 0
        self.work: tuple[Compute, Sequence[tuple[int, int]]] | None = None
        self.losses: list[torch.Tensor] = []

    def forward(self, given: torch.Tensor, *, numbers: torch.Tensor) -> torch.Tensor:
        """*given*: [room, H], or on the first stage nothing of account; *numbers*: that of the micro-batch, [1]."""
        assert self.work is not None
        (compute, shapes), number = self.work, int(numbers)
        rows, length = shapes[number]
        hidden = given[: rows * length].reshape(rows, length, -1) if given.dim() == 2 else None
        output = compute(number, hidden)
        return self._packed(output) if output.dim() else output

    def _packed(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.flatten(0, 1).to(self.wire.dtype)
        if flat.shape[0] < self.room:
            flat = F.pad(flat, (0, 0, 0, self.room - flat.shape[0]))
        # A gradient comes back in any case, also to a stage that has nothing to be trained before it.
        return (
            flat.contiguous()
            if flat.requires_grad or not torch.is_grad_enabled()
            else flat.requires_grad_()
        )


class _Stage(PipelineStage):  # type: ignore[misc,unused-ignore]
    """Gradients are reduced over the data parallel ranks in a step's last backward pass only."""

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        part: Any = self.submod
        with gradient_sync(part.model, enabled=last_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


class TiedEnds:
    """Parameters that the first and the last stage both hold: their gradients are sums over the two."""

    def __init__(self, parameters: Iterable[nn.Parameter], layout: RankLayout) -> None:
        """*parameters* are those of this rank, none on the stages between. A collective: every rank does it once."""
        self._parameters = list(parameters)
        self._group = _ends(layout)
        self._is_last = layout.pp_rank == layout.sizes.pp - 1

    def sum_gradients(self) -> None:
        """After the backward passes of a step."""
        for parameter in self._parameters:
            complete_gradient(
                parameter
            )  # a plan may leave the stages' gradients in different layouts
            if parameter.grad is not None:
                dist.all_reduce(_local(parameter.grad), group=self._group)

    @property
    def counted_elsewhere(self) -> frozenset[int]:
        """Ids of the parameters here that the first stage counts in sums over all stages."""
        return frozenset(map(id, self._parameters)) if self._is_last else frozenset()


def _ends(layout: RankLayout) -> dist.ProcessGroup | None:
    """The group of this rank's pipeline's first and last stage; None between them."""
    per_stage = layout.world_size // layout.sizes.pp
    mine = None
    for place in range(per_stage):
        ends = [place, layout.world_size - per_stage + place]
        group = dist.new_group(ends)
        if layout.rank in ends:
            mine = group
    return mine


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
