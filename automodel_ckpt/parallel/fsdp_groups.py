"""The groups of parameters that fsdp2 shards together: their types, what a model reads of them, and meshes of one rank.

A group may contain parameters of several types. A model may read the type of a weight that fsdp2 has not gathered.

On one rank, fsdp2 gathers and reduces nothing: it only casts parameters and gradients. torch casts each parameter into
new memory, and copies the result to where the gathered parameter is. It casts the gradients of a group into a buffer,
copies that instead of reducing it, and adds the copy to the gradients of earlier micro-batches. Here, a parameter is
cast with one copy, and the gradient of a first micro-batch, too. Those of later ones are added without one. For an 8B
model in bfloat16 with float32 weights, this saves 128 GB of memory traffic in a first micro-batch and 192 GB in a later
one: 30 and 45 ms of a GPU with 4.3 TB/s. All values stay the same.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.utils._pytree import tree_map_only

from automodel_ckpt.errors import RecipeError

_SHOWING = "_forward_pass_that_shows_types"
"""The attribute of a model, that fsdp2 has sharded, with the state of its forward passes."""
_READS_NO_VALUES = frozenset(
    {
        "empty_like",
        "full_like",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "zeros_like",
    }
)
"""Operations that read the shape, the type and the device of a tensor only."""


def show_compute_types(model: nn.Module, kept: Collection[int] = ()) -> None:
    """Let the forward passes of *model*, which fsdp2 has sharded, read the type in which each parameter is computed.

    A model may convert inputs to the type of a layer's weight before it calls the layer. fsdp2 has not gathered the
    weight then: it is a DTensor of the type in which it is stored. Therefore the modules have tensors without values in
    the place of such parameters during a forward pass. Computing with one raises :class:`RecipeError`. Parameters with
    ids in *kept* are computed in the type in which they are stored. State dicts never contain such tensors.
    """
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    of_group: dict[Any, list[_Shown]] = {}
    for module, group in sharded_groups(model):
        found = of_group[module] = []
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            is_cast = sharded.is_floating_point() and id(sharded) not in kept
            computed = group.mp_policy.param_dtype if is_cast else None
            found.append(_Shown(parameter, computed or sharded.dtype, names[module]))
    forward = _ForwardPass()
    for outer in model.modules():
        inner: list[_Shown] = []
        for part in outer.modules():
            if part is not outer:
                inner += of_group.get(part, ())
        if inner:
            forward.watch(outer, inner)
    shown = list(itertools.chain.from_iterable(of_group.values()))
    for owner in {owner for each in shown for owner in each.owners}:
        forward.end_before_states_of(owner)
    setattr(model, _SHOWING, forward)


def leave_forward_pass(model: nn.Module) -> None:
    """Put the parameters of *model* in their places after a forward pass that did not end, such as by Ctrl+C."""
    forward: _ForwardPass | None = getattr(model, _SHOWING, None)
    if forward is not None:
        forward.leave()


class _Shown:
    """A parameter of fsdp2. During a forward pass, modules have a tensor without values in its place."""

    def __init__(self, parameter: Any, dtype: torch.dtype, layer: str) -> None:
        self._parameter = parameter
        self._set = parameter._setattr_on_modules
        sharded: nn.Parameter = parameter.sharded_param
        self._stand_in: Any = NotGathered(
            sharded.shape,
            dtype,
            parameter.device,
            layer,
            requires_grad=sharded.requires_grad,
        )
        self._is_shown = False
        places = parameter._module_info
        self.owners = {places.module, *places.shared_modules}
        # fsdp2 calls it when it gathers the parameter, and when it frees what it has gathered.
        parameter._setattr_on_modules = self._set_unless_shown

    def _set_unless_shown(self, value: nn.Parameter) -> None:
        if self._is_shown and value is self._parameter.sharded_param:
            value = self._stand_in
        self._set(value)

    def show(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        if self._parameter.sharded_state is ShardedState.SHARDED:
            self._set_unless_shown(self._parameter.sharded_param)


class _ForwardPass:
    """Shows the parameters inside of a module while the module computes. The outermost module decides."""

    def __init__(self) -> None:
        self._outermost: nn.Module | None = None
        self._depth = 0
        self._shown: Sequence[_Shown] = ()

    def watch(self, module: nn.Module, parameters: Sequence[_Shown]) -> None:
        def begin(*_: Any) -> None:
            if self._outermost is None:
                self._outermost = module
                self._shown = parameters
                for each in parameters:
                    each.show(True)
            if self._outermost is module:
                # A model may call itself, such as for a second pass over its outputs.
                self._depth += 1

        def end(*_: Any) -> None:
            if self._outermost is not module:
                return
            self._depth -= 1
            if self._depth == 0:
                self.leave()

        # fsdp2's own hook is before this one: it gathers the other parameters of the module.
        module.register_forward_pre_hook(torch.compiler.disable(begin))  # type: ignore[no-untyped-call]
        # Also after an error, but torch does not call it after an exception like KeyboardInterrupt.
        module.register_forward_hook(torch.compiler.disable(end), always_call=True)  # type: ignore[no-untyped-call]

    def end_before_states_of(self, module: nn.Module) -> None:
        """Leave the forward pass, which may have been interrupted, before a state dict is read or written."""
        any_module: Any = module
        any_module.register_state_dict_pre_hook(lambda *_: self.leave())
        any_module.register_load_state_dict_pre_hook(lambda *_: self.leave())

    def leave(self) -> None:
        self._outermost, self._depth = None, 0
        for each in self._shown:
            each.show(False)
        self._shown = ()


class NotGathered(Tensor):
    """A parameter without values, with the shape, the type and the device that it has when it is gathered."""

    _layer: str
    _is_param = True

    # A subclass without values: results are ordinary tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        layer: str,
        requires_grad: bool = False,
    ) -> NotGathered:
        made: NotGathered = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made._layer = layer
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"NotGathered({tuple(self.shape)}, {self.dtype}, layer={self._layer!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name == "detach":
            given = args[0]
            return NotGathered(given.shape, given.dtype, given.device, given._layer)
        if name in _READS_NO_VALUES:
            args, kwargs = tree_map_only(NotGathered, NotGathered._without_memory, (args, kwargs))
            return function(*args, **kwargs or {})
        if name in ("to", "type_as"):
            # torch decomposes them before, except in inference mode.
            return function.decompose(*args, **kwargs or {})
        layers: list[str] = []
        tree_map_only(NotGathered, lambda each: layers.append(each._layer), (args, kwargs))
        raise RecipeError(
            "the model computes with a weight of a layer outside of the layer, where fsdp2 has not gathered it",
            where="distributed.strategy",
            value=f"{name} with a weight of {layers[0] or 'the model'}",
            hint="set distributed.strategy to ddp",
        )

    def _without_memory(self) -> Tensor:
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


def divide_groups_by_type(model: nn.Module, kept: Collection[int] = ()) -> None:
    """Let the groups that fsdp2 has made of *model* contain parameters of several types.

    fsdp2 gathers a group in one type, and raises an error in the first forward pass if it contains trained parameters
    of several. Parameters with ids in *kept* are gathered in the type in which they are stored. Gradients are reduced
    once for each type. Nothing changes for a group of one type.
    """
    for _module, group in sharded_groups(model):
        by_type: dict[tuple[torch.dtype, bool], list[Any]] = defaultdict(list)
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            # Bytes of quantized weights are never cast.
            is_kept = id(sharded) in kept or not sharded.is_floating_point()
            by_type[sharded.dtype, is_kept].append(parameter)
        if len(by_type) > 1 or any(is_kept for _, is_kept in by_type):
            _DividedGroup(group, by_type)


def sharded_groups(model: nn.Module) -> Iterator[tuple[FSDPModule, Any]]:
    """(module, fsdp2's group of its parameters) of each module in *model* that has such a group."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group: Any = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            yield module, group


def check_gathered_types(model: nn.Module) -> None:
    """Raise :class:`RecipeError` if a forward pass of *model* has converted a parameter that fsdp2 gathers.

    A conversion gives the gathered parameter other memory. fsdp2 does not see that: it would gather later values into
    the former memory, and the model would compute with the first ones in all steps.
    """
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    for _module, group in sharded_groups(model):
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            # It is set when the parameter is gathered for the first time.
            gathered = getattr(parameter, "_unsharded_param", None)
            # Tensors of torchao are gathered in types that they choose.
            has_type = hasattr(sharded.to_local(), "fsdp_post_all_gather")
            if gathered is None or has_type or not sharded.is_floating_point():
                continue
            expected = parameter.param_dtype or sharded.dtype
            if gathered.dtype == expected:
                continue
            place = parameter._module_info
            name = f"{prefixes[id(place.module)]}{place.param_name}"
            raise RecipeError(
                "the model converts a parameter in its forward pass, which fsdp2 does not support",
                where="distributed.strategy",
                value=f"fsdp2, {name}: from {expected} to {gathered.dtype}",
                hint="set distributed.strategy to ddp",
            )


@dataclass(frozen=True)
class _Reduction:
    """Parameters with gradients that are reduced together, and the types that fsdp2 has for this."""

    parameters: list[Any]
    original: torch.dtype | None
    reduced: torch.dtype | None


class _DividedGroup:
    """A group of fsdp2 with parameters of several types. Replaces two methods of the group."""

    def __init__(self, group: Any, by_type: Mapping[tuple[torch.dtype, bool], list[Any]]) -> None:
        self._group = group
        self._parts: list[tuple[list[Any], MixedPrecisionPolicy]] = []
        for (_, is_kept), parameters in by_type.items():
            policy = MixedPrecisionPolicy() if is_kept else group.mp_policy
            self._parts.append((parameters, policy))
        self._reductions: list[_Reduction] = []
        self._init_types, self._reduce = group._init_mp_dtypes, group.post_backward
        group._init_mp_dtypes = self._init_types_of_parts
        group.post_backward = self._reduce_parts

    def _init_types_of_parts(self) -> None:
        group = self._group
        everything, policy = group.fsdp_params, group.mp_policy
        self._reductions = []
        frozen: list[Any] = []
        for parameters, part_policy in self._parts:
            group.fsdp_params, group.mp_policy = parameters, part_policy
            self._init_types()
            trained = [each for each in parameters if each.sharded_param.requires_grad]
            frozen += [each for each in parameters if not each.sharded_param.requires_grad]
            if trained:
                reduction = _Reduction(trained, group._orig_dtype, group._reduce_dtype)
                self._reductions.append(reduction)
        group.fsdp_params, group.mp_policy = everything, policy
        # A reduction waits for the one before, so the largest is last.
        self._reductions.sort(
            key=lambda reduction: sum(each.sharded_param.numel() for each in reduction.parameters)
        )
        if self._reductions:
            self._reductions[-1].parameters.extend(frozen)

    def _reduce_parts(self, *arguments: Any) -> None:
        group = self._group
        everything = group.fsdp_params
        before = group._sharded_state, group._training_state
        for reduction in self._reductions:
            group.fsdp_params = reduction.parameters
            group._orig_dtype, group._reduce_dtype = reduction.original, reduction.reduced
            # Each call frees the gathered parameters that it sees, and changes the state of the group.
            group._sharded_state, group._training_state = before
            self._reduce(*arguments)
        group.fsdp_params = everything
        if not self._reductions:
            self._reduce(*arguments)


def cast_without_copies(model: nn.Module) -> None:
    """Let *model*, which fsdp2 has sharded over one rank, cast parameters and gradients with one copy each."""
    for _module, group in sharded_groups(model):
        for parameter in group.fsdp_params:
            if type(parameter) is FSDPParam:
                parameter.__class__ = _CastParameter
        # fsdp2 calls it when the gradients of the group are complete.
        group.post_backward = partial(_keep_gradients, group, group.post_backward)


@torch.no_grad()
def _keep_gradients(group: Any, reduce: Callable[..., None], *arguments: Any) -> None:
    """Turn the gradients of gathered parameters into the shards' gradients. *reduce* does this with all that remain.

    All of it runs on the stream of the backward pass, so memory needs no synchronization.
    """
    taken: list[tuple[_CastParameter, Tensor, bool]] = []
    # As by default.
    only_sums = group.gradient_divide_factor is None and group._all_reduce_hook is None
    if group.reduce_grads and only_sums:
        for parameter in group.fsdp_params:
            if isinstance(parameter, _CastParameter) and parameter.has_plain_gradient():
                taken.append((parameter, *parameter.take_gradient()))
    # It also frees the gathered parameters: gradients may reuse their memory.
    reduce(*arguments)
    taken.reverse()
    while taken:
        # The next copy may need the memory that this gradient frees.
        _keep_gradient(*taken.pop())


def _keep_gradient(parameter: _CastParameter, gradient: Tensor, is_owned: bool) -> None:
    shard = parameter.sharded_param
    if shard.grad is None:
        if not is_owned or gradient.dtype != shard.dtype:
            # Always a copy: what autograd gives may be the memory of a CUDA graph, which the next step overwrites.
            gradient = gradient.to(shard.dtype, copy=True, memory_format=torch.contiguous_format)
        shard.grad = parameter.to_sharded_dtensor(gradient)
        return
    if not _is_exact(gradient.dtype, shard.dtype):
        # As fsdp2 rounds it: the addition would be computed in the wider type.
        gradient = gradient.to(shard.dtype)
    total: Any = shard.grad
    total._local_tensor += gradient


def _is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether *target* can represent all values of *source*."""
    return torch.promote_types(source, target) == target


class _CastParameter(FSDPParam):
    """A parameter that is cast while it is copied into the memory of the gathered parameter, and its gradient."""

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """What fsdp2 copies into the gathered parameter, which has the dtype of computation from the first time on."""
        shard = self._sharded_local_tensor
        is_plain = not self.offload_to_cpu and not hasattr(shard, "fsdp_pre_all_gather")
        if is_plain and self.all_gather_outputs and self.sharded_state == ShardedState.SHARDED:
            return [self._sharded_param_data]
        return super().all_gather_inputs

    def has_plain_gradient(self) -> bool:
        """Whether there is a gradient that has only to be cast and added."""
        # It is set when the parameter is gathered for the first time.
        if not hasattr(self, "_unsharded_param"):
            return False
        if self.offload_to_cpu or self.sharded_param._post_accumulate_grad_hooks:
            return False
        gradient = self.unsharded_accumulated_grad
        if gradient is None:
            gradient = self.unsharded_param.grad
        if gradient is None:
            return False
        return self.reduce_dtype is None or _is_exact(gradient.dtype, self.reduce_dtype)

    def take_gradient(self) -> tuple[Tensor, bool]:
        """The gradient of the gathered parameter, which loses it, and whether its memory is only this parameter's."""
        self.accumulate_unsharded_grad_if_needed()
        accumulated = self.unsharded_accumulated_grad
        if accumulated is None:
            gradient = self.unsharded_grad_data
            self.unsharded_param.grad = None
            return gradient, False
        # The sum of micro-batches that fsdp2 has not reduced, in memory of the type of reductions.
        gradient = self.unsharded_accumulated_grad_data
        self.unsharded_accumulated_grad = None
        return gradient, type(gradient) is Tensor and gradient.is_contiguous()
