"""Training loops without this program: what someone who knows torch, transformers and peft writes for one GPU."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gpu.ours import with_rates
from tools.gpu.session import Figures
from tools.gpu.shapes import Work

Step = tuple[list[Mapping[str, Any]], int]
"""The inputs of each micro-batch of a step, and the tokens that the step trains on."""


def load(base: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained
    return read(base, dtype="auto", attn_implementation="sdpa").to(device).train()


def lora(name: str, base: Path, work: Work, device: str, flops: float) -> Figures:
    """Adapters on all linear layers, in the dtype of the model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    model = get_peft_model(load(base, device), config, autocast_adapter_dtype=False)
    yield from train(name, model, random_steps(work, device), work, flops)


def full(name: str, base: Path, work: Work, device: str, flops: float, compiles: bool) -> Figures:
    """All weights in bfloat16, with moments in bfloat16: the least memory, not the best quality."""
    model = load(base, device)
    if compiles:
        for layer in model.model.layers:
            layer.compile()
    yield from train(name, model, random_steps(work, device), work, flops)


def random_steps(work: Work, device: str) -> Iterator[Step]:
    import torch

    while True:
        inputs: list[Mapping[str, Any]] = []
        for _ in range(work.accumulation):
            tokens = torch.randint(0, work.config["vocab_size"], (work.batch, work.length))
            inputs.append({"input_ids": (tokens := tokens.to(device)), "labels": tokens})
        yield inputs, work.tokens_per_step


def train(name: str, model: Any, steps: Iterable[Step], work: Work, flops: float = 0.0) -> Figures:
    """A loop of forward, backward and fused AdamW; the loss is the model's own."""
    import torch

    from tools.gpu.timed import CLOCK

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    CLOCK.start(work.warm_up)
    num_steps = work.warm_up + work.steps
    for step, (micro_batches, num_tokens) in zip(range(1, num_steps + 1), steps, strict=False):
        for inputs in micro_batches:
            loss = model(**inputs, use_cache=False).loss
            (loss / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        CLOCK.note(num_tokens, is_last=step == num_steps)
    yield name, with_rates(CLOCK.figures(), flops)
