"""Losses of 24 small architectures: this program and plain torch on the GPU, against plain torch on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.gpu import ours, plain
from tools.gpu.session import Figures, PartRun

_HEADS: dict[str, Any] = {"head_dim": 16}
_WINDOW: dict[str, Any] = {**_HEADS, "sliding_window": 16}
_GEMMA: dict[str, Any] = {**_WINDOW, "query_pre_attn_scalar": 16}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": _GEMMA,
    "qwen3_moe": {**_EXPERTS, **_HEADS, "num_experts": 4},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": _HEADS,
    "gemma": _HEADS,
    "gemma3_text": _GEMMA,
    "phi": {},
    "phi3": {},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {},
    "bloom": {},
    "falcon": {},
    "starcoder2": {},
    "cohere": {},
    "cohere2": {"sliding_window": 16},
    "olmo2": {},
    "granite": {},
    "stablelm": {},
    "smollm3": {},
    "glm4": _HEADS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""model_type -> settings that differ from the common small ones."""


def run(part: PartRun) -> None:
    """One process for all architectures; the figures of each are recorded as soon as they are known."""
    session = part.session
    names = list(ARCHITECTURES)
    if session.is_dry_run:
        names = names[:3]
    part.measure("numerics", _numerics, names, session.scratch, session.device, limit=300)
    for key in ("plain", "ours", "ours_defaults"):
        differences = [figures.get(key) for figures in part.figures.values()]
        known = [value for value in differences if value is not None]
        if known:
            part.add(f"largest difference: {key}", {"value": max(known)})


def _numerics(names: list[str], scratch: Path, device: str) -> Figures:
    """Relative differences from plain torch on the CPU: plain torch on the device, ours in float32 and by default."""
    batches = list(plain.batches(plain.samples()))
    for name in names:
        base = scratch / f"small-{name}"
        plain.write_small(name, ARCHITECTURES[name], base)
        reference = plain.losses(base, "cpu", batches)
        on_device = plain.losses(base, device, batches)
        figures: dict[str, Any] = {"plain": plain.difference(on_device, reference)}
        for key, changes in (("ours", plain.exact()), ("ours_defaults", {})):
            directory = scratch / f"run-{key}-{name}"
            code = ours.train(ours.merged(plain.recipe(base, directory), changes), directory)
            if code == 0:
                figures[key] = plain.difference(plain.logged_losses(directory), reference)
            else:
                figures[f"{key}_exit_code"] = code
        yield name, figures
