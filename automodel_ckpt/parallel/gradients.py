"""What ranks must agree on after the backward passes of a step.

Gradients of parameters that only some ranks use, such as experts that get no token elsewhere; the norm of all gradients
and clipping by it; and the running means and variances of batch normalization.

DistributedDataParallel sums gradients in buckets. In its second step, it rebuilds them in the order in which the
gradients of the first step became ready. With three or more ranks, the place of an element in its bucket decides in
which order the ranks' values are added, and so its rounding. The first step of a resumed run is a later step of the run
that was not interrupted. Without fixed buckets, the resumed run would round differently.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import is_bw
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.ranks import agree

log = logging.getLogger("automodel_ckpt")

_ONE_EXPERT = re.compile(r"\bexperts\.(expert_)?\d+\.")
_KNOWN_PACKAGES = frozenset(
    {
        "abc",
        "automodel_ckpt",
        "bitsandbytes",
        "builtins",
        "collections",
        "peft",
        "torch",
        "torchao",
        "transformers",
        "typing",
    }
)
"""The packages with modules that use the same parameters for each batch, apart from what :func:`may_vary` names."""
DEFERS = "_defers_gradient_sync"
"""The attribute of a model sharded by fsdp2 with the value of ``defer_gradient_sync``."""
_TAG = 7301


def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """Choose whether forward and backward passes in the context reduce gradients over the ranks.

    *enabled* is true for the last micro-batch of an accumulation. Those before accumulate the gradient of the complete
    model on each rank (ddp, and fsdp2 with ``defer_gradient_sync``). By default, fsdp2 reduces after each micro-batch:
    otherwise a rank would hold the gradient of the complete model besides its shard of the weights.
    """
    if isinstance(model, DistributedDataParallel) and not enabled:
        # DDP decides in the forward pass whether the backward pass reduces: the context must
        # enclose both.
        return model.no_sync()
    if isinstance(model, FSDPModule) and getattr(model, DEFERS, False):
        # fsdp2 keeps these settings after the context, so each micro-batch has to set them.
        model.set_requires_gradient_sync(enabled)
        # The next micro-batch needs the same parameters, and they are smaller than the gradient.
        model.set_reshard_after_backward(enabled)
    return nullcontext()


class UnusedGradients:
    """Gives the parameters of a model sharded by fsdp2 that a backward pass does not reach gradients of zeros.

    fsdp2 reduces the gradients that a rank has in one buffer, without their names. If ranks use different parameters,
    it adds gradients of different parameters, without an error where their sizes are equal. (torch 2.13 has
    ``set_reduce_scatter_unused_params`` for that. It does not show which parameters no rank has used.)
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, *, in_stages: bool = False
    ) -> None:
        """*group* are all ranks: one rank changes nothing. With *in_stages*, they have different parameters, and cannot
        agree on those that none has used: a model is changed only if :func:`may_vary`."""
        self._group = group
        self._must_agree = not in_stages
        self._may_vary = may_vary(model)
        self._parameters: list[Any] = []
        """fsdp2's descriptions of the trained parameters, in the same order on all ranks."""
        self._is_used: list[bool] = []
        """Whether a backward pass on this rank has reached each of them since :meth:`remove` was called."""
        if agree.size(group) == 1 or (in_stages and not self._may_vary):
            return
        from automodel_ckpt.parallel.fsdp_groups import sharded_groups

        for _module, sharded in sharded_groups(model):
            self._watch(sharded)

    def _watch(self, sharded: Any) -> None:
        first = len(self._parameters)
        for parameter in sharded.fsdp_params:
            if parameter.sharded_param.requires_grad:
                self._parameters.append(parameter)
                self._is_used.append(False)
        numbers = range(first, len(self._parameters))
        # fsdp2 calls it when the gradients of the group are complete.
        sharded.post_backward = partial(self._fill, sharded, numbers, sharded.post_backward)

    def _fill(
        self, sharded: Any, numbers: range, reduce: Callable[..., None], *arguments: Any
    ) -> None:
        if sharded.reduce_grads:
            for number in numbers:
                parameter = self._parameters[number]
                # It is set when the ranks gather the parameters of the group for the first time.
                if not hasattr(parameter, "_unsharded_param"):
                    continue
                gathered = parameter.unsharded_param
                if gathered.grad is not None or parameter.unsharded_accumulated_grad is not None:
                    self._is_used[number] = True
                else:
                    gathered.grad = torch.zeros_like(gathered)
            _in_one_type([self._parameters[number] for number in numbers])
        reduce(*arguments)

    def remove(self) -> None:
        """Remove the gradients of the parameters that no rank has used since the last call.

        The optimizer leaves these parameters unchanged, as on one rank. Called on all ranks after the backward passes
        of a step. It is a collective in the first step, and afterwards if a rank did not use a parameter in the first
        step, or if :func:`may_vary`.
        """
        is_used = self._is_used
        self._is_used = [False] * len(is_used)
        if not self._must_agree or not is_used:
            return
        is_unused = [not each for each in is_used]
        flags = agree.on_any_rank(self._group, [*is_used, *is_unused])
        used_somewhere, unused_somewhere = flags[: len(is_used)], flags[len(is_used) :]
        self._must_agree = self._may_vary or any(unused_somewhere)
        for parameter, keeps_gradient in zip(self._parameters, used_somewhere, strict=True):
            if not keeps_gradient:
                parameter.sharded_param.grad = None


