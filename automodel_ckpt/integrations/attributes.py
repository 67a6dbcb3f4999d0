"""What a Trainer keeps in its attributes: rollouts, counters and averages that its own checkpoints do not have.

A table names them for known classes. In every other class, an attribute that changes during training is state:
a checkpoint has it too, and a resume asks what it is. What is listed here was read in transformers 5.23 and TRL 1.16.
"""

from __future__ import annotations

import dis
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.trainer_callback import ExportableState

from automodel_ckpt.checkpoint.state.storable import check_safe, is_sharded
from automodel_ckpt.errors import RecipeError

_TRAINER = "transformers.trainer.Trainer"
_AVERAGES = "_metrics _total_train_tokens"
_ROLLOUTS = f"{_AVERAGES} _step _buffered_inputs _logs _pending_extra_logs _pending_metrics"
_SAVED = {
    # The loss since the last log, for the average of the next one.
    _TRAINER: "_tr_loss _globalstep_last_logged",
    "transformers.trainer_seq2seq.Seq2SeqTrainer": "",
    "trl.trainer.sft_trainer.SFTTrainer": _AVERAGES,
    "trl.trainer.dpo_trainer.DPOTrainer": _AVERAGES,
    "trl.trainer.kto_trainer.KTOTrainer": _AVERAGES,
    "trl.trainer.reward_trainer.RewardTrainer": _AVERAGES,
    "trl.trainer.grpo_trainer.GRPOTrainer": f"{_ROLLOUTS} entropy_coef _last_world_entropy",
    "trl.trainer.rloo_trainer.RLOOTrainer": _ROLLOUTS,
}
"""The attributes of a class that a resume needs."""
_WITHOUT_EFFECT = {
    "transformers.trainer_seq2seq.Seq2SeqTrainer": "_gen_kwargs",
    "trl.trainer.grpo_trainer.GRPOTrainer": "_current_train_step_time _last_loaded_step environments "
    "_batch_environments _sync_tool_dicts _async_tool_dicts",
    "trl.trainer.rloo_trainer.RLOOTrainer": "_current_train_step_time _last_loaded_step",
}
"""Attributes that change, and that a resumed run computes anew."""
_WITHOUT_STATE = (
    "automodel_ckpt.",
    "transformers.",
    "trl.trainer.callbacks.LogCompletionsCallback",
    "trl.trainer.callbacks.RichProgressCallback",
    "trl.trainer.callbacks.SyncRefModelCallback",
    "trl.trainer.callbacks.WeaveCallback",
)
"""Beginnings of the names of callbacks that have no state of their own."""
_LARGE = (nn.Module, torch.optim.Optimizer)
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor, np.ndarray, np.generic)


