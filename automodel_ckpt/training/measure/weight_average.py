"""The section ``ema``: an exponential moving average of the trained weights, in addition to the model."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from automodel_ckpt.checkpoint.files.layout import AVERAGE
from automodel_ckpt.checkpoint.loader import Resumed
from automodel_ckpt.checkpoint.state.module_tensors import (
    CompleteTensors,
    StoredLayout,
    adapter_keys,
    set_stored_layout,
    stored_layout,
    stored_names,
    unwrap,
)
from automodel_ckpt.config.keys.optimizer import EmaConfig
from automodel_ckpt.parallel.gradients import local_shard
from automodel_ckpt.parallel.parallelize import reshard
from automodel_ckpt.parallel.ranks.agree import gather_objects
from automodel_ckpt.training.values.records import Number

log = logging.getLogger("automodel_ckpt")


class WeightAverage:
    """The average of each trained parameter of a model: of its shape and shards, in float32 or a more exact type.

    After a step, the average *a* of a weight *w* becomes ``a + (1 - decay) * (w - a)``, as in
    ``torch.optim.swa_utils.get_ema_multi_avg_fn``. Until ``start_step``, it is the weight.
    """

    module: nn.Module
    """The averages as parameters, under the names that checkpoints give to the model's parameters."""

    def __init__(
        self,
        model: nn.Module,
        settings: EmaConfig,
        *,
        with_frozen: bool = False,
        group: ProcessGroup | None = None,
    ) -> None:
        """Begin with the present weights. A collective of *group*.

        *with_frozen*: the module also has the tensors of *model* that do not train, in the same memory, so that its
        files are a complete model.
        """
        self._model = model
        self._settings = settings
        self.module = nn.Module()
        self._pairs: list[tuple[Tensor, Tensor]] = []
        inner = unwrap(model)
        state = get_model_state_dict(model)
        stored, tied = stored_names(model, state)
        is_adapter = adapter_keys(inner, state) is not None
        trained: list[str] = []
        tensors: dict[str, Tensor] = {}
        tensors.update(inner.named_parameters(remove_duplicate=False))
        tensors.update(inner.named_buffers(remove_duplicate=False))
        names_in_files: dict[str, list[str]] = {}
        for stored_name, fqn in stored.items():
            # A tensor of experts has several.
            names_in_files.setdefault(fqn, []).append(stored_name)
        for fqn, names in names_in_files.items():
            # A file of adapters has other names than the model in memory.
            name = names[0] if is_adapter else fqn
            tensor = tensors[fqn]
            if tensor.requires_grad:
                self._add(name, tensor)
                trained += names
            elif with_frozen:
                _put(self.module, name, tensor)
        layout = _layout(stored_layout(model), trained, with_frozen=with_frozen, group=group)
        if is_adapter:
            layout = StoredLayout(complete=layout.complete)
        else:
            # Files that are a complete model have the tied names that the files of the model have.
            layout = replace(layout, copies={**layout.copies, **tied})
        set_stored_layout(self.module, layout)

    def start(self, resumed: Resumed | None) -> None:
        """Begin with the present weights, unless the checkpoint *resumed* had the average (None: a new run)."""
        record = resumed.manifest.state.get(AVERAGE) if resumed is not None else None
        if record is not None and record.kind == "module":
            return
        self.restart()
        if resumed is not None:
            log.info("ema: the average begins with the weights of %s", resumed.path.name)

    def _add(self, name: str, weight: Tensor) -> None:
        average = torch.empty_like(weight, dtype=_master_type(weight.dtype), requires_grad=False)
        # A parameter that requires gradients, as the weight: checkpoints can share files of those that do not.
        _put(self.module, name, nn.Parameter(average))
        pair = local_shard(average), local_shard(weight.detach())
        pair[0].copy_(pair[1])
        self._pairs.append(pair)

    def restart(self) -> None:
        """Set the average to the present weights."""
        for average, weight in self._pairs:
            average.copy_(weight)

    def update(self, step: int, grad_norm: Number) -> None:
        """Include the weights after *step* if it is time. The gradients of the step had the norm *grad_norm*.

        A step with a norm that is not finite changed no weight and does not count. A norm on the device is not read.
        """
        is_copied = step <= self._settings.start_step
        if not is_copied and step % self._settings.update_every_steps:
            return
        share = 1.0 if is_copied else 1.0 - self._settings.decay
        if isinstance(grad_norm, Tensor):
            self._move(share * torch.isfinite(grad_norm).float())
        elif math.isfinite(grad_norm):
            if is_copied:
                self.restart()
            else:
                self._move(share)

    @torch.no_grad()
    def _move(self, share: float | Tensor) -> None:
        """Move each average towards its weight, by *share* of the difference."""
        for average, weight in self._pairs:
            if isinstance(share, Tensor):
                share = share.to(average.dtype)
            # One by one: converted weights take as much memory as the averages.
            average.lerp_(weight.to(average.dtype), share)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Within the context, the model has the averages as its weights. Afterwards, both are bit-equal to before.

        Nothing may be saved within it.
        """
        reshard(self._model)
        kept = self._exchange()
        try:
            yield
        finally:
            reshard(self._model)
            self._restore(kept)

    @torch.no_grad()
    def _exchange(self) -> list[Tensor | None]:
        """Give the model the averages. Returns copies of the weights with a type that stores averages inexactly."""
        kept: list[Tensor | None] = []
        for average, weight in self._pairs:
            before = weight.clone()
            weight.copy_(average)
            if average.dtype == weight.dtype:
                # The memory of the average keeps the weight meanwhile.
                average.copy_(before)
                kept.append(None)
            else:
                kept.append(before)
        return kept

    @torch.no_grad()
    def _restore(self, kept: Iterable[Tensor | None]) -> None:
        for (average, weight), before in zip(self._pairs, kept, strict=True):
            if before is None:
                before = average.clone()
                average.copy_(weight)
            weight.copy_(before)


def average_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """The bytes of the averages of the trained *parameters*."""
    total = 0
    for parameter in parameters:
        if parameter.requires_grad:
            total += parameter.numel() * _master_type(parameter.dtype).itemsize
    return total


def _master_type(dtype: torch.dtype) -> torch.dtype:
    # The change of a step is below the precision of 16 bits.
    return torch.promote_types(dtype, torch.float32)


def _put(root: nn.Module, fqn: str, tensor: Tensor) -> None:
    """Make *tensor* the parameter or buffer *fqn* of *root*, in empty modules of the names between."""
    path, _, leaf = fqn.rpartition(".")
    module = root
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor)


def _layout(
    layout: StoredLayout, trained: Iterable[str], *, with_frozen: bool, group: ProcessGroup | None
) -> StoredLayout:
    """The *layout* of a model for its averages. *trained* are the names that this rank trains. A collective of *group*
    if the ranks have different tensors."""
    if layout.complete is None:
        return layout
    trained_anywhere: set[str] = set()
    for names in gather_objects(group, list(trained)):
        trained_anywhere.update(names)
    tensors: dict[str, Tensor] = {}
    for name, tensor in layout.complete.tensors.items():
        if name in trained_anywhere:
            tensors[name] = tensor.to(_master_type(tensor.dtype))
        elif with_frozen:
            tensors[name] = tensor
    tied: dict[str, str] = {}
    for name, stored in layout.complete.tied.items():
        if stored in tensors:
            tied[name] = stored
    frozen = layout.complete.frozen & tensors.keys()
    return replace(layout, complete=CompleteTensors(tensors, tied, frozen))
