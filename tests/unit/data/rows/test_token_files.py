"""Pretraining data of Megatron and nanoGPT: the same tokens as the programs that wrote them read, in windows."""

import json
import tracemalloc
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_ckpt.data.batches.packing import PackedDataset
from automodel_ckpt.data.mixture import mixture
from automodel_ckpt.data.token_files import megatron, nanogpt
from automodel_ckpt.errors import RecipeError

MEGATRON = Path(__file__).parents[3] / "fixtures/megatron/tokens"
EXPECTED = json.loads((MEGATRON / "expected.json").read_text())


def tokens_of(windows: Any) -> list[int]:
    """The tokens of all windows in order, without those that a window repeats."""
    tokens: list[int] = []
    for sample in windows:
        assert sample["labels"] == sample["input_ids"]
        assert not tokens or tokens[-1] == sample["input_ids"][0]
        tokens += sample["input_ids"][1 if tokens else 0 :]
    return tokens


def write_nanogpt(path: Path, tokens: Any, header: tuple[int, ...] | None = (20240520, 1)) -> str:
    """Write a file as modded-nanogpt (or, with a longer *header*, NeMo AutoModel) does."""
    numbers = np.zeros(256, np.int32)
    dtype = "<u2"
    content = b""
    if header is not None:
        numbers[: len(header)] = header
        numbers[2] = len(tokens)
        dtype = {4: "<u4"}.get(int(numbers[3]), "<u2")
        content = numbers.tobytes()
    path.write_bytes(content + np.asarray(tokens, dtype).tobytes())
    return str(path)


@pytest.mark.parametrize("name", ["small", "large"])
def test_the_documents_of_megatron_are_read_in_order(name: str) -> None:
    documents = EXPECTED[name]["documents"]
    expected = list(chain.from_iterable(documents))
    windows = megatron(str(MEGATRON / name), seq_length=8)
    found = tokens_of(windows)
    assert len(expected) - 7 < len(found) <= len(expected)
    assert found == expected[: len(found)]
    assert windows[1]["input_ids"] == expected[7:15]
    assert list(windows.lengths) == [8] * len(windows)


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_a_split_has_the_documents_that_megatron_gives_it(part: str) -> None:
    first, last = EXPECTED["small"]["splits"][["train", "validation", "test"].index(part)]
    documents = EXPECTED["small"]["documents"][first:last]
    expected = list(chain.from_iterable(documents))
    for path in (MEGATRON / "small", MEGATRON / "small.bin", MEGATRON / "smal*"):
        windows = megatron(str(path), 2, split="99, 30, 10", part=part)  # type: ignore[arg-type]
        assert tokens_of(windows) == expected


def test_the_number_of_documents_of_a_part_is_rounded_to_the_nearest() -> None:
    documents = EXPECTED["small"]["documents"]
    windows = megatron(str(MEGATRON / "small"), 2, split="3, 1", part="train")
    # 6.75 of 9 documents.
    assert tokens_of(windows) == list(chain.from_iterable(documents[:7]))


def test_several_files_are_concatenated_or_mixed() -> None:
    both = megatron(str(MEGATRON / "*"), 8)
    large = megatron(str(MEGATRON / "large"), 8)
    small = megatron(str(MEGATRON / "small"), 8)
    assert list(both) == [*large, *small]
    mixed = mixture({"large": large, "small": small}, {"large": 3.0, "small": 1.0}, 8)
    assert mixed.num_of_epoch == {"large": 6, "small": 2}
    assert [len(pack) for pack in PackedDataset(both, 16).packs] == [2] * (len(both) // 2)
    assert len(megatron(str(MEGATRON / "*"), 8, max_samples=3)) == 3
    assert both.identity != large.identity


@pytest.mark.parametrize(
    "header", [(20240520, 1), (278895051, 1, 0, 2), (278895051, 1, 0, 4), None]
)
def test_files_of_nanogpt_are_read_with_and_without_a_header(
    tmp_path: Path, header: tuple[int, ...] | None
) -> None:
    tokens = list(range(1000, 1050))
    path = write_nanogpt(tmp_path / "a.bin", tokens, header)
    windows = nanogpt(path, 8, header=header is not None)
    assert tokens_of(windows) == tokens


def test_samples_can_begin_at_a_token(tmp_path: Path) -> None:
    tokens = [5, 5, 9, 1, 2, 9, 3, 9, 4, 5, 6, 9, 7, 9, 8]
    path = write_nanogpt(tmp_path / "a.bin", tokens)
    found = [sample["input_ids"] for sample in nanogpt(path, 4, bos_token=9)]
    assert found == [[9, 1, 2, 9], [9, 3, 9, 4], [9, 7, 9, 8]]
    # The window at the last 9 would have two tokens.
    path = write_nanogpt(tmp_path / "b.bin", [9, 1, 2, 3, 9, 4])
    assert [sample["input_ids"] for sample in nanogpt(path, 4, bos_token=9)] == [[9, 1, 2, 3]]


def test_tokens_outside_of_the_vocabulary_are_errors_with_their_byte(
    tmp_path: Path, tokenizer: Any
) -> None:
    tokens = [1, 2, 3, 60000]
    path = write_nanogpt(tmp_path / "a.bin", tokens)
    assert len(nanogpt(path, 4)) == 1 and nanogpt(path, 4)[0]["input_ids"] == tokens
    for options in ({"vocab_size": 60000}, {"tokenizer": tokenizer}):
        with pytest.raises(RecipeError, match=r"token 3 \(byte 1030\)\n.*token id 60000"):
            nanogpt(path, 4, **options)[0]  # type: ignore[arg-type]
    assert nanogpt(path, 4, vocab_size=60001)[0]


def test_a_large_file_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with open(path, "wb") as file:
        # A sparse file of 4 GB.
        file.truncate(4 << 30)

    tracemalloc.start()
    try:
        windows = nanogpt(str(path), 1024, header=False)
        assert len(windows) == (1 << 31) // 1023 and not any(windows[len(windows) - 1]["labels"])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"path": "none.bin"}, "a file of tokens cannot be read"),
        ({"path": "none*.bin"}, "no file of tokens is found"),
        ({"seq_length": 1}, "is out of range"),
        ({"seq_length": 60}, "no sample of seq_length tokens"),
        ({"max_samples": 0}, "is out of range"),
        ({"bos_token": 3}, "no sample of seq_length tokens"),
    ],
)
def test_settings_that_do_not_fit_are_errors(
    tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    path = write_nanogpt(tmp_path / "a.bin", range(50, 100))
    with pytest.raises(RecipeError, match=what):
        nanogpt(**{"path": path, "seq_length": 8} | options)


@pytest.mark.parametrize("split", ["", "a", "-1, 2", "0, 0, 0", "1, 1, 1, 1", "nan"])
def test_a_split_that_has_no_shares_is_an_error(split: str) -> None:
    with pytest.raises(RecipeError, match="the split is not a list of shares"):
        megatron(str(MEGATRON / "small"), 8, split=split)
