"""All weights of an 8B model: the recipe's defaults, compiled, with accumulation, and bare loops in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.gpu import bare, ours
from tools.gpu.machine import version_of
from tools.gpu.session import PartRun
from tools.gpu.shapes import LLAMA_8B, flops_per_token, work_of
from tools.gpu.steps import base_of

FULL: Mapping[str, Any] = {"model": {"activation_checkpointing": "full"}}
SELECTIVE: Mapping[str, Any] = {"model": {"activation_checkpointing": "selective"}}
FP8: Mapping[str, Any] = {"fp8": {}}
BF16: Mapping[str, Any] = {"model": {"dtype": "bfloat16"}}
"""Weights and moments in bfloat16: as the bare loop has them."""
ADAM_8_BIT: Mapping[str, Any] = {
    "optimizer": {"_target_": "automodel_ckpt.optim.adam8bit.AdamW8bit", "lr": 1e-4}
}
FURTHER_BITS: Mapping[str, Any] = {
    **ADAM_8_BIT,
    "optimizer": {**ADAM_8_BIT["optimizer"], "float32_weights": True},
    "model": {**BF16["model"], **FULL["model"]},
}
"""8 bytes per parameter instead of 16: what fits into 80 GB."""


@dataclass(frozen=True)
class Case:
    """Changes of the recipe, with the number of micro-batches per step."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    compiles: bool = True
    accumulation: int = 1
    only_gpu: bool = False
    """Whether the recipe is an error on a CPU."""
    needs: str = ""
    """A distribution without which the case is left out."""
    forecasts: bool = False
    """Whether the memory is compared with its forecast."""


CASES = (
    Case("ours, compiled", forecasts=True),
    Case("ours, selective checkpointing, compiled, accumulation of 8", SELECTIVE, accumulation=8),
    Case("ours, selective checkpointing, compiled", SELECTIVE, forecasts=True),
    Case("ours, full checkpointing, compiled", FULL, forecasts=True),
    Case("ours, full checkpointing, compiled, accumulation of 8", FULL, accumulation=8),
    Case("less precise: bfloat16 weights, compiled", BF16),
    Case("less precise: 8-bit moments, compiled", ADAM_8_BIT),
    Case(
        "less precise: 8-bit moments, bfloat16 weights with further bits, compiled",
        FURTHER_BITS,
        forecasts=True,
    ),
    Case("less precise: FP8, compiled", FP8, needs="torchao"),
    Case("ours, defaults", compiles=False),
)
"""Those of ours that are not less precise have float32 weights and moments, and so count for the goal."""


def run(part: PartRun) -> None:
    """Cases in the order of their value; one that does not fit into the memory is recorded with its message."""
    session = part.session
    base = base_of(part, LLAMA_8B)
    if base is None:
        return
    first, *others = CASES
    _ours(part, first)
    work = work_of(LLAMA_8B, is_dry_run=session.is_dry_run)
    flops = flops_per_token(work.config, work.length, trains_all=True)
    is_gpu = session.device == "cuda"
    bare_arguments = (base, work, session.device, flops)
    compiled, eager = "bare, compiled", "bare, eager"
    part.measure(compiled, bare.full, compiled, *bare_arguments, is_gpu, limit=120)
    for case in others:
        is_supported = is_gpu or not (case.only_gpu or case.needs)
        if is_supported and (not case.needs or version_of(case.needs)):
            _ours(part, case)
    part.measure(eager, bare.full, eager, *bare_arguments, False, limit=120)


def _ours(part: PartRun, case: Case) -> None:
    session = part.session
    steps = {"warm_up": 2, "steps": 4} if case.accumulation > 1 else {}
    work = work_of(LLAMA_8B, is_dry_run=session.is_dry_run, accumulation=case.accumulation, **steps)
    directory = session.scratch / "full"
    base = session.bases["8B"]
    recipe = ours.merged(ours.recipe_of(work, base, directory), case.changes)
    # A dry run compiles in one case only, because that takes most of its time.
    if case.compiles and (session.device == "cuda" or case is CASES[0]):
        recipe = ours.merged(recipe, ours.compiled(session.device))
    flops = flops_per_token(work.config, work.length, trains_all=True)
    arguments = (case.name, recipe, directory, work.warm_up, flops, case.forecasts)
    part.measure(case.name, ours.measure, *arguments, limit=150)
