"""LoRA of rank 16 on all linear layers of an 8B model: the defaults of the recipe, variants, and a bare PEFT loop."""

from collections.abc import Mapping
from typing import Any

from tools.gpu import bare, ours
from tools.gpu.session import PartRun
from tools.gpu.shapes import LLAMA_8B, Work, flops_per_token, work_of

VARIANTS: dict[str, Mapping[str, Any]] = {
    "layers of transformers and peft": {"model": {"fused_layers": False}},
    "selective checkpointing": {"model": {"activation_checkpointing": "selective"}},
    "full checkpointing": {"model": {"activation_checkpointing": "full"}},
    "adapters in bfloat16": {"peft": {"dtype": "base"}},
}
"""Changes of the recipe, most useful ones first."""


def run(part: PartRun) -> None:
    """The recipe's defaults and the bare loop first: they decide about the goals."""
    session = part.session
    base = part.base(LLAMA_8B)
    work = work_of(LLAMA_8B, is_dry_run=session.is_dry_run, batch=2, accumulation=2)
    flops = flops_per_token(work.config, work.length, trains_all=False)

    def case(name: str, changes: Mapping[str, Any], work: Work = work, **options: Any) -> None:
        changes = ours.merged(ours.LORA, changes)
        ours.run_case(part, f"ours, {name}", work, base, changes, flops, **options)

    case("defaults", {}, forecasts=True)
    part.measure("bare", bare.lora, "bare", base, work, session.device, flops, limit=150)
    single = work_of(LLAMA_8B, is_dry_run=session.is_dry_run, batch=1, accumulation=4)
    case("rows of one sample", {}, single)
    if session.device == "cuda":
        case("compiled", ours.compiled(session.device))
    case("packed", {"packed_sequence": {"size": work.length}})
    for name, changes in VARIANTS.items():
        case(name, changes)
