"""Short answers: useful tokens per second of rows padded to the longest, without padding, and packed.

The lengths are those of SQuAD 1.1 with its paragraphs: a skewed distribution with a mean of about 170 tokens, of which
only the answer has labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu import bare, ours
from tools.gpu.session import Figures, PartRun
from tools.gpu.shapes import LLAMA_1B, Work, work_of
from tools.gpu.steps import base_of

_ROWS = 8
_ROW_TOKENS = 4096


def run(part: PartRun) -> None:
    """The padded loop and ours, on the same samples."""
    session = part.session
    base = base_of(part, LLAMA_1B)
    if base is None:
        return
    is_small = session.is_dry_run
    work = work_of(LLAMA_1B, is_dry_run=is_small, batch=_ROWS, warm_up=4, steps=24)
    longest = 64 if is_small else 1024
    samples = {"longest": longest, "mean": longest / 6, "vocab_size": work.config["vocab_size"]}
    part.measure(
        "bare, padded", _padded, "bare, padded", base, work, session.device, samples, limit=90
    )
    _ours(part, "ours, padded", base, work, samples, {"dataloader": {"padding_free": False}})
    _ours(part, "ours, no padding", base, work, samples, {})
    _ours(part, "ours, no padding, 24 samples", base, work, samples, _batch_of(3 * _ROWS))
    packs = {"packed_sequence": {"size": longest if is_small else _ROW_TOKENS}, **_batch_of(1)}
    _ours(part, "ours, packed", base, work, samples, packs)


def _batch_of(rows: int) -> dict[str, Any]:
    return {"step_scheduler": {"global_batch_size": rows, "local_batch_size": rows}}


def _ours(
    part: PartRun,
    name: str,
    base: Path,
    work: Work,
    samples: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> None:
    directory = part.session.scratch / "packing"
    recipe = ours.recipe_of(work, base, directory)
    recipe["dataset"] = {"_target_": "tools.gpu.data.short_answers", "num_samples": 4000, **samples}
    if part.session.is_dry_run:
        recipe["dataset"]["num_samples"] = 100
    recipe = ours.merged(recipe, changes)
    # FLOPs per token depend on the lengths of samples, so that only tokens are counted.
    forecasts = "packed_sequence" in changes
    arguments = (name, recipe, directory, work.warm_up, 0.0, forecasts)
    part.measure(name, ours.measure, *arguments, limit=90)


def _padded(name: str, base: Path, work: Work, device: str, samples: Mapping[str, Any]) -> Figures:
    """A loop that pads each batch to its longest sample; tokens of padding are not counted."""
    import torch

    from automodel_ckpt.data.collate import PadCollator
    from tools.gpu.data import short_answers
    from tools.gpu.timed import CLOCK

    model = bare.load(base, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    dataset = short_answers(num_samples=work.batch * (work.warm_up + work.steps), **samples)
    collate: Any = PadCollator(0)
    CLOCK.start(work.warm_up)
    for start in range(0, len(dataset), work.batch):
        batch = collate([dataset[number] for number in range(start, start + work.batch)])
        num_tokens = int(batch["attention_mask"].sum())
        inputs = {name: value.to(device) for name, value in batch.items()}
        model(**inputs, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        CLOCK.note(num_tokens, is_last=start + work.batch >= len(dataset))
    yield name, CLOCK.figures()
