"""Errors for what torch raises while it computes a batch, such as out of memory: the cause, and what to change."""

from __future__ import annotations

import fnmatch
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.errors import DeviceMemoryError, Problem, RecipeError
from automodel_ckpt.models.inspect.vocabulary import check_token_ids, num_embeddings
from automodel_ckpt.optim.build import check_sharding_support
from automodel_ckpt.parallel.mesh import RankLayout

if TYPE_CHECKING:
    from automodel_ckpt.training.values.step_numbers import LaunchedStep

log = logging.getLogger("automodel_ckpt")


Tensors = Mapping[str, torch.Tensor]
_LESS_MEMORY = """add the first of these that you can accept and do not have, then run the same command:
          --step_scheduler.local_batch_size=N, a smaller one  (more micro-batches)
          --packed_sequence.size=N, a smaller one, for packed rows  (no sample may be longer)
          --model.activation_checkpointing=true  (about a third more time)
          --nproc-per-node=N --distributed.strategy=fsdp2, with more devices  (shards the state)
          --distributed.strategy=fsdp2 --distributed.cpu_offload=true  (the state in host memory: slow)
          --peft.r=16  (train LoRA adapters instead of all weights: a new run)"""


class BatchErrors:
    """Explains failures of the model and the optimizer of a run, also of steps that are not logged yet."""

    def __init__(
        self,
        config: RecipeConfig,
        layout: RankLayout,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        """*model* and *optimizer* are None while they are built."""
        self._config, self._layout = config, layout
        self._model, self._optimizer = model, optimizer
        self.pending: deque[LaunchedStep] = deque()
        """The steps that are not logged yet, oldest first."""

    @contextmanager
    def out_of_memory(self, doing: str, micro_batches: Sequence[Tensors] = ()) -> Iterator[None]:
        """Raise :class:`DeviceMemoryError` if the device runs out of memory inside the context.

        *doing* states when, such as ``in step 7``. *micro_batches* are computed there.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            layout = self._layout
            raise DeviceMemoryError(
                f"the device ran out of memory {doing}",
                where=f"rank {layout.rank}, {layout.device}",
                value="; ".join(self._values(error, micro_batches)),
                hint=_LESS_MEMORY,
            ) from error

    def _values(self, error: Exception, micro_batches: Sequence[Tensors]) -> Iterator[str]:
        """Yield the parts of the message about sizes."""
        if micro_batches:
            shapes = [micro_batch["labels"].shape for micro_batch in micro_batches]
            longest = max(shape[-1] for shape in shapes)
            largest = max(shape.numel() for shape in shapes)
            size = self._config.step_scheduler.local_batch_size
            yield f"longest row {longest:,} tokens, largest micro-batch {largest:,} tokens, local_batch_size {size}"
        lines = str(error).splitlines()
        if lines:
            # PyTorch's message continues with statistics and advice.
            sentences = lines[0].split(". ")
            yield f"PyTorch: {'. '.join(sentences[:2])[:200]}"

    @contextmanager
    def explained(self, doing: str, batch: GlobalBatch) -> Iterator[None]:
        """Within the context, *batch* is computed. Raises :class:`RecipeError` for a failure with a known cause.

        *doing* states when, such as ``in the validation of step 7``.
        """
        try:
            with self.out_of_memory(doing, batch.micro_batches):
                yield
        except (IndexError, RuntimeError) as error:
            self.explain(error, batch)
            raise

    def explain(self, error: Exception, batch: GlobalBatch) -> None:
        """Raise :class:`RecipeError` if *batch* has tokens that the model does not have, if the optimizer does not
        support sharded parameters, or if the model does not support its tensor parallel plan.

        torch reports only that an index is out of range, on a GPU not even that. Checking after the failure costs
        nothing in other steps.
        """
        assert self._model is not None and self._optimizer is not None
        from automodel_ckpt.parallel.tensor_plan import check_plan_support

        check_sharding_support(self._optimizer, error)
        check_plan_support(error, self._layout.sizes.tp)
        num_rows = num_embeddings(unwrap(self._model))
        # A GPU reports the failure of a step while the host queues the next one.
        for each in [*(step.batch for step in self.pending), batch]:
            where = f"the global batch of samples {each.sample_ids[:16]}"
            check_token_ids(each.micro_batches, num_rows, where)


def listed(names: Sequence[object], limit: int = 5) -> str:
    """The first *limit* of *names* for a message, and how many there are besides."""
    shown = ", ".join(map(str, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def check_all_trained(
    model: nn.Module, *, has_adapters: bool, is_error: bool, is_resumed: bool = False
) -> None:
    """Look for parameters of *model* that need a gradient and have none after the first step's backward passes.

    Raises :class:`RecipeError` with *is_error*, and with ddp, which waits for each gradient of a model if all
    its parameters are known to be used for each batch. Otherwise logs a warning: a later batch may use them.

    With *is_resumed*, it is an error only with ddp: the checkpoint, which another program may have written, has these
    parameters among those that are trained, and would not match a recipe that leaves them out.
    """
    waits_for_all = isinstance(model, DistributedDataParallel) and not model.find_unused_parameters
    name_of = _adapted_module if has_adapters else str
    used: set[str] = set()
    unused: dict[str, None] = {}
    for name, parameter in unwrap(model).named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            unused[name_of(name)] = None
        elif parameter.requires_grad:
            used.add(name_of(name))
    if not unused:
        return
    names = list(unused)
    key, verb = "model.freeze", "freeze them"
    if has_adapters:
        key, verb = "peft.exclude_modules", "leave them out"
    # In all layers, where no layer uses them.
    globs = {in_all_layers(name): name for name in names}
    usable = [glob if not fnmatch.filter(used, glob) else name for glob, name in globs.items()]
    problem = Problem(
        "trained parameters got no gradient in the first step",
        key,
        f"{len(names)} of them: {listed(names)}",
        f"if no batch uses them, {verb}: {key}: {sorted(usable)}",
    )
    if waits_for_all:
        hint = f"{problem.hint}; if some do, set distributed.strategy fsdp2"
        raise RecipeError.all_of([replace(problem, hint=hint)])
    if is_resumed:
        hint = "the checkpoint has them among the trained ones, so they stay as they are"
        problem = replace(problem, hint=hint)
    elif is_error:
        raise RecipeError.all_of([problem])
    log.warning("%s: %s; %s", problem.what, problem.value, problem.hint)


def in_all_layers(name: str) -> str:
    """Return a pattern for the module or parameter *name* in all layers: ``layers.*.mlp`` for ``layers.3.mlp``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _adapted_module(name: str) -> str:
    """The name in the base of the module that the adapter's parameter *name* adapts."""
    module, _, _ = name.removeprefix("base_model.model.").partition(".lora_")
    return module
