"""Mixtures of streams: shares at any time, epochs, and resumes that continue exactly."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.mixture import mixture
from automodel_ckpt.data.text import text
from automodel_ckpt.errors import RecipeError
from tests.unit.data.toys import padded_loader as loader

WEIGHTS = {"a": 3.0, "b": 1.0}


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    """Two files of 30 and 5 documents that name their file and line."""
    written = {}
    for name, count in (("a", 30), ("b", 5)):
        path = tmp_path / f"{name}.jsonl"
        lines = [json.dumps({"text": f"{name}{number}"}) for number in range(count)]
        path.write_text("\n".join(lines))
        written[name] = str(path)
    return written


def stream(tokenizer: Any, paths: dict[str, str], **options: Any) -> Any:
    sources = {
        name: text(tokenizer, path, streaming=True, shuffle_block=4) for name, path in paths.items()
    }
    return mixture(**{"sources": sources, "weights": WEIGHTS} | options)


def documents(tokenizer: Any, loader: GlobalBatchLoader, num_batches: int) -> list[list[str]]:
    """The documents of this rank in each of the next global batches, which are marked as consumed."""
    found: list[list[str]] = []
    while len(found) < num_batches:
        for batch in loader:
            rows = []
            for micro_batch in batch.micro_batches:
                for row, mask in zip(
                    micro_batch["input_ids"], micro_batch["attention_mask"], strict=True
                ):
                    rows.append(tokenizer.decode(row[mask.bool()]).removesuffix("</s>"))
            found.append(rows)
            loader.mark_consumed(batch)
            if len(found) == num_batches:
                break
    return found


def test_shares_hold_at_any_time_and_an_epoch_ends_with_the_first_stream(
    tokenizer: Any, paths: dict[str, str]
) -> None:
    reader = loader(stream(tokenizer, paths))
    batches = documents(tokenizer, reader, 6)
    for batch in batches[:5]:
        assert sum(each.startswith("a") for each in batch) == 3
    # b has no sixth document: the epoch ends at its turn.
    assert reader.epoch == 1 and len(batches[5]) < 4
    of_b = [each for batch in batches[:5] for each in batch if each.startswith("b")]
    assert sorted(of_b) == [f"b{number}" for number in range(5)]


def test_streams_mix_with_other_data_sets_exactly(tokenizer: Any, paths: dict[str, str]) -> None:
    def mixed() -> Any:
        b = text(tokenizer, paths["b"], streaming=True)
        return mixture({"a": text(tokenizer, paths["a"]), "b": b}, WEIGHTS, num_samples=48)

    whole = documents(tokenizer, loader(mixed()), 20)
    flat = [each for batch in whole[:12] for each in batch]
    assert sum(each.startswith("a") for each in flat) == 36
    # The second pass over a has another order.
    assert flat[:20] != [each for batch in whole[12:] for each in batch][:20]
    before = loader(mixed())
    documents(tokenizer, before, 7)
    after = loader(mixed())
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert documents(tokenizer, after, 13) == whole[7:]


def test_num_samples_defines_the_epoch_and_streams_begin_again(
    tokenizer: Any, paths: dict[str, str]
) -> None:
    reader = loader(stream(tokenizer, paths, num_samples=48))
    flat = [each for batch in documents(tokenizer, reader, 12) for each in batch]
    assert reader.epoch == 1 and reader.consumed_samples == 0
    counts = Counter(flat)
    assert sum(counts[f"b{number}"] for number in range(5)) == 12
    assert {counts[f"b{number}"] for number in range(5)} == {2, 3}
    assert {counts[f"a{number}"] for number in range(30)} == {1, 2}


@pytest.mark.parametrize(
    "num_read", [7, *(pytest.param(each, marks=pytest.mark.further) for each in (1, 5, 14))]
)
@pytest.mark.parametrize("options", [{}, {"num_samples": 26}])
def test_a_resume_continues_exactly_on_another_number_of_ranks(
    tokenizer: Any, paths: dict[str, str], num_read: int, options: dict[str, int]
) -> None:
    whole = documents(tokenizer, loader(stream(tokenizer, paths, **options)), num_read + 9)
    before = loader(stream(tokenizer, paths, **options))
    assert documents(tokenizer, before, num_read) == whole[:num_read]
    state = before.state_dict()
    parts = []
    for rank in range(2):
        after = loader(stream(tokenizer, paths, **options), rank, 2)
        after.load_state_dict(json.loads(json.dumps(state)))
        parts.append(documents(tokenizer, after, 9))
    joined = [first + second for first, second in zip(*parts, strict=True)]
    # A rank whose part of a short batch is empty repeats a sample without labels.
    for found, expected in zip(joined, whole[num_read:], strict=True):
        assert found[: len(expected)] == expected


def test_streams_need_weights(tokenizer: Any, paths: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match="a positive weight for each source"):
        stream(tokenizer, paths, weights=None)
    saved = stream(tokenizer, paths).state_dict()
    other = stream(tokenizer, {"a": paths["a"], "c": paths["b"]}, weights={"a": 1.0, "c": 1.0})
    with pytest.raises(RecipeError, match="other sources than the checkpoint"):
        other.load_state_dict(saved)
