"""A model in pipeline stages: dividing it, probing one stage, and running micro-batches through all stages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.parts.discovery import classify
from automodel_ckpt.checkpoint.state.module_tensors import Owners, record_complete_tensors
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.pipeline_stage import (
    LocalStage,
    PassThrough,
    has_tied_ends,
)
from automodel_ckpt.parallel.context_parallel import ContextParallel
from automodel_ckpt.parallel.mesh import build_mesh
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.pipeline import (
    Kind,
    Pipeline,
    TiedEnds,
)
from automodel_ckpt.parallel.ranks.agree import gather_objects
from automodel_ckpt.parallel.tensor_parallel import Plan, plan_for

log = logging.getLogger("automodel_ckpt")

T = TypeVar("T")

StageOutput = Callable[[Tensors, "torch.Tensor | None"], Tensor]
"""From the rows of a micro-batch, and the hidden states [B, t, H] of the previous stage (None on the first), to the
hidden states for the next stage, or on the last stage to the summed loss. t is the length of a row, or of this rank's
slice of it with context parallelism."""


@dataclass(frozen=True)
class Stages:
    """Facts about all stages of a model, of which one is left on this rank."""

    mesh: DeviceMesh
    local: LocalStage
    """The stage of this rank."""
    tp_plan: Plan | None
    """The part of the tensor parallel plan that concerns this rank's stage."""
    has_tied_ends: bool
    """Whether the first and the last stage share the embedding's weight."""
    hidden_states: Tensor
    """An empty tensor [0, H] with the width and dtype of the hidden states between stages."""


def split_stages(
    model: nn.Module,
    layout: RankLayout,
    tp_plan: Plan | None,
    compute_dtype: torch.dtype | None,
) -> Stages:
    """Remove all stages but this rank's from *model*, in place. A collective.

    The names and shapes of all tensors stay in the model's stored layout. Hidden states have the dtype *compute_dtype*,
    or by default the model's dtype.
    """
    transformers_model: Any = model
    plan = plan_for(model, tp_plan, layout.sizes.tp) if layout.sizes.tp > 1 else None
    embedding = transformers_model.get_input_embeddings()
    width = transformers_model.config.get_text_config().hidden_size
    dtype = compute_dtype or embedding.weight.dtype
    hidden_states = torch.empty(0, width, dtype=dtype, device="meta")
    tied = has_tied_ends(model)
    # What needs the complete model comes before LocalStage, which removes the other stages.
    record_complete_tensors(model)
    local = LocalStage(model, layout.pp_rank, layout.sizes.pp)
    left = {name for name, module in model.named_modules() if not isinstance(module, PassThrough)}
    if plan is not None:
        plan = {name: style for name, style in plan.items() if name in left}
    return Stages(build_mesh(layout), local, plan, tied, hidden_states)


