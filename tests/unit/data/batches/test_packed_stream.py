"""Packed streams: which tokens rows have, exact resumes, and independence of ranks and workers."""

import json
import pickle
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_ckpt.data.batches.document_lane import DocumentRows, RowRules
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.batches.packed_stream import PackedStream
from automodel_ckpt.data.collate import IGNORE_INDEX
from automodel_ckpt.data.text import text
from automodel_ckpt.errors import RecipeError
from tests.unit.data.toys import padded_loader as loader

SIZE = 24
RULES = [
    RowRules(SIZE),
    RowRules(SIZE, splits=True),
    RowRules(SIZE, splits=True, attends_across=True),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """JSON lines of 60 documents of different lengths, with blank lines between some of them."""
    lines = []
    for number in range(60):
        words = " ".join(f"w{number}x{word}" for word in range(number % 3 + 1))
        lines.append(json.dumps({"text": words}) + "\n" * (1 + number % 2))
    file = tmp_path_factory.mktemp("stream") / "a.jsonl"
    file.write_text("".join(lines))
    return str(file)


def packed(tokenizer: Any, path: str, rules: RowRules, **more: Any) -> PackedStream:
    stream = text(tokenizer, path, streaming=True, shuffle_block=4)
    sources = {"": stream, **more}
    return PackedStream(sources, dict.fromkeys(sources, Fraction(1, len(sources))), rules)


def batches(made: GlobalBatchLoader, count: int) -> list[list[dict[str, Any]]]:
    """The micro-batches of this rank in the next global batches, which are marked as consumed."""
    found = []
    for batch in made:
        found.append([{k: v.tolist() for k, v in each.items()} for each in batch.micro_batches])
        made.mark_consumed(batch)
        if len(found) == count:
            return found
    raise AssertionError("a packed stream has no end")


@pytest.mark.parametrize("rules", RULES)
def test_a_resume_continues_exactly_on_other_ranks_and_workers(
    tokenizer: Any, path: str, rules: RowRules
) -> None:
    rows = DocumentRows(text(tokenizer, path), rules)
    whole = batches(loader(packed(tokenizer, path, rules, more=rows)), 24)
    for num_read in (1, 9, 17):
        # On two ranks before the state is saved, on one rank with two workers after it.
        ranks = [loader(packed(tokenizer, path, rules, more=rows), rank, 2) for rank in range(2)]
        first, second = (batches(rank, num_read) for rank in ranks)
        joined = [own + other for own, other in zip(first, second, strict=True)]
        assert joined == whole[:num_read]
        states = [rank._source_state for rank in ranks]
        for rank in ranks:
            rank.gather_state(lambda _, states=states: states)
        state = pickle.loads(pickle.dumps(ranks[1].state_dict()))
        after = loader(packed(tokenizer, path, rules, more=rows), num_workers=2 * (num_read == 9))
        after.load_state_dict(state)
        assert batches(after, 7) == whole[num_read : num_read + 7]


@pytest.mark.parametrize("rules", RULES)
def test_rows_have_each_document_of_a_pass_once(tokenizer: Any, path: str, rules: RowRules) -> None:
    documents = [tuple(sample["input_ids"]) for sample in text(tokenizer, path)]
    found = batches(loader(packed(tokenizer, path, rules), shuffle=False), 40)
    labels: Counter[int] = Counter()
    rows = [{key: each[key][0] for key in each} for batch in found for each in batch]
    for row in rows:
        positions = np.array(row.get("position_ids", range(len(row["input_ids"]))))
        starts = positions == 0
        assert (np.diff(positions)[~starts[1:]] == 1).all()
        own = np.array(row["labels"])
        assert (own[starts] == IGNORE_INDEX).all() or rules.attends_across
        if not rules.splits:
            parts = np.split(np.array(row["input_ids"]), np.flatnonzero(starts)[1:])
            mask = np.array(row["attention_mask"], bool)
            assert {tuple(part) for part in parts if mask.all()} <= set(documents)
        else:
            assert len(row["input_ids"]) == SIZE and all(row["attention_mask"])
        labels.update(own[1:][own[1:] != IGNORE_INDEX].tolist())
    # The first token of a document is predicted only across documents.
    expected = Counter(
        token for each in documents for token in each[0 if rules.attends_across else 1 :]
    )
    passes = sum(labels.values()) / sum(expected.values())
    common = expected.most_common(5)
    for token, count in common:
        assert labels[token] == pytest.approx(count * passes, rel=0.1)


def test_the_rows_of_a_map_style_data_set_divide_one_sequence(tokenizer: Any, path: str) -> None:
    samples = text(tokenizer, path)
    flat = np.concatenate([sample["input_ids"] for sample in samples])
    rows = DocumentRows(samples, RowRules(SIZE, splits=True))
    across = DocumentRows(samples, RowRules(SIZE, splits=True, attends_across=True))
    assert len(rows) == -(-(len(flat) - 1) // (SIZE - 1))
    firsts = np.cumsum([0, *samples.lengths])[:-1]
    for number in range(len(rows)):
        start = number * (SIZE - 1)
        expected = flat[start : start + SIZE]
        assert np.array_equal(rows[number]["input_ids"], expected)
        assert np.array_equal(across[number]["labels"], expected)
        assert "position_ids" not in across[number]
        starts = start + np.flatnonzero(rows[number]["position_ids"] == 0)
        inside = firsts[(firsts > start) & (firsts < start + SIZE)]
        assert starts.tolist() == [start, *inside]
        assert (rows[number]["labels"][starts - start] == IGNORE_INDEX).all()
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_bad_streams_are_reported_with_their_place(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "b.jsonl"
    file.write_text('{"text": "one"}\n{"text": "' + "long " * 20 + '"}\n')
    with pytest.raises(RecipeError, match=r"too few documents[\s\S]*part 3 of 4"):
        batches(loader(packed(tokenizer, str(file), RowRules(200))), 1)
    single = {"global_batch_size": 1}
    with pytest.raises(RecipeError, match=r"longer than a row[\s\S]*b.jsonl:2[\s\S]*split_doc"):
        batches(loader(packed(tokenizer, str(file), RowRules(SIZE)), **single), 1)
    file.write_text('{"text": "one"}\n{"text": 3}\n')
    with pytest.raises(RecipeError, match=r"not text[\s\S]*b.jsonl:2"):
        batches(loader(packed(tokenizer, str(file), RowRules(SIZE)), num_workers=1, **single), 1)
    stream = packed(tokenizer, str(file), RowRules(SIZE))
    state = loader(stream).state_dict()
    other = loader(packed(tokenizer, str(file), RowRules(SIZE), more=[1]))
    other.load_state_dict(state)
    with pytest.raises(RecipeError, match="other sources than the checkpoint"):
        batches(other, 1)
