"""LoRA of rank 16 on all linear layers of an 8B model: the defaults of the recipe, variants, and a bare PEFT loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.gpu import bare, ours
from tools.gpu.machine import version_of
from tools.gpu.session import PartRun
from tools.gpu.shapes import LLAMA_8B, Work, flops_per_token, work_of
from tools.gpu.steps import base_of

VARIANTS: dict[str, Mapping[str, Any]] = {
    "layers of transformers and peft": {"model": {"fused_layers": False}},
    "packed": {"packed_sequence": {"size": 4096}},
    "selective checkpointing": {"model": {"activation_checkpointing": "selective"}},
    "full checkpointing": {"model": {"activation_checkpointing": "full"}},
    "adapters in bfloat16": {"peft": {"dtype": "base"}},
}
"""Changes of the recipe, most useful ones first."""


def run(part: PartRun) -> None:
    """The recipe's defaults and the bare loop first: they decide about the goals."""
    session = part.session
    base = base_of(part, LLAMA_8B)
    if base is None:
        return
    work = work_of(LLAMA_8B, is_dry_run=session.is_dry_run, batch=2, accumulation=2)
    _ours(part, "ours, defaults", work, {}, forecasts=True)
    flops = flops_per_token(work.config, work.length, trains_all=False)
    part.measure("bare", bare.lora, "bare", base, work, session.device, flops, limit=150)
    single = work_of(LLAMA_8B, is_dry_run=session.is_dry_run, batch=1, accumulation=4)
    _ours(part, "ours, rows of one sample", single, {})
    if session.device == "cuda":
        _ours(part, "ours, compiled", work, ours.compiled(session.device))
    for name, changes in VARIANTS.items():
        _ours(part, f"ours, {name}", work, changes)
    if session.device == "cuda" and version_of("bitsandbytes"):
        _ours(part, "ours, base in nf4", work, {"peft": {"quantize_base": "nf4"}})


def _ours(
    part: PartRun, name: str, work: Work, changes: Mapping[str, Any], *, forecasts: bool = False
) -> None:
    base = part.session.bases["8B"]
    directory = part.session.scratch / "lora"
    recipe = ours.merged(ours.recipe_of(work, base, directory), ours.LORA)
    recipe = ours.merged(recipe, changes)
    if "packed_sequence" in changes:
        recipe["packed_sequence"]["size"] = work.length
    flops = flops_per_token(work.config, work.length, trains_all=False)
    arguments = (name, recipe, directory, work.warm_up, flops, forecasts)
    part.measure(name, ours.measure, *arguments, limit=150)
