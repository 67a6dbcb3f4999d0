"""Where the state dict of a model is in the nested state that a program saved, and its names without wrappers.

A program saves the state dict under a key of its choice, beside the optimizer's, and sometimes both under a common one:
``{"app": {"model": ..., "optim": ...}}`` (the example of PyTorch's documentation of DCP). Names of a state dict are
joined by dots, unlike the keys around it, so that its place is known without its key.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

Keys = tuple[str | int, ...]

OPTIMIZER_KEYS = ("optimizer", "optim", "optimizers", "optimizer_state", "optimizer_state_dict")
"""The keys under which programs nest the state dict of an optimizer."""
_OPTIMIZER_KEY = re.compile(r"optim(izer)?s?(_\w+)?", re.ASCII)
# The names under which torch.compile, FSDP 1 and activation checkpointing register the module that they wrap.
_INNER_MODULES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# The attributes in which DistributedDataParallel, and Lightning's strategy for DeepSpeed, have the whole model.
_OUTER_MODULES = ("module.", "_forward_module.")
_MAX_DEPTH = 8


def keys_of_model(paths: Iterable[Keys], known: Sequence[str]) -> Keys:
    """Return the keys under which the state dict of the model is; no keys if the whole state is one, or it is unknown.

    *paths* are those of all tensors in the state, and *known* the usual keys of models, the first choice first. Any
    other key is that of the model if all tensors but an optimizer's are below it.
    """
    rest = [path for path in paths if not _is_of_optimizer(path)]
    keys: Keys = ()
    was_known = False
    for _ in range(_MAX_DEPTH):
        if any(len(path) == 1 and "." in str(path[0]) for path in rest):
            return keys
        children = {path[0]: None for path in rest if len(path) > 1}
        usual = next((key for key in known if key in children), None)
        if usual is not None and not was_known:
            child: str | int = usual
            was_known = True
        elif len(children) == 1 and all(len(path) > 1 for path in rest):
            (child,) = children
        else:
            return ()
        keys = (*keys, child)
        rest = [path[1:] for path in rest if len(path) > 1 and path[0] == child]
    return ()


def _is_of_optimizer(path: Keys) -> bool:
    if any(_OPTIMIZER_KEY.fullmatch(str(key)) for key in path[:-1]):
        return True
    # A state dict of an optimizer has state -> parameter -> entry; flattened, the three are one name.
    last = str(path[-1])
    is_entry = len(path) > 2 and path[-3] == "state" and "." not in last
    pairs = itertools.pairwise(path)
    is_numbered = any(key == "state" and isinstance(number, int) for key, number in pairs)
    return is_entry or is_numbered or last.startswith(("state.", "param_groups."))


def without_wrappers(name: str) -> str:
    """Return the name of a parameter without the names that DDP, torch.compile and FSDP add, in front or inside."""
    name = _without_inner(name)
    stripped = ""
    while stripped != name:
        stripped = name
        for outer in _OUTER_MODULES:
            name = name.removeprefix(outer)
    return name


def names_without_wrappers(names: Collection[str]) -> Mapping[str, str]:
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
    components = name.split(".")
    return ".".join(component for component in components if component not in _INNER_MODULES)


def _outer_prefix(names: Collection[str]) -> str:
    prefix = ""
    wrappers: str | None = ""
    while names and wrappers is not None:
        prefix += wrappers
        wrappers = next(
            (
                outer
                for outer in _OUTER_MODULES
                if all(name.startswith(prefix + outer) for name in names)
            ),
            None,
        )
    return prefix
