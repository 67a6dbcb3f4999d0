"""parse_json: content of the program's own files is parsed, content that takes too much memory is rejected before."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import automodel_ckpt
from automodel_ckpt.checkpoint.files.bounded_json import (
    FREE_BYTES,
    MAX_GROWTH,
    check_growth,
    parse_json,
    parsed_bytes,
)
from automodel_ckpt.checkpoint.files.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.parts.manifest import Tree
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, nbytes_of
from tests.unit.checkpoint.parts.test_manifest import example

LAYER = "model.layers.{}.self_attn.q_proj.weight"


def manifest_of(num_tensors: int, num_ranks: int, num_dimensions: int, name: str) -> bytes:
    """A manifest of tensors that are sharded over ranks, as a save on this number of ranks writes it."""
    tensors: dict[str, Tensor] = {}
    files: dict[str, FileRecord] = {}
    rest = (4096,) * (num_dimensions - 1)
    nbytes = nbytes_of("F32", (7, *rest))
    digest = digest_of(b"")
    for number in range(num_tensors):
        fqn = name.format(number)
        slices = []
        for rank in range(num_ranks):
            file = f"model/shard-{rank:05}-model-00001-of-00001.safetensors"
            offsets = (7 * rank,) + (0,) * (num_dimensions - 1)
            sizes = (7, *rest)
            piece = Slice(fqn, "F32", offsets, sizes, file, number * nbytes, nbytes, digest)
            slices.append(piece)
            files[file] = FileRecord(num_tensors * nbytes, digest)
        tensors[fqn] = Tensor(fqn, "F32", (7 * num_ranks, *rest), tuple(slices))
    trees = {"model": Tree("safetensors", tensors, {})}
    return replace(example(), state={}, trees=trees, files=files).to_bytes()


def header_of(num_tensors: int) -> bytes:
    """The header of a safetensors file."""
    header = {}
    for number in range(num_tensors):
        entry = {"dtype": "BF16", "shape": [4, 8], "data_offsets": [64 * number, 64 * number + 64]}
        header[LAYER.format(number)] = entry
    return json.dumps(header, separators=(",", ":")).encode()


def index_of(num_tensors: int) -> bytes:
    """An index of weights."""
    names = {
        LAYER.format(number): "model-00001-of-00002.safetensors" for number in range(num_tensors)
    }
    return json.dumps({"metadata": {}, "weight_map": names}, indent=2).encode()


def export_of(num_parts: int) -> bytes:
    """An export's manifest whose files have many parts."""
    parts = [[4 << 20, digest_of(b"")]] * num_parts
    return json.dumps({"files": {"model.safetensors": {"size": 1, "parts": parts}}}).encode()


LARGE_FILES: dict[str, Callable[[], bytes]] = {
    "manifest of 500 ranks": lambda: manifest_of(10, 500, 2, LAYER),
    "manifest of short names": lambda: manifest_of(2000, 1, 1, "{}"),
    "manifest of convolutions": lambda: manifest_of(20, 100, 5, "conv.{}"),
    "header": lambda: header_of(3000),
    "index": lambda: index_of(3000),
    "export": lambda: export_of(3000),
}


@pytest.mark.parametrize("kind", LARGE_FILES)
def test_the_files_of_large_models_take_less_memory_than_the_limit_at_any_size(kind: str) -> None:
    data = LARGE_FILES[kind]()
    assert parsed_bytes(data) < 0.95 * MAX_GROWTH * len(data)


@pytest.mark.parametrize("kind", LARGE_FILES)
def test_the_estimate_is_above_the_memory_that_the_parser_takes(kind: str) -> None:
    data = LARGE_FILES[kind]()
    assert peak_of(data) + len(data) < 1.1 * parsed_bytes(data)


