"""Differences between a checkpoint and the state of a run, as errors that list them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Values
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.parts.manifest import NOT_SAVED, Manifest
from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.state.storable import DTYPE_CODES, unstorable_placement
from automodel_ckpt.errors import CheckpointUnusable, unusable

_MAX_LINES = 20
DIVIDED = "with different options"
"""In the reason of a group with parameters of several saved groups."""
_CONTAINED = {"F64": ("F32", "F16", "BF16"), "F32": ("F16", "BF16")}
"""The floating-point types that another type can represent."""


def differences(tree: Tree, state_dict: Values, cast: Collection[str] = ()) -> list[str]:
    """The differences between a tree and a flat state dict, one line each; empty where it can be loaded.

    The types of the tensors *cast* (some of :func:`cast_names`) are not compared.
    """
    here = dict(state_dict)
    lines = [
        f"- {fqn}: saved, but not here" for fqn in (*tree.tensors, *tree.objects) if fqn not in here
    ]
    for fqn in here:
        if fqn not in tree.tensors and fqn not in tree.objects:
            lines.append(f"+ {fqn}: here, but not saved")
    for fqn, tensor in tree.tensors.items():
        if fqn not in here:
            continue
        # With the dtype: reading into another one casts without a message.
        saved = f"{tensor.dtype} {list(tensor.shape)}"
        now = _describe(here[fqn])
        if now != saved and fqn not in cast:
            lines.append(f"~ {fqn}: saved as {saved}, here {now}")
    return lines


def cast_names(tree: Tree, state_dict: Values) -> set[str]:
    """The names of the tensors that differ only in their floating-point type, which can represent all saved values."""
    found = set()
    for name, here in state_dict.items():
        saved = tree.tensors.get(name)
        if saved is None or not isinstance(here, torch.Tensor) or unstorable_placement(here):
            continue
        is_contained = saved.dtype in _CONTAINED.get(DTYPE_CODES.get(here.dtype, ""), ())
        if is_contained and tuple(here.shape) == tuple(saved.shape):
            found.add(name)
    return found


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        text = f"{DTYPE_CODES.get(value.dtype, str(value.dtype))} {list(value.shape)}"
        # Each rank would get the whole value as its summand.
        placement = unstorable_placement(value)
        return f"{text} with the placement {placement}" if placement else text
    return f"a value of type {type(value).__name__}"


def first_lines(lines: list[str]) -> str:
    """The first of many lines, indented, as the value of a message."""
    first = lines[:_MAX_LINES]
    if len(lines) > _MAX_LINES:
        first.append(f"... and {len(lines) - _MAX_LINES} more")
    return "".join(f"\n    {line}" for line in first)


def check_differences(
    path: Path,
    item: Item,
    tree: Tree,
    state: Values,
    further: Iterable[str] = (),
    cast: Collection[str] = (),
) -> None:
    """Raise :class:`CheckpointUnusable` if the *state* of *item* differs from *tree*, in the checkpoint *path*.

    Names, shapes and dtypes are compared, except the dtypes of the tensors *cast*. *further* are differences that the
    caller has found, one line each.
    """
    lines = [*differences(tree, state, cast), *further]
    if not lines:
        return
    hints = [
        "resume with the model, data type (model.dtype), settings and versions that wrote it (see its config.yaml)"
    ]
    if item.kind == "optimizer":
        lines = _by_entry(item.name, lines)
        if any(DIVIDED in line for line in lines):
            hints.append(
                f"give the optimizer the saved groups: {item.name}.no_decay lists the parameters without weight decay, "
                f"and {item.name}.groups those with other options"
            )
        allow = f"--checkpoint.allow_missing_state '[{item.name}]'"
        hints.append(f"continue with new state of the optimizer, and the saved weights: {allow}")
    if item.kind == "module":
        hints.append(
            f"start a new run from its weights: --init_from.path {path} and another checkpoint.checkpoint_dir "
            "(checkpoint.on_incompatible sibling creates one)"
        )
    what = f"the checkpoint's {item.name!r} does not match this run"
    raise unusable(what, path, first_lines(lines), "; or ".join(hints))


def _by_entry(name: str, lines: Iterable[str]) -> list[str]:
    """Combine lines about the same entry of several parameters or groups of the optimizer *name* into one each."""
    entry = re.compile(rf"(. {re.escape(name)}\.(?:state|param_groups)\.).+\.(\w+: .*)")
    counts: Counter[str] = Counter()
    first: TextDict = {}
    for line in lines:
        match = entry.fullmatch(line)
        combined = line if match is None else f"{match[1]}*.{match[2]}"
        counts[combined] += 1
        first.setdefault(combined, line)
    return [combined if counts[combined] > 1 else first[combined] for combined in counts]


def has_weights_only(manifest: Manifest) -> bool:
    """Whether a checkpoint has the weights of a model and no other state, such as ``ckpt import`` writes it."""
    saved = [name for name, record in manifest.state.items() if record.scope != NOT_SAVED]
    return saved == ["model"]


def weights_only(checkpoint: Path, missing: Iterable[str]) -> CheckpointUnusable:
    """Make the error for a resume from a *checkpoint* that has only weights; *missing* is the other state."""
    names = ", ".join(missing)
    return CheckpointUnusable(
        "this checkpoint has weights only: there is no training to resume",
        where=checkpoint,
        value=f"not saved: {names}",
        hint=f"start a new run from them: --init_from.path {checkpoint} and another checkpoint.checkpoint_dir; to "
        f"continue in this directory without that state: --checkpoint.allow_missing_state '[{names}]'",
    )


def other_kind_of_run(checkpoint: Path, *, has_adapters: bool) -> CheckpointUnusable:
    """Make the error for a run with adapters that finds a *checkpoint* without them, or the reverse.

    Args:
        checkpoint: The directory of the checkpoint.
        has_adapters: Whether the checkpoint has adapters.
    """
    value = "it has the whole model; this run trains adapters (peft)"
    use = f"export it (ckpt consolidate {checkpoint}) and name the result in model.from_pretrained"
    resume = "without peft"
    if has_adapters:
        value = "it has adapters (peft); this run trains the whole model"
        use = f"merge it (ckpt export {checkpoint} --merge) and name the result in init_from.path"
        resume = "with the peft section of its config.yaml"
    return CheckpointUnusable(
        "the checkpoints in this directory belong to another kind of run",
        where=checkpoint,
        value=value,
        hint="start this run in another checkpoint.checkpoint_dir (checkpoint.on_incompatible sibling creates one); "
        f"to begin with the weights of the checkpoint, {use}; or resume its run {resume}",
    )
