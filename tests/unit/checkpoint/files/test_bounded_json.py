"""parse_json: content of the program's own files is parsed, content that takes too much memory is rejected before."""

import json
import re
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import automodel_ckpt
from automodel_ckpt.checkpoint.files.durable_file import FileRecord, digest_of
from automodel_ckpt.checkpoint.files.safe_open import (
    FREE_BYTES,
    MAX_GROWTH,
    parse_json,
    parsed_bytes,
)
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


ELEMENTS = [b"[]", b'"ab"', b"257", b'{"a":[]}']


def repeated(element: bytes, num_bytes: int) -> bytes:
    return b'{"a":[' + (element + b",") * (num_bytes // (len(element) + 1)) + b"1]}"


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


def test_files_that_others_can_write_are_parsed_by_no_other_parser() -> None:
    package = Path(automodel_ckpt.__file__).parent
    with_parser: set[str] = set()
    for directory in ("checkpoint", "convert", "logs", "optim", "training"):
        for path in (package / directory).rglob("*.py"):
            if re.search(r"\bjson\.loads?\(", path.read_text()):
                with_parser.add(path.relative_to(package).as_posix())
    # What this process or the trainer beside it has just written.
    own_content = {
        "checkpoint/export/hf_assets.py",
        "checkpoint/sources/model_files.py",
        "checkpoint/remote/child_process.py",
        "checkpoint/saving/adapter_assets.py",
        "checkpoint/state/model_config.py",
        "checkpoint/jobs/rank_manifest.py",
        "convert/targets/compressed_tensors.py",
        "logs/follow.py",
        "training/parts/init_from.py",
    }
    assert with_parser == {"checkpoint/files/safe_open.py", *own_content}
