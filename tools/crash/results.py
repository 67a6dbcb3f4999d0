"""What a training has ended with, and what differs between two runs that should have ended equally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.checkpoint.files import layout
from tools.crash import inspect
from tools.support import MEASURED, step_lines

_CLOCKS = {"elapsed_seconds"}
_LEFT_OPEN = "left open"


def result_of(directory: Path, steps: int) -> dict[str, Any]:
    """All that a run ends with: every digest of its last checkpoint, and its log, but for clocks."""
    checkpoint = directory / f"epoch_{inspect.checkpoints(directory)[0].epoch}_step_{steps}"
    manifest = Manifest.read(checkpoint)
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for tree, content in manifest.trees.items():
        for fqn, tensor in content.tensors.items():
            for piece in tensor.slices:
                tensors[f"{tree}.{fqn} {piece.offsets}"] = piece.digest
        for fqn, blob in content.objects.items():
            values[f"{tree}.{fqn}"] = blob.digest
    states = {
        file: _plain_state(torch.load(checkpoint / file, weights_only=True))
        for file in manifest.files
        if file.endswith(".pt")
    }
    return {
        "tensors": tensors,
        "values": values,
        "state": _flat(states),
        "pointers": {name: inspect.target(directory / name) for name in layout.POINTERS},
        "log": step_lines(directory / "training.jsonl", MEASURED),
        "validations": step_lines(directory / "validation.jsonl", MEASURED),
    }


def _plain_state(value: Any) -> Any:
    """An object's state as text and numbers that compare, clocks aside."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {key: _plain_state(entry) for key, entry in value.items() if key not in _CLOCKS}
    if isinstance(value, list | tuple):
        return [_plain_state(entry) for entry in value]
    return value


def _flat(states: dict[str, Any]) -> dict[str, Any]:
    """Entries by file and key. A checkpoint with an interrupted validation leaves out what that leaves open."""
    entries = {
        f"{file}: {key}": value for file, state in states.items() for key, value in state.items()
    }
    if entries.get("step_scheduler.pt: validation_is_due"):
        entries |= {
            "step_scheduler.pt: best": _LEFT_OPEN,
            "step_scheduler.pt: validation_is_due": _LEFT_OPEN,
        }
    return entries


def differences(directory: Path, right: dict[str, Any], steps: int) -> list[str]:
    """What is not as in the undisturbed run."""
    newest = inspect.checkpoints(directory)[:1]
    if [name.step for name in newest] != [steps]:
        return [f"the last checkpoint is {newest}"]
    mine = result_of(directory, steps)
    wrong = [
        f"{kind} differ: {places}"
        for kind in right
        if (places := _differing(mine[kind], right[kind]))
    ]
    if [line["step"] for line in mine["log"]] != list(range(1, steps + 1)):
        wrong.append("steps miss or stand twice")
    return wrong + inspect.damage(directory) + inspect.wrong_pointers(directory)


def _differing(mine: Any, right: Any) -> str:
    """Some of the places where two results differ."""
    if isinstance(mine, list):
        mine, right = dict(enumerate(mine)), dict(enumerate(right))
    differing = []
    for key in sorted(mine.keys() | right.keys()):
        pair = mine.get(key), right.get(key)
        if pair[0] != pair[1] and _LEFT_OPEN not in pair:
            differing.append(f"{key} ({pair[0]}, not {pair[1]})")
    return ", ".join(differing[:3])[:600]
