"""Training loops without this program: what someone who knows torch, transformers and peft writes for one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.gpu.ours import with_rates
from tools.gpu.session import Figures
from tools.gpu.shapes import Work


def load(base: Path, device: str) -> Any:
    """The model in *base* in its dtype (bfloat16), on the device."""
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained
    return read(base, dtype="auto", attn_implementation="sdpa").to(device)


def add_lora(model: Any) -> Any:
    """The model with adapters on all linear layers, in its dtype."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def lora(name: str, base: Path, work: Work, device: str, flops: float) -> Figures:
    """Adapters in a loop of forward, backward and fused AdamW; the loss is the model's own."""
    model = add_lora(load(base, device)).train()
    yield from _measure(name, model, work, device, flops)


def full(
    name: str,
    base: Path,
    work: Work,
    device: str,
    flops: float,
    compiles: bool,
) -> Figures:
    """All weights in bfloat16 with fused AdamW, whose moments are bfloat16: the least memory, not the best quality."""
    model = load(base, device).train()
    if compiles:
        for layer in model.model.layers:
            layer.compile()
    yield from _measure(name, model, work, device, flops)


def _measure(name: str, model: Any, work: Work, device: str, flops: float) -> Figures:
    import torch

    from tools.gpu.timed import CLOCK

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    vocabulary = work.config["vocab_size"]
    CLOCK.start(work.warm_up)
    num_steps = work.warm_up + work.steps
    for step in range(num_steps):
        for _ in range(work.accumulation):
            tokens = torch.randint(0, vocabulary, (work.batch, work.length)).to(device)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / work.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        CLOCK.note(work.tokens_per_step, is_last=step + 1 == num_steps)
    yield name, with_rates(CLOCK.figures(), flops)