class PipelineStage:
    """This rank's stage of a pipeline, sharded, with its connections to the other stages."""

    def __init__(self, model: nn.Module, layout: RankLayout, stages: Stages, kind: Kind) -> None:
        """Connect the stage. *kind* is the schedule. A collective."""
        group = stages.mesh["pp"].get_group()
        self.local = stages.local
        self.pipeline = Pipeline(
            model,
            stages.local.number,
            stages.local.num_stages,
            group,
            stages.hidden_states,
            layout.device,
            kind,
        )
        self.width = stages.hidden_states.shape[1]
        self._num_slices = layout.sizes.cp
        self._tied: TiedEnds | None = None
        if stages.has_tied_ends:
            end: Any = model.get_input_embeddings()  # type: ignore[operator]
            weights = [] if isinstance(end, PassThrough) else [end.weight]
            self._tied = TiedEnds(weights, layout)

    def train(self, rows: Sequence[Tensors], output: StageOutput, weight: float) -> list[Tensor]:
        """Run forward and backward of all micro-batches. Returns the summed losses, on the last stage only.

        The gradients are the gradients of the losses times *weight*.
        """
        losses = self._run(rows, output, weight)
        if self._tied is not None:
            # Each end has only the gradient of its use of the shared weight.
            self._tied.sum_gradients()
        return losses

    def evaluate(self, rows: Sequence[Tensors], output: StageOutput) -> list[Tensor]:
        """Run the forward pass of all micro-batches. Returns the summed losses, on the last stage only."""
        return self._run(rows, output, None)

    def _run(
        self, rows: Sequence[Tensors], output: StageOutput, weight: float | None
    ) -> list[Tensor]:
        # The rows and the length of the hidden states of each micro-batch on this rank.
        shapes = []
        for each in rows:
            num_rows, length = each["labels"].shape
            shapes.append((num_rows, length // self._num_slices))

        def compute(number: int, hidden: Tensor | None) -> Tensor:
            return output(rows[number], hidden)

        return self.pipeline.run(compute, shapes, weight)

    @property
    def counted_elsewhere(self) -> frozenset[int]:
        """Ids of parameters with gradients that the first stage counts."""
        return self._tied.counted_elsewhere if self._tied is not None else frozenset()


class FromTokens(nn.Module):
    """This rank's stage as a model that takes token ids, for probes of a few tokens.

    Where it is not the first stage of the model, each of a few token ids has fixed random hidden states.
    """

    context: ContextParallel | None = None
    """How context parallel ranks divide rows. None: rows are not divided."""

    def __init__(self, model: nn.Module, stage: PipelineStage) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self._local = stage.local
        # As small as fresh embeddings, so that what layers add to them is not lost in rounding.
        # A separate generator: only later stages draw here, and the global ones must stay equal.
        self._hidden = 0.02 * torch.randn(
            8, stage.width, generator=torch.Generator().manual_seed(0)
        )

    def get_output_embeddings(self) -> Any:
        """The output layer. A stand-in on all but the last stage."""
        return self.model.get_output_embeddings()  # type: ignore[operator]

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **options: Any) -> Any:
        """Run the stage on token ids [B, T], which are below 8. Returns what the model returns."""
        if position_ids is not None:
            options["position_ids"] = position_ids
        if self._local.number == 0:
            return self.model(input_ids=input_ids, **options)
        embeddings = self._local.receive(self._hidden_of(input_ids), input_ids.shape[1])
        return self.model(inputs_embeds=embeddings, **options)

    def _hidden_of(self, input_ids: Tensor) -> Tensor:
        """The hidden states [B, t, H] of token ids, on this rank's slice of the rows."""
        hidden = self._hidden.to(next(self.model.parameters())).to(input_ids.device)[input_ids]
        if self.context is not None and self.context.active:
            return hidden[:, self.context.slice_of(input_ids.shape[1])]
        return hidden


def log_idle_share(num_micro_batches: int, layout: RankLayout) -> None:
    """Log the share of a step in which stages wait for each other. Warns if it is half of the step or more."""
    num_stages = layout.sizes.pp
    # Source: Huang et al., "GPipe", arXiv:1811.06965, section 3.2. 1F1B has the same share.
    idle = (num_stages - 1) / (num_micro_batches + num_stages - 1)
    message = "%d pipeline stages, %d micro-batches a step: each rank waits for others about %.0f%% of the time"
    level = logging.INFO
    if idle >= 0.5:
        level = logging.WARNING
        message += "; more micro-batches (a larger global_batch_size) make it less"
    log.log(level, message, num_stages, num_micro_batches, 100 * idle)


def check_no_idle_stages(trained: Sequence[nn.Parameter], layout: RankLayout) -> None:
    """Raise :class:`RecipeError` if a stage has nothing to train. A collective."""
    counts = _of_each_stage(layout, len(trained))
    if 0 in counts:
        raise RecipeError(
            "a pipeline stage has nothing to be trained",
            where="model.freeze",
            value=f"stage {counts.index(0)} of {len(counts)}",
            hint="freeze less, or set a smaller distributed.pp_size",
        )


def sum_over_stages(layout: RankLayout, counts: list[int]) -> list[int]:
    """The sums of *counts* over the pipeline stages. A collective."""
    stages = _of_each_stage(layout, counts)
    return [sum(each) for each in zip(*stages, strict=True)]


def _of_each_stage(layout: RankLayout, value: T) -> list[T]:
    """*value* of one rank of each pipeline stage, in the order of the stages. A collective."""
    ranks_per_stage = layout.world_size // layout.sizes.pp
    # Pipeline stages are the outermost dimension of the mesh: the ranks of a stage are consecutive.
    return gather_objects(layout.gloo_group, value)[::ranks_per_stage]


def train_stages(optimizer: Optimizer, model: nn.Module, layout: RankLayout) -> None:
    """Record in *optimizer* the parameters that all stages train (its attribute ``whole``). A collective.

    Checkpoints store the groups of all stages as one optimizer. Raises :class:`RecipeError` if stages have different
    parameter groups.
    """
    items = classify({"model": model, "optimizer": optimizer})
    mine = Owners(items).groups(items[1])
    settings = []
    for group in optimizer.param_groups:
        # Compared as text: values may be tensors, which have no truth value.
        settings.append({key: repr(value) for key, value in group.items() if key != "params"})
    stages = _of_each_stage(layout, (mine, settings))
    expected = stages[0][1]
    # All ranks raise the same error, since each compares all stages.
    for number, (_, found) in enumerate(stages):
        if found != expected:
            raise RecipeError(
                "the optimizer makes other parameter groups on one pipeline stage than on another",
                where="optimizer",
                value=f"{len(expected)} groups on stage 0, {len(found)} on stage {number}, or other settings",
                hint="make the same groups for any part of the model, empty ones left out, or leave pp_size out",
            )
    all_groups: list[dict[str, Tensor]] = [{} for _ in mine]
    for groups, _ in stages:
        for merged, group in zip(all_groups, groups, strict=True):
            merged.update(group)
    optimizer.whole = all_groups  # type: ignore[attr-defined]
