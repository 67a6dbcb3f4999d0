"""The types of parameters that fsdp2 has not gathered, as the code of a model reads them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.utils._pytree import tree_map_only

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.ranks.group_types import sharded_groups

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
            hint="call the layer (not its forward method), or set distributed.strategy to ddp",
        )

    def _without_memory(self) -> Tensor:
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
