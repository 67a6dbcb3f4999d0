"""Streams of rows: the same samples as without streaming, exact resumes, shuffled or not, on any number of ranks."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.batches.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.data.chat import messages
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.data.hellaswag import hellaswag
from automodel_ckpt.data.squad import squad
from automodel_ckpt.data.text import prompt_completion, text
from automodel_ckpt.errors import RecipeError
from tests.unit.data.toys import jsonl, train

NUM_ROWS = 23
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    return jsonl(
        tmp_path_factory.mktemp("data") / "a.jsonl",
        *({"text": f"row {n}"} for n in range(NUM_ROWS)),
    )


def loader(
    tokenizer: Any, path: str, *, dp_rank: int = 0, dp_size: int = 1, **options: Any
) -> GlobalBatchLoader:
    stream = text(tokenizer, path, streaming=True, shuffle_block=options.pop("shuffle_block", 7))
    sizes = {"global_batch_size": 4, "local_batch_size": 1, "seed": 5} | options
    return GlobalBatchLoader(
        stream, collate_fn=PadCollator(0), dp_rank=dp_rank, dp_size=dp_size, **sizes
    )


def rows_of(tokenizer: Any, batches: list[GlobalBatch]) -> list[str]:
    """The rows that carried labels, in order, as ``epoch:row 3``."""
    found = []
    for batch in batches:
        for micro in batch.micro_batches:
            for tokens, labels in zip(
                micro["input_ids"].tolist(), micro["labels"].tolist(), strict=True
            ):
                if any(label != -100 for label in labels):
                    found.append(
                        f"{batch.epoch}:"
                        + tokenizer.decode([t for t in tokens if t], skip_special_tokens=True)
                    )
    return found


BUILDERS: list[tuple[Any, dict[str, Any], list[Any]]] = [
    (text, {}, [{"text": "one"}, {"text": "two words"}]),
    (prompt_completion, {}, [{"prompt": "2 + 2 =", "completion": " 4"}]),
    (
        messages,
        {"chat_template": CHAT},
        [
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Hello"},
                ]
            }
        ],
    ),
    (
        squad,
        {},
        [{"context": "A b.", "question": "What?", "answers": {"text": ["b"], "answer_start": [2]}}],
    ),
    (hellaswag, {}, [{"ctx": "He", "endings": ["a", "b", "c", "d"], "label": "2"}]),
]


@pytest.mark.parametrize(
    ("builder", "options", "rows"), BUILDERS, ids=[b[0].__name__ for b in BUILDERS]
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_stream_gives_the_samples_that_are_prepared_without_streaming(
    tokenizer: Any,
    tmp_path: Path,
    builder: Any,
    options: dict[str, Any],
    rows: list[Any],
    suffix: str,
) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        jsonl(path, *rows)
    else:
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(path)
    whole = builder(tokenizer, str(path), **options)
    stream = builder(tokenizer, str(path), streaming=True, **options)
    assert [stream.prepare(row) for row in stream] == [
        whole[number] for number in range(len(whole))
    ]
    assert len(list(builder(tokenizer, str(path), streaming=True, max_samples=1, **options))) == 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_gives_each_row_once_shuffled_within_blocks(
    tokenizer: Any, documents: str, shuffle: bool
) -> None:
    found = rows_of(tokenizer, train(loader(tokenizer, documents, shuffle=shuffle), 12))
    first, second = found[:NUM_ROWS], found[NUM_ROWS:]
    in_order = [f"row {n}" for n in range(NUM_ROWS)]
    for epoch, part in enumerate((first, second)):
        numbers = [entry.removeprefix(f"{epoch}:") for entry in part]
        assert sorted(numbers) == sorted(in_order)
        assert (numbers == in_order) != shuffle
        assert all(
            sorted(numbers[n : n + 7]) == sorted(in_order[n : n + 7]) for n in range(0, NUM_ROWS, 7)
        )
    if shuffle:
        assert [entry[2:] for entry in first] != [entry[2:] for entry in second]


@pytest.mark.parametrize(("shuffle", "num_workers"), [(False, 0), (True, 0), (True, 1)])
def test_a_resume_is_exact_wherever_it_was_stopped(
    tokenizer: Any, documents: str, shuffle: bool, num_workers: int
) -> None:
    whole = rows_of(tokenizer, train(loader(tokenizer, documents, shuffle=shuffle), 14))
    stops = (6,) if num_workers else range(1, 13)
    for stop in stops:
        first = loader(tokenizer, documents, shuffle=shuffle, num_workers=num_workers)
        second = loader(
            tokenizer, documents, shuffle=shuffle, num_workers=num_workers, shuffle_block=50
        )
        before = train(first, stop)
        state = json.loads(json.dumps(first.state_dict()))
        second.load_state_dict(state)
        if shuffle:  # the block that was begun is finished as it was; later ones have the new size
            again = rows_of(tokenizer, before) + rows_of(tokenizer, train(second, 12 - stop))
            assert sorted(again[:NUM_ROWS]) == sorted(whole[:NUM_ROWS])
            second = loader(tokenizer, documents, shuffle=shuffle, num_workers=num_workers)
            second.load_state_dict(state)
        assert rows_of(tokenizer, before) + rows_of(tokenizer, train(second, 14 - stop)) == whole


def test_long_samples_are_cut_counted_or_refused_with_their_row(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "A", "completion": "B" * 30},
        {"prompt": "A" * 30, "completion": "B"},
        {"prompt": "A", "completion": "B"},
    ]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    stream = prompt_completion(tokenizer, path, seq_length=8, truncation="right", streaming=True)
    made = GlobalBatchLoader(
        stream, collate_fn=PadCollator(0), global_batch_size=3, local_batch_size=3, shuffle=False
    )
    with caplog.at_level(logging.INFO):
        (micro,) = train(made, 1)[0].micro_batches
    assert micro["input_ids"].shape[1] == 8
    assert [any(label != -100 for label in row) for row in micro["labels"].tolist()] == [
        True,
        False,
        True,
    ]
    assert "1 of 3 samples truncated to seq_length 8" in caplog.text
    strict = prompt_completion(tokenizer, path, seq_length=8, streaming=True)
    made = GlobalBatchLoader(
        strict, collate_fn=PadCollator(0), global_batch_size=3, local_batch_size=3, shuffle=False
    )
    with pytest.raises(RecipeError, match=r"sample 0 of the stream: .*a\.jsonl:1"):
        train(made, 1)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"split": "train[:50%]"}, "a stream cannot read part of a split"),
        ({"split": "dev"}, "a data file has only the split train"),
        ({"name": "easy"}, "no subsets"),
        ({"shuffle_block": 0}, "is out of range"),
        ({"max_samples": 0}, "is out of range"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    tokenizer: Any, documents: str, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(RecipeError, match=what):
        text(tokenizer, documents, streaming=True, **options)


def test_a_stream_that_is_split_by_rank_is_refused(documents: str) -> None:
    import datasets
    from datasets.distributed import split_dataset_by_node

    stream = datasets.load_dataset("json", data_files=documents, split="train", streaming=True)
    with pytest.raises(RecipeError, match="already split by rank"):
        GlobalBatchLoader(
            split_dataset_by_node(stream, 0, 2),
            collate_fn=PadCollator(0),
            global_batch_size=4,
            local_batch_size=4,
        )
