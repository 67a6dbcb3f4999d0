"""Short answers: useful tokens per second of rows padded to the longest, without padding, and packed.

The lengths are as in SQuAD 1.1 with its paragraphs: a skewed distribution with a mean of about 170 tokens, of which
only the answer has labels.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gpu import bare, ours
from tools.gpu.session import Figures, PartRun
from tools.gpu.shapes import LLAMA_1B, Work, work_of

_ROWS = 8
_ROW_TOKENS = 4096


def run(part: PartRun) -> None:
    session = part.session
    base = part.base(LLAMA_1B)
    is_small = session.is_dry_run
    work = work_of(LLAMA_1B, is_dry_run=is_small, batch=_ROWS, warm_up=4, steps=24)
    longest = 64 if is_small else 1024
    samples = {"longest": longest, "mean": longest / 6, "vocab_size": work.config["vocab_size"]}
    name = "bare, padded"
    part.measure(name, _padded, name, base, work, session.device, samples, limit=90)
    num_samples = 100 if is_small else 4000
    dataset = {"_target_": "tools.gpu.data.ShortAnswers", "num_samples": num_samples, **samples}

    def case(name: str, changes: Mapping[str, Any], *, forecasts: bool = False) -> None:
        recipe = ours.recipe_of(work, base, session.scratch / part.name)
        recipe = ours.merged({**recipe, "dataset": dataset}, changes)
        # FLOPs per token depend on the lengths of samples, so that only tokens are counted.
        arguments = (name, recipe, session.scratch / part.name, work.warm_up, 0.0, forecasts)
        part.measure(name, ours.measure, *arguments, limit=90)

    case("ours, padded", {"dataloader": {"padding_free": False}})
    case("ours, no padding", {})
    case("ours, no padding, 24 samples", _batch_of(3 * _ROWS))
    packs = {"packed_sequence": {"size": longest if is_small else _ROW_TOKENS}, **_batch_of(1)}
    case("ours, packed", packs, forecasts=True)


def _batch_of(rows: int) -> dict[str, Any]:
    return {"step_scheduler": {"global_batch_size": rows, "local_batch_size": rows}}


def _padded(name: str, base: Path, work: Work, device: str, samples: Mapping[str, Any]) -> Figures:
    """A loop that pads each batch to its longest sample; tokens of padding are not counted."""
    from automodel_ckpt.data.collate import PadCollator
    from tools.gpu.data import ShortAnswers

    dataset = ShortAnswers(work.batch * (work.warm_up + work.steps), **samples)
    collate: Any = PadCollator(0)

    def steps() -> Iterator[bare.Step]:
        for start in range(0, len(dataset), work.batch):
            batch = collate([dataset[number] for number in range(start, start + work.batch)])
            num_tokens = int(batch["attention_mask"].sum())
            yield [{key: value.to(device) for key, value in batch.items()}], num_tokens

    yield from bare.train(name, bare.load(base, device), steps(), work)
