"""What differs between two runs that should have ended equally: logs, and all state of the last checkpoint."""

import io
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.checkpoint.parts.tree import Blob
from tools.crash import inspect
from tools.support import MEASURED, step_lines

_CLOCKS = {"elapsed_seconds"}
_LEFT_OPEN = ("best", "validation_is_due")
"""What an interrupted validation of the last step leaves open."""
_SHOWN_CHARACTERS = 1500


def differences(first: Path, second: Path) -> Iterator[str]:
    """Compare the logs of two run directories, apart from clocks, and their last checkpoints."""
    for name in ("training.jsonl", "validation.jsonl"):
        logs = [step_lines(run / name, MEASURED) for run in (first, second)]
        for ours, theirs in zip_longest(*logs):
            if ours != theirs:
                yield f"step {(ours or theirs)['step']} differs in {name}: {ours} {theirs}"
                break
    names = [inspect.checkpoints(run)[:1] for run in (first, second)]
    if names[0] != names[1] or not names[0]:
        yield f"the last checkpoints are {names[0]} and {names[1]}"
        return
    ours, theirs = (_state_of(run / str(names[0][0])) for run in (first, second))
    schedulers = [state.get("step_scheduler.pt", {}) for state in (ours, theirs)]
    if any(each.get("validation_is_due") == "True" for each in schedulers):
        for key in _LEFT_OPEN:
            schedulers[0].pop(key)
            schedulers[1].pop(key)
    for group in sorted(ours.keys() | theirs.keys()):
        pair = ours.get(group, {}), theirs.get(group, {})
        found = [
            f"{key} ({pair[0].get(key)}, not {pair[1].get(key)})"
            for key in sorted(pair[0].keys() | pair[1].keys())
            if pair[0].get(key) != pair[1].get(key)
        ]
        if found:
            yield f"{group} differs: {', '.join(found)[:_SHOWN_CHARACTERS]}"


def _state_of(checkpoint: Path) -> dict[str, dict[str, str]]:
    """The state in a checkpoint, by tree or file and by name: digests of tensors, other values as text."""
    manifest = Manifest.read(checkpoint)
    found: dict[str, dict[str, str]] = {}
    for tree, content in manifest.trees.items():
        tensors = found.setdefault(f"{tree} of the last checkpoints", {})
        for name, tensor in content.tensors.items():
            for piece in tensor.slices:
                tensors[f"{name} {piece.offsets}"] = str(piece.digest)
        for name, blob in content.objects.items():
            value = torch.load(io.BytesIO(_bytes_of(checkpoint, blob)), weights_only=True)
            found.setdefault(blob.file, {})[name] = repr(_plain(value))
    for file in manifest.files:
        if file.endswith(".pt"):
            state = torch.load(checkpoint / file, weights_only=True)
            found[file] = {key: repr(_plain(value)) for key, value in _plain(state).items()}
    return found


def _bytes_of(checkpoint: Path, blob: Blob) -> bytes:
    with open(checkpoint / blob.file, "rb") as file:
        file.seek(blob.start)
        return file.read(blob.nbytes)


def _plain(value: Any) -> Any:
    """A value without clocks, as text that is equal for equal values: pickle writes them in more than one way."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        kept = [key for key in value if key not in _CLOCKS]
        return {key: _plain(value[key]) for key in sorted(kept, key=str)}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
