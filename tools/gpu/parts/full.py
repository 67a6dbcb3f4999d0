"""All weights of an 8B model: the recipe's defaults, compiled, with accumulation, and bare loops in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.gpu import bare, ours
from tools.gpu.machine import version_of
from tools.gpu.session import PartRun
from tools.gpu.shapes import LLAMA_8B, flops_per_token, work_of

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
    needs: str = ""
    """A distribution without which, and without a GPU, the case is left out."""
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
    base = part.base(LLAMA_8B)
    if base is None:
        return
    is_gpu = session.device == "cuda"
    work = work_of(LLAMA_8B, is_dry_run=session.is_dry_run)
    flops = flops_per_token(work.config, work.length, trains_all=True)

    def bare_loop(name: str, compiles: bool) -> None:
        part.measure(name, bare.full, name, base, work, session.device, flops, compiles, limit=120)

    for number, case in enumerate(CASES):
        if number == 1:
            bare_loop("bare, compiled", is_gpu)
        if case.needs and not (is_gpu and version_of(case.needs)):
            continue
        fewer = {"warm_up": 2, "steps": 4} if case.accumulation > 1 else {}
        sizes = {"accumulation": case.accumulation, **fewer}
        case_work = work_of(LLAMA_8B, is_dry_run=session.is_dry_run, **sizes)
        changes = case.changes
        # A dry run compiles in one case only, because that takes most of its time.
        if case.compiles and (is_gpu or number == 0):
            changes = ours.merged(changes, ours.compiled(session.device))
        ours.run_case(part, case.name, case_work, base, changes, flops, forecasts=case.forecasts)
    bare_loop("bare, eager", False)