class TrainerAttributes:
    """The attributes of a Trainer that a checkpoint has: listed in the table, in *saved*, and others that change.

    *not_saved* are attributes that change without effect on a resumed run. Create it when training begins, and give it
    to the checkpoint as one object, next to :meth:`modules`.
    """

    checkpoint_scope = "rank"

    derive: Callable[[int], object]

    def __init__(self, trainer: Any, saved: Collection[str], not_saved: Collection[str]) -> None:
        self._trainer = trainer
        listed = [*_listed(_SAVED, trainer), *saved]
        if getattr(trainer.args, "sync_ref_model", False):
            listed.append("ref_model")
        self._saved = [name for name in listed if name not in not_saved]
        self._ignored = {*_listed(_WITHOUT_EFFECT, trainer), *not_saved, *self._saved}
        for known in _classes(trainer):
            is_base = _name(known) == _TRAINER
            for name in _names_set_by(known):
                value = getattr(trainer, name, None)
                # Modules outside the table, such as a reference, do not train, and reading them takes long.
                if is_base or isinstance(value, _LARGE) or not _is_plain(value):
                    self._ignored.add(name)
        self._before = self._digests()
        self._unknown: dict[str, bool] = {}
        self._order = _order(trainer)
        if self._saved == _SAVED[_TRAINER].split():
            # They are of one log: on other ranks, its average begins anew.
            self.derive = lambda step: None

    def begin_epoch(self) -> None:
        """Note the state of the data loader's generators, by which a resumed run repeats the order of the epoch."""
        self._order = _order(self._trainer)

    def unknown(self) -> dict[str, bool]:
        """Return the attributes that have changed since training began, but are in no table, and whether they are
        plain data, which a checkpoint stores."""
        found = {}
        for name, digest in self._digests().items():
            if digest != self._before.get(name):
                found[name] = _is_plain(getattr(self._trainer, name))
        self._unknown = found
        return found

    def modules(self) -> dict[str, Any]:
        """Return the modules and optimizers among the attributes, which a checkpoint stores under their own names."""
        found = {name: getattr(self._trainer, name, None) for name in self._saved}
        return {name: value for name, value in found.items() if isinstance(value, _LARGE)}

    def state_dict(self) -> dict[str, Any]:
        values = {}
        for name in self._saved:
            value = getattr(self._trainer, name, None)
            if not isinstance(value, _LARGE):
                values[name] = self._stored(name, value)
        # Those of the last call of unknown(), with modules: the next start does not know their names.
        for name, is_plain in self._unknown.items():
            if is_plain:
                values[name] = self._stored(name, getattr(self._trainer, name))
        return {"values": values, "order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._saved:
            if name not in state["values"]:
                continue
            before = getattr(self._trainer, name, None)
            restored = _restored(before, state["values"][name], self._trainer.args.device)
            setattr(self._trainer, name, restored)
        self._order = state["order"]
        for place, generator in _generators(self._trainer).items():
            # Some samplers get theirs, with a seed of the epoch, when they begin.
            if place in self._order:
                generator.set_state(self._order[place])

    def _stored(self, name: str, value: Any) -> Any:
        """Return what a checkpoint stores of an attribute. Raises :class:`RecipeError` for objects without state."""
        try:
            return _plain(value)
        except _Opaque as error:
            raise RecipeError(
                "an attribute of the trainer cannot be saved",
                where=f"{type(self._trainer).__name__}.{name}",
                value=str(error),
                hint="give its class state_dict and load_state_dict, or name it in not_saved of CheckpointCallback",
            ) from error

    def _digests(self) -> dict[str, str]:
        """Return a text for each attribute that may be state, which differs if the value does."""
        names = sorted(vars(self._trainer).keys() - self._ignored)
        return {name: _digest(getattr(self._trainer, name)) for name in names}


def callback_digests(trainer: Any) -> dict[str, str]:
    """Return a text for each attribute of callbacks that are not saved, which differs if the value does."""
    parts = [trainer, *vars(trainer).values()]
    found = {}
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if isinstance(callback, ExportableState) or _name(kind).startswith(_WITHOUT_STATE):
            continue
        for name, value in vars(callback).items():
            if not any(value is part for part in parts):
                found[f"{kind.__name__}.{name}"] = _digest(value)
    return found


# ---------------------------------------------------------------- classes


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _classes(trainer: Any) -> list[type]:
    """Return the classes of *trainer* that the table knows."""
    return [kind for kind in type(trainer).__mro__ if _name(kind) in _SAVED]


def _listed(table: Mapping[str, str], trainer: Any) -> list[str]:
    """Return the attributes that *table* has for the classes of *trainer*."""
    return [name for kind in _classes(trainer) for name in table.get(_name(kind), "").split()]


@functools.cache
def _names_set_by(kind: type) -> frozenset[str]:
    """Return the attributes that the methods of a class set."""
    functions = [getattr(value, "__func__", value) for value in vars(kind).values()]
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    names = set()
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for step in dis.get_instructions(code):
            if step.opname == "STORE_ATTR":
                names.add(step.argval)
    return frozenset(names)


# ---------------------------------------------------------------- values


class _Opaque(Exception):
    """A value that is no plain data and has no state."""


def _plain(value: Any) -> Any:
    """Return *value* as plain data. Raises :class:`_Opaque` for objects without state."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if is_sharded(value):
        return value.to_local()
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return _plain(value.state_dict())
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(each) for each in value]
    if isinstance(value, _PLAIN):
        return value
    raise _Opaque(_name(type(value)))


def _is_plain(value: Any) -> bool:
    """Return whether a checkpoint can store *value*."""
    try:
        check_safe("", _plain(value))
    except (_Opaque, RecipeError):
        return False
    return True


def _digest(value: Any, depth: int = 2) -> str:
    """Return a text that differs if *value* does. Of objects without state, it has the attributes, to some depth."""
    if _is_plain(value):
        return check_safe("", _plain(value))
    inside: Any = value
    if not isinstance(value, Mapping | list | tuple | deque):
        is_code = isinstance(value, type | ModuleType) or callable(value)
        inside = {} if is_code else getattr(value, "__dict__", {})
    if depth == 0 or not inside:
        return _name(type(value))
    parts = inside.items() if isinstance(inside, Mapping) else enumerate(inside)
    return f"{_name(type(value))}{[(str(key), _digest(each, depth - 1)) for key, each in parts]}"


def _restored(before: Any, value: Any, device: torch.device) -> Any:
    """Return what an attribute with the value *before* becomes by the plain data *value*."""
    if isinstance(before, torch.Generator):
        before.set_state(value)
        return before
    if hasattr(before, "load_state_dict"):
        before.load_state_dict(value)
        return before
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        factory = getattr(before, "default_factory", None)
        made: dict[Any, Any] = {} if factory is None else defaultdict(factory)
        old = before if isinstance(before, Mapping) else {}
        for key, each in value.items():
            inner = old[key] if key in old else factory and factory()
            made[key] = _restored(inner, each, device)
        return made
    if isinstance(value, list):
        found = [_restored(None, each, device) for each in value]
        if isinstance(before, deque):
            return deque(found, before.maxlen)
        return tuple(found) if isinstance(before, tuple) else found
    return value


# ---------------------------------------------------------------- the order of the data


def _generators(trainer: Any) -> dict[str, torch.Generator]:
    """Return the random generators of the data loader that trains, and of its samplers, by place."""
    found: dict[str, torch.Generator] = {}
    owners = [("", trainer.callback_handler.train_dataloader)]
    while owners:
        place, owner = owners.pop()
        for name in ("generator", "sampler", "batch_sampler"):
            value = getattr(owner, name, None)
            if isinstance(value, torch.Generator):
                found[f"{place}.{name}"] = value
            elif value is not None:
                owners.append((f"{place}.{name}", value))
    return found


def _order(trainer: Any) -> dict[str, torch.Tensor]:
    return {place: generator.get_state() for place, generator in _generators(trainer).items()}
