"""QLoRA: adapters of rank 16 on an 8B model in 4 bits, compared with the model in bfloat16."""

from tools.gpu import ours
from tools.gpu.machine import version_of
from tools.gpu.session import PartRun
from tools.gpu.shapes import LLAMA_8B, flops_per_token, work_of


def run(part: PartRun) -> None:
    """The defaults, which fsdp2 casts on one GPU, first. A GPU needs bitsandbytes."""
    session = part.session
    if session.device == "cuda" and not version_of("bitsandbytes"):
        return
    base = part.base(LLAMA_8B)
    work = work_of(LLAMA_8B, is_dry_run=session.is_dry_run, batch=2, accumulation=2)
    flops = flops_per_token(work.config, work.length, trains_all=False)
    nf4 = ours.merged(ours.LORA, {"peft": {"quantize_base": "nf4"}})
    full = {"model": {"activation_checkpointing": "full"}}
    ours.run_case(part, "ours, nf4", work, base, nf4, flops, forecasts=True)
    ours.run_case(part, "ours, bfloat16", work, base, ours.LORA, flops)
    ours.run_case(part, "ours, nf4, full checkpointing", work, base, ours.merged(nf4, full), flops)