def _in_one_type(parameters: list[Any]) -> None:
    """Give the gradients of the last micro-batch the type of those that fsdp2 has summed over earlier micro-batches.

    fsdp2 sums in the type of reductions, which is float32 where a model computes in bfloat16, and raises an error if
    it has sums of only some parameters of a group.
    """
    if all(each.unsharded_accumulated_grad is None for each in parameters):
        return
    for parameter in parameters:
        has_gathered = hasattr(parameter, "_unsharded_param")
        if has_gathered and parameter.unsharded_accumulated_grad is None:
            parameter.to_accumulated_grad_if_needed()


def may_vary(model: nn.Module) -> bool:
    """Whether it may depend on the batch which trained parameters of *model* have a gradient.

    True for experts that are modules each, for LongT5 with transient-global attention (its global blocks need long
    rows), and for modules of packages that are not known.
    """
    config = getattr(model, "config", None)
    if getattr(config, "encoder_attention_type", None) == "transient-global":
        return True
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and _ONE_EXPERT.search(name):
            return True
    return is_of_unknown_packages(model)


def is_of_unknown_packages(model: nn.Module) -> bool:
    """Whether *model* has modules of packages that are not known: of the user, or of a repository."""
    # fsdp2 and peft derive classes from the model's classes.
    classes = {each for module in model.modules() for each in type(module).__mro__}
    packages = {each.__module__.partition(".")[0] for each in classes}
    return not packages <= _KNOWN_PACKAGES


