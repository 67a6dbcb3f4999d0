"""What is left to load after the values of a module were read into its own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.checkpoint import module_tensors
from automodel_ckpt.checkpoint.module_tensors import module_state, set_module_state


class Noting(nn.Linear):
    """Notes that it was loaded by PyTorch."""

    is_loaded = False

    def _load_from_state_dict(self, *words: Any, **options: Any) -> None:
        self.is_loaded = True
        super()._load_from_state_dict(*words, **options)


class WithExtraState(nn.Linear):
    """Has state that is not a tensor."""

    extra: Any = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.extra])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = int(state.item())


def tied_list() -> nn.Module:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    model[2].weight = model[0].weight
    model.register_buffer("mask", torch.ones(2), persistent=False)
    model.register_buffer("scale", torch.ones(2))
    return model


def hooked(register: Callable[[nn.Module, Any], Any]) -> nn.Module:
    model = nn.ModuleList([nn.Linear(2, 2)])
    register(model[0], lambda *_: None)
    return model


def copying() -> nn.Module:
    """Its state dict contains copies: values that are read into them do not reach the module."""
    model = nn.ModuleList([nn.Linear(2, 2)])

    def copy(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in list(state):
            if name.startswith(prefix):
                state[name] = state[name].clone()

    model[0]._register_state_dict_hook(copy)
    return model


def read(module: nn.Module) -> None:
    """Fill the tensors of the state with twos, and load it."""
    state, tied = module_state(module)
    for value in state.values():
        value.fill_(2)
    set_module_state(module, state, tied, strict=True)


def test_tensors_that_have_their_values_are_not_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded by PyTorch, which is quadratic in the length of a list")

    monkeypatch.setattr(module_tensors, "set_model_state_dict", fail)
    model = tied_list()
    read(model)
    assert all(bool((value == 2).all()) for value in model.state_dict().values())


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.ModuleList([Noting(2, 2)]),
        lambda: nn.ModuleList([WithExtraState(2, 2)]),
        lambda: hooked(lambda m, hook: m.register_load_state_dict_pre_hook(hook)),
        lambda: hooked(lambda m, hook: m.register_load_state_dict_post_hook(hook)),
        copying,
    ],
    ids=["method", "extra state", "hook before", "hook after", "copies"],
)
def test_a_module_that_does_more_when_it_is_loaded_is_loaded_by_pytorch(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    load = module_tensors.set_model_state_dict

    def counted(*words: Any, **options: Any) -> Any:
        calls.append(words)
        return load(*words, **options)

    monkeypatch.setattr(module_tensors, "set_model_state_dict", counted)
    model = make()
    read(model)
    assert len(calls) == 1
    assert all(bool((value == 2).all()) for value in model.state_dict().values())


def test_a_state_that_lacks_a_tensor_is_an_error() -> None:
    model = tied_list()
    state, tied = module_state(model)
    del state["1.bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        set_module_state(model, state, tied, strict=True)
