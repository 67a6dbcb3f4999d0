"""Training small models in float32 with plain torch: what the losses of recipes are compared with."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.models.sizes import model_sizes
from tools.gpu import ours
from tools.gpu.shapes import Work
from tools.support import step_lines

SMALL: dict[str, Any] = {
    **model_sizes(vocab=256, hidden=64, inner=96, layers=2, heads=4, kv_heads=2, positions=128),
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Settings of a small model of any type."""
NUM_STEPS = 3
ROWS = 4
"""Samples in a global batch."""
LENGTH = 48
"""The longest sample."""
RATE = 1e-3
_DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "attention_dropout")
Sample = Mapping[str, Sequence[int]]


def exact() -> dict[str, Any]:
    """The changes of a recipe that compute in float32 everywhere, on every device."""
    return {
        "model": {"dtype": "float32"},
        "distributed": {"mixed_precision": "none"},
        "float32_precision": "highest",
    }


def write_small(model_type: str, settings: Mapping[str, Any], base: Path) -> None:
    """Write a small model without dropout, with the same random weights in every call."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SMALL, **settings})
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    build: Any = AutoModelForCausalLM.from_config
    build(config, dtype=torch.float32).save_pretrained(base)


def samples() -> Any:
    from automodel_ckpt.examples.data.mock import random_tokens

    num_samples = NUM_STEPS * ROWS
    return random_tokens(num_samples, LENGTH, SMALL["vocab_size"], mean_length=30, std_length=8)


def recipe(base: Path, directory: Path) -> dict[str, Any]:
    """A recipe that trains on :func:`samples` in their order, in micro-batches of two, and logs its losses."""
    work = Work(SMALL, batch=2, length=LENGTH, accumulation=2, warm_up=0, steps=NUM_STEPS)
    return ours.merged(
        ours.recipe_of(work, base, directory),
        {
            "recipe": "llm_finetune",
            "model": {"router_aux_loss": False},
            "dataset": {"mean_length": 30, "std_length": 8},
            "dataloader": {"shuffle": False},
            "optimizer": {"lr": RATE, "weight_decay": 0.0},
            "checkpoint": {"enabled": True, "save_consolidated": False},
        },
    )


def batches(rows: Sequence[Sample] | Any, num_rows: int = ROWS) -> Iterator[list[Sample]]:
    """Global batches of documents: *num_rows* rows each, of which a pack has several documents."""
    for start in range(0, len(rows), num_rows):
        documents: list[Sample] = []
        for number in range(start, min(start + num_rows, len(rows))):
            documents += documents_of(rows[number])
        yield documents


def documents_of(row: Sample) -> list[Sample]:
    """The documents of a pack, whose positions restart at 0; a sample without positions is one document."""
    tokens = list(row["input_ids"])
    positions = list(row.get("position_ids", range(len(tokens))))
    labels = list(row["labels"])
    starts = [number for number, position in enumerate(positions) if position == 0]
    ends = [*starts[1:], len(tokens)]
    documents: list[Sample] = []
    for start, end in zip(starts, ends, strict=True):
        documents.append({"input_ids": tokens[start:end], "labels": labels[start:end]})
    return documents


def losses(base: Path, device: str, global_batches: Iterable[list[Sample]]) -> list[float]:
    """Losses of training with AdamW: one document at a time, so that nothing depends on rows, masks or padding.

    Attention is transformers' eager one, its definition: sdpa leaves out a cap of the scores (Gemma 2). The loss is the
    mean over all labels of a global batch; the gradient is clipped to the norm 1.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    # matmul.allow_tf32 would leave the setting of CPUs as an earlier recipe in this process has set it.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    read: Any = AutoModelForCausalLM.from_pretrained
    eager = read(base, dtype=torch.float32, attn_implementation="eager")
    model = eager.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    found = []
    for documents in global_batches:
        num_labels = 0
        for document in documents:
            num_labels += sum(label != -100 for label in document["labels"][1:])
        total = 0.0
        for document in documents:
            tokens = torch.tensor([document["input_ids"]], device=device)
            labels = torch.tensor(document["labels"], device=device)
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = cross_entropy(logits[0, :-1].float(), labels[1:], reduction="sum")
            torch.autograd.backward(loss / num_labels)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total / num_labels)
    return found


def logged_losses(directory: Path) -> list[float]:
    """The losses in ``training.jsonl`` of a run; NaN for those that are no number, which JSON has as null."""
    losses = [line["loss"] for line in step_lines(directory / "training.jsonl")]
    return [math.nan if loss is None else loss for loss in losses]


def difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two lists of losses; infinite if one of them is no number."""
    pairs = zip(values, reference, strict=True)
    differences = [abs(value - wanted) / abs(wanted) for value, wanted in pairs]
    return math.inf if any(map(math.isnan, differences)) else max(differences)