def check_call_order(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let each forward pass for training compare the calls of the layers of *model* that fsdp2 shards with the calls of
    other ranks. A rank raises when its neighbor in *group* calls another layer: :class:`RecipeError`.

    fsdp2 gathers a layer when it is called. If a rank leaves it out (layer drop, branches, early exits), the next layer
    that it gathers is mixed with this one if their sizes are equal, without an error. If ranks gather different numbers
    of layers, they wait for each other forever. Only models with modules of packages that are not known are checked:
    each call sends a number to the next rank and receives one, which takes as long with many ranks.
    """
    if agree.size(group) == 1 or not isinstance(model, FSDPModule):
        return
    if not is_of_unknown_packages(model):
        return
    rank, size = dist.get_rank(group), agree.size(group)
    before, after = (rank - 1) % size, (rank + 1) % size

    def compare(name: str, number: int, *_: Any) -> None:
        # A backward pass calls layers again to recompute their activations.
        if not torch.is_grad_enabled() or is_bw():
            return
        theirs = torch.empty(1, dtype=torch.int64)
        sending = dist.isend(torch.tensor([number]), group=group, group_dst=after, tag=_TAG)
        dist.recv(theirs, group=group, group_src=before, tag=_TAG)
        if sending is not None:
            sending.wait()
        if int(theirs) == number:
            return
        other = names[int(theirs)]
        raise RecipeError(
            "ranks call different layers of the model in the same step, which fsdp2 does not support",
            where="distributed.strategy",
            value=f"rank {rank} calls {name}, and rank {before} calls {other}",
            hint="call each layer on each rank (also layers that the batch does not need), or set "
            "distributed.strategy to ddp",
        )

    names: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and name:
            hook: Any = torch.compiler.disable(partial(compare, name, len(names)))  # type: ignore[no-untyped-call]
            # Before fsdp2's hook, which gathers.
            module.register_forward_pre_hook(hook, prepend=True)  # type: ignore[attr-defined]
            names.append(name)
    names.append("no further layer")
    hook = torch.compiler.disable(partial(compare, names[-1], len(names) - 1))  # type: ignore[no-untyped-call]
    model.register_forward_hook(hook)


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    limit: float | None,
    *,
    on_device: bool = False,
    in_step: Callable[[Any], None] | None = None,
    in_stages: bool = False,
    counted_elsewhere: frozenset[int] = frozenset(),
) -> Any:
    """Compute the 2-norm of all gradients together, and scale them down to *limit* if the norm is larger. Collective.

    Returns the norm as a number. If *in_step* is given and the gradients are on the CPU, they are not scaled here:
    *in_step* is called with the number by which the optimizer's step must divide them.

    With *on_device*, it does not wait for the norm, and returns a 0-dim float64 tensor. If *in_step* is given, it is
    called in every step with a tensor: 1 where the norm is not larger than *limit*. Otherwise, the gradients are
    multiplied in every step.

    Plain gradients count as equal on all ranks. If all are plain and *in_stages* is true, they count as different on
    each rank, except for parameters with ids in *counted_elsewhere*. Parameters may belong to several modules on
    several meshes, which no single operation of torch accepts.
    """
    local, total = _norm(list(parameters), in_stages, counted_elsewhere, on_device=on_device)
    if on_device:
        device = local[0].device if local else None
        norm = torch.as_tensor(total, dtype=torch.float64, device=device)
        if limit is not None and local:
            # 1e-6 as in torch.nn.utils.clip_grad_norm_, so that results equal torch's.
            if in_step is not None:
                in_step(torch.where(norm > limit, (norm + 1e-6) / limit, 1.0))
            else:
                # float32 as the arithmetic of the kernel; torch converts it to the type of each gradient.
                factor = torch.where(norm > limit, limit / (norm + 1e-6), 1.0).float()
                torch._foreach_mul_(local, factor)
        return norm
    number = float(total)
    # NaN compares false and infinity does not: the training loop drops the gradients of any norm that is not finite.
    if limit is not None and number > limit:
        if in_step is not None and local[0].is_cpu:
            in_step((number + 1e-6) / limit)
        else:
            torch._foreach_mul_(local, limit / (number + 1e-6))
    return number


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of *tensor*; a plain tensor is its own shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def complete_gradient(parameter: nn.Parameter) -> None:
    """Redistribute a gradient to the parameter's placements; hand-written plans may leave it as partial sums."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _norm(
    parameters: list[nn.Parameter],
    in_stages: bool,
    counted_elsewhere: frozenset[int],
    *,
    on_device: bool = False,
) -> tuple[list[Tensor], float | Tensor]:
    """This rank's gradients, and the 2-norm of the gradients of all ranks. Collective.

    The norm is a number or a tensor; with *on_device* a tensor, unless there are no gradients.
    """
    gradients = (parameter.grad for parameter in parameters)
    local = counted = [gradient for gradient in gradients if gradient is not None]
    sharded = any(isinstance(gradient, DTensor) for gradient in local)
    if sharded or counted_elsewhere:
        with torch.no_grad():  # otherwise autograd would record each to_local
            local, counted = _parts_here(parameters, sharded, counted_elsewhere)
    device = local[0].device if local else torch.device("cpu")
    here = _norm_here(counted, device, on_device=on_device)
    if not sharded and not in_stages:
        return local, here
    total = torch.as_tensor(here, dtype=torch.float64, device=device).square()
    # Over all ranks of the run: _counts and counted_elsewhere make each element count on one rank
    # only.
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    if on_device:
        return local, total.sqrt()
    return local, math.sqrt(total.item())