def peak_of(data: bytes) -> int:
    """The bytes that parsing *data* allocates."""
    tracemalloc.start()
    try:
        parse_json(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


ELEMENTS = [b"[]", b"{}", b'"ab"', b'{"":1}', b"1e9", b"257", b"1", b'{"a":[]}']


def repeated(element: bytes, num_bytes: int) -> bytes:
    return b'{"a":[' + (element + b",") * (num_bytes // (len(element) + 1)) + b"1]}"


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_estimate_is_above_what_lists_of_small_values_take(element: bytes) -> None:
    data = repeated(element, 1 << 18)
    assert peak_of(data) + len(data) < parsed_bytes(data)


@pytest.mark.parametrize("element", ELEMENTS)
def test_content_that_takes_many_times_its_size_is_rejected_before_it_is_parsed(
    element: bytes,
) -> None:
    data = repeated(element, FREE_BYTES // 10)
    begin = time.thread_time()
    with pytest.raises(ValueError, match="too much memory"):
        parse_json(data)
    assert time.thread_time() - begin < 1
    with pytest.raises(ValueError, match="too much memory"):
        parse_json(data.decode())


def test_one_wide_character_counts_for_all_characters() -> None:
    text = '["' + "x" * 1_000_000 + "😀" + '"]'
    assert parsed_bytes(text.encode()) > 8_000_000 > parsed_bytes(text.encode()[:1_000_000])


def test_keys_that_all_differ_count_more_than_keys_that_repeat() -> None:
    def with_keys(keys: list[str]) -> bytes:
        return json.dumps(
            [dict.fromkeys(keys[at : at + 6], 1) for at in range(0, 6000, 6)]
        ).encode()

    different = with_keys([f"offset{number:04}" for number in range(6000)])
    same = with_keys(["offsets", "sizesab", "filesab", "startab", "nbytesa", "digesta"] * 1000)
    assert parsed_bytes(different) > parsed_bytes(same) + 64 * 5000


def test_content_up_to_the_free_limit_is_parsed_however_it_is_made() -> None:
    assert len(parse_json(repeated(b"{}", 1 << 20))["a"]) == (1 << 20) // 3 + 1


def test_content_of_the_largest_allowed_memory_is_accepted_and_one_more_element_rejected() -> None:
    element_bytes = parsed_bytes(b"{},{},") - parsed_bytes(b"{},")
    count = (FREE_BYTES - parsed_bytes(b"")) // element_bytes
    check_growth(b"{}," * count)
    with pytest.raises(ValueError, match="too much memory"):
        check_growth(b"{}," * (count + 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":"\xff"}', "not UTF-8 at byte 6"),
        ('{"a":1}'.encode("utf-16"), "not UTF-8 at byte 0"),
        (b"", "Expecting value"),
        (b"9" * 5000, "integer string conversion"),
    ],
)
def test_content_that_is_no_json_is_a_short_value_error(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(content)
    assert len(str(caught.value)) < 200


def test_text_and_bytes_are_parsed_like_the_standard_parser_does() -> None:
    value: dict[str, Any] = {"a": [1, 2.5, None, True], "ö😀": {"": "x"}}
    for content in (json.dumps(value), json.dumps(value).encode()):
        assert parse_json(content) == value
    assert parse_json(b"\xef\xbb\xbf" + json.dumps(value, ensure_ascii=False).encode()) == value
    assert parse_json('"\\ud800"') == "\ud800"


def test_hooks_see_pairs_and_constants() -> None:
    seen: list[str] = []
    assert parse_json(b'{"a":1,"a":2}', object_pairs_hook=tuple) == (("a", 1), ("a", 2))
    parse_json(b"[NaN,-Infinity]", parse_constant=seen.append)
    assert seen == ["NaN", "-Infinity"]


def test_files_that_others_can_write_are_parsed_by_no_other_parser() -> None:
    package = Path(automodel_ckpt.__file__).parent
    with_parser: set[str] = set()
    for directory in ("checkpoint", "convert", "logs", "optim", "train"):
        for path in (package / directory).rglob("*.py"):
            if re.search(r"\bjson\.loads?\(", path.read_text()):
                with_parser.add(path.relative_to(package).as_posix())
    # What this process or the trainer beside it has just written.
    own_content = {
        "checkpoint/export/hf_assets.py",
        "checkpoint/memory/node_process.py",
        "checkpoint/remote/child_process.py",
        "checkpoint/saving/adapter_assets.py",
        "checkpoint/sources/model_files.py",
        "checkpoint/state/model_config.py",
        "checkpoint/jobs/rank_manifest.py",
        "convert/targets/compressed_tensors.py",
        "logs/follow.py",
    }
    assert with_parser == {"checkpoint/files/bounded_json.py", *own_content}
