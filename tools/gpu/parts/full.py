"""All weights of an 8B model: the recipe's defaults, compiled, with accumulation, and bare loops in bfloat16."""

from collections.abc import Mapping
from typing import Any

from tools.gpu import bare, ours
from tools.gpu.machine import version_of
from tools.gpu.session import PartRun
from tools.gpu.shapes import LLAMA_8B, Work, flops_per_token, work_of

FULL: Mapping[str, Any] = {"model": {"activation_checkpointing": "full"}}
SELECTIVE: Mapping[str, Any] = {"model": {"activation_checkpointing": "selective"}}
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


def run(part: PartRun) -> None:
    """Cases in the order of their value; one that does not fit into the memory is recorded with its message.

    Those of ours that are not less precise have float32 weights and moments, and so count for the goal.
    """
    session = part.session
    base = part.base(LLAMA_8B)
    is_gpu = session.device == "cuda"
    work = work_of(LLAMA_8B, is_dry_run=session.is_dry_run)
    flops = flops_per_token(work.config, work.length, trains_all=True)
    sizes = {"accumulation": 8, "warm_up": 2, "steps": 4}
    long_work = work_of(LLAMA_8B, is_dry_run=session.is_dry_run, **sizes)

    def bare_loop(name: str, compiles: bool) -> None:
        part.measure(name, bare.full, name, base, work, session.device, flops, compiles, limit=120)

    def case(name: str, changes: Mapping[str, Any], work: Work = work, **options: Any) -> None:
        # A dry run compiles in one case only, because that takes most of its time.
        if name.endswith("compiled") and (is_gpu or not changes):
            changes = ours.merged(changes, ours.compiled(session.device))
        ours.run_case(part, name, work, base, changes, flops, **options)

    case("ours, compiled", {}, forecasts=True)
    bare_loop("bare, compiled", is_gpu)
    case("ours, accumulation of 8, selective checkpointing, compiled", SELECTIVE, long_work)
    case("ours, selective checkpointing, compiled", SELECTIVE, forecasts=True)
    case("ours, full checkpointing, compiled", FULL, forecasts=True)
    case("ours, accumulation of 8, full checkpointing, compiled", FULL, long_work)
    case("less precise: bfloat16 weights, compiled", BF16)
    case("less precise: 8-bit moments, compiled", ADAM_8_BIT)
    further_bits = "less precise: 8-bit moments, bfloat16 weights with further bits, compiled"
    case(further_bits, FURTHER_BITS, forecasts=True)
    if is_gpu and version_of("torchao"):
        case("less precise: FP8, compiled", {"fp8": {}})
    case("ours, defaults", {})
    bare_loop("bare, eager", False)