def _parts_here(
    parameters: list[nn.Parameter], sharded: bool, counted_elsewhere: frozenset[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's shards of all gradients, and those among them that this rank counts in the norm."""
    local, counted = [], []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        complete_gradient(parameter)
        gradient = parameter.grad
        shard = local_shard(gradient)
        local.append(shard)
        if id(parameter) not in counted_elsewhere and _counts(gradient, sharded):
            counted.append(shard)
    return local, counted


def _norm_here(gradients: list[Tensor], device: torch.device, *, on_device: bool) -> float | Tensor:
    """The 2-norm of *gradients*: a number on the CPU; elsewhere, or with *on_device*, a 0-dim tensor, without
    synchronization."""
    is_number = device.type == "cpu" and not on_device
    if is_number or not gradients:
        # One by one takes half as long as torch's foreach operation with its stack.
        return math.hypot(*[torch.linalg.vector_norm(gradient).item() for gradient in gradients])
    norms = torch._foreach_norm(gradients)
    return torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64)  # type: ignore[no-any-return]


def _counts(gradient: Tensor, sharded: bool) -> bool:
    """Whether the sum over all ranks includes this rank's shard: among ranks with equal shards, only the first."""
    if not isinstance(gradient, DTensor):
        return not sharded or dist.get_rank() == 0
    coordinate = gradient.device_mesh.get_coordinate() or ()
    for index, placement in zip(coordinate, gradient.placements, strict=True):
        if placement.is_replicate() and index > 0:
            return False
    return True


_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def keep_frozen_statistics(model: nn.Module) -> None:
    """Leave the frozen layers of batch normalization of *model* in evaluation mode.

    In training mode they would change their statistics, which adapters do not contain, and normalize a row with the
    statistics of its micro-batch, unlike the exported model.
    """
    number = 0
    for layer in _layers_with_statistics(model):
        parameters = list(layer.parameters())
        if parameters and not any(each.requires_grad for each in parameters):
            layer.eval()
            # Each call of train() on the model reaches all of its modules.
            setattr(layer, "train", MethodType(_unchanged, layer))  # noqa: B010
            number += 1
    if number:
        log.info("%d frozen layers of batch normalization keep their statistics", number)


def _unchanged(layer: nn.Module, mode: bool = True) -> nn.Module:
    """Do nothing: replaces the method ``train`` of *layer*, which keeps its mode."""
    return layer


class RunningStatistics:
    """The statistics that training changes. After each step, all ranks have rank 0's statistics, as with DDP.

    Otherwise, ranks would evaluate with different ones, and continue with rank 0's, which are saved.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = _layers_with_statistics(model)

    def equalize(self) -> None:
        """A collective for models with such layers, called after the forward passes of a step."""
        buffers: list[Tensor] = []
        for layer in self._layers:
            if layer.training:
                buffers += [layer.get_buffer("running_mean"), layer.get_buffer("running_var")]
        if not buffers:
            return
        together = torch.cat([each.double() for each in buffers])
        dist.broadcast(together, 0)
        parts = torch.split(together, [each.numel() for each in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part)


def _layers_with_statistics(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(module, _LAYERS) and module.running_mean is not None
    ]


class FixedBucketsDDP(DistributedDataParallel):
    """DistributedDataParallel with buckets in the reverse order of the model's parameters, in the first step too.

    It takes the arguments of DistributedDataParallel. The last layers have the first buckets, so that their sums are
    computed during the rest of the backward pass.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # torch has no option for this. DistributedDataParallel.join makes the same two calls where a rank has no step
        # to take the order from. The second one communicates: all ranks use the order of rank 0.
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, expect_sparse_gradient = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], expect_sparse_gradient[::-1]

    def _post_forward(self, output: Any) -> Any:
        """Finish a forward pass as DistributedDataParallel does, which looks for unused parameters from the tensors in
        the output. torch does not find those in an object with attributes."""
        if self.find_unused_parameters and _has_hidden_tensors(output):
            found = copy.copy(output)
            vars(found).update(self._post_forward(dict(vars(output))))
            return found
        return super()._post_forward(output)  # type: ignore[no-untyped-call]


def _has_hidden_tensors(output: Any) -> bool:
    if isinstance(output, (Tensor, list, tuple, dict)) or is_dataclass(output):
        return False
    return any(isinstance(each, Tensor) for each in getattr(output, "__dict__", {}).values())
