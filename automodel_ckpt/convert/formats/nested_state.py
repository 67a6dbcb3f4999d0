"""Where the state dict of a model is in the nested state that a program saved, and its names without wrappers.

A program saves the state dict under a usual key, next to the optimizer's, and sometimes both under a common one:
``{"app": {"model": ..., "optim": ...}}`` (the example of PyTorch's documentation of DCP).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from automodel_ckpt.checkpoint.files.type_aliases import Texts

Keys = tuple[str | int, ...]

MODEL_KEYS = ("state_dict", "model_state_dict", "model", "module", "model_state", "net")
"""The keys under which programs nest the state dict of a model, the first choice first."""
OPTIMIZER_KEYS = (
    *("optimizer", "optim", "optimizers", "optimizer_state", "optimizer_state_dict"),
    "optimizer_0",
)
"""The keys under which programs nest the state dict of an optimizer."""
# The names under which torch.compile, FSDP 1 and activation checkpointing register the module that they wrap.
_INNER_MODULES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# The attributes in which DistributedDataParallel, and Lightning's strategy for DeepSpeed, have the whole model.
_OUTER_MODULES = ("module.", "_forward_module.")
_OUTER_PREFIX = re.compile(r"(module\.|_forward_module\.)*")


def keys_of_model(paths: Iterable[Keys]) -> Keys:
    """Return the keys under which the state dict of the model is; no keys if the whole state is one.

    They are one or two usual keys, or one below the only other key. *paths* has the keys of each tensor in the state.
    """
    nested = [path for path in paths if len(path) > 1]
    firsts = {path[0] for path in nested}.difference(OPTIMIZER_KEYS)
    pairs = {path[:2] for path in nested if len(path) > 2}
    usual = [key for key in MODEL_KEYS if key in firsts]
    outer = usual[:1] or (firsts if len(firsts) == 1 else ())
    found = ((first, second) for first in outer for second in MODEL_KEYS)
    return next((keys for keys in found if keys in pairs), tuple(usual[:1]))


def without_wrappers(name: str) -> str:
    """Return the name of a parameter without the names that DDP, torch.compile and FSDP add, in front or inside."""
    name = _without_inner(name)
    stripped = ""
    while stripped != name:
        stripped = name
        for outer in _OUTER_MODULES:
            name = name.removeprefix(outer)
    return name


def names_without_wrappers(names: Collection[str]) -> Texts:
    """Return {name: name without the names of wrappers}, for the *names* of one model.

    Some, such as ``_orig_mod``, are removed wherever they are: no model has them. A model can have an attribute called
    ``module``, so that it is only removed in front of all names.
    """
    plain = {name: _without_inner(name) for name in names}
    if len(set(plain.values())) != len(plain):
        plain = {name: name for name in names}
    prefix = _outer_prefix(plain.values())
    return {name: inner.removeprefix(prefix) for name, inner in plain.items()}


def _without_inner(name: str) -> str:
    return ".".join(component for component in name.split(".") if component not in _INNER_MODULES)


def _outer_prefix(names: Collection[str]) -> str:
    # Not recursive: the names in a hostile file can have any number of prefixes.
    first, last = min(names, default=""), max(names, default="")
    prefix = _OUTER_PREFIX.match(first)[0]  # type: ignore[index]
    # What the first and the last name in order begin with, all do.
    while not last.startswith(prefix):
        prefix = prefix[: prefix.rfind(".", 0, -1) + 1]
    return prefix
