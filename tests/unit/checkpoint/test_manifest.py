"""MANIFEST.json: what it keeps, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.manifest import (
    Blob,
    FileRecord,
    Manifest,
    Part,
    StateRecord,
    Tree,
    TreePart,
    digest_of,
    merge_tree,
)
from automodel_ckpt.checkpoint.slices import Slice, Tensor
from automodel_ckpt.errors import CheckpointUnusable

WHERE = Path("MANIFEST.json")


def example() -> Manifest:
    piece = Slice("w", "F32", (0, 0), (2, 2), "model/a", 8, 16, "xxh3_128:00")
    return Manifest(
        step=20, epoch=0, created=1.5, world_size=2, dp_size=2, progress={"consumed_samples": 5},
        losses={"val_loss": None}, validated=True, environment={}, lineage={},
        state={"model": StateRecord("module", "replicated", "model/"),
               "rng": StateRecord("object", "rank_rng", "rng", ("rng/r.pt",), ("other",))},
        trees={"model": Tree("safetensors", {"w": Tensor("w", "F32", (2, 2), (piece,))},
                             {"x": Blob("x", "model/a", 0, 8, "xxh3_128:11")}, {"tied": "w"})},
        files={"model/a": FileRecord(24, "xxh3_128:22"), "rng/r.pt": FileRecord(0, "xxh3_128:33")},
    )  # fmt: skip


def test_what_is_written_is_read_again() -> None:
    manifest = example()
    read = Manifest.parse(manifest.to_bytes(), WHERE)
    assert replace(read, digest="") == manifest
    assert json.loads(manifest.to_bytes())["digest"] == read.digest


def test_every_flipped_bit_is_noticed() -> None:
    data = example().to_bytes()
    for index in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[index] ^= 1 << bit
            with pytest.raises(CheckpointUnusable):
                Manifest.parse(bytes(damaged), WHERE)


@pytest.mark.parametrize("length", [0, 1, 40, -1, -30])
def test_a_truncated_manifest_is_noticed(length: int) -> None:
    with pytest.raises(CheckpointUnusable, match="damaged"):
        Manifest.parse(example().to_bytes()[:length], WHERE)


def resealed(text: bytes) -> bytes:
    """The manifest as an attacker writes it: any content, a fitting digest."""
    head = text[: text.rindex(b'"digest": ')]
    return head + b'"digest": "' + digest_of(head).encode() + b'"\n}\n'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"model/a":{"size":24', b'"../a":{"size":24', "empty, '.' or '..'"),
        (b'"model/a":{"size":24', b'"/etc/passwd":{"size":24', "not a relative path"),
        (b'"size":24', b'"size":20', "is not in 'model/a'"),
        (b'"size":24', b'"size":-24', "is no count"),
        (b'"sizes":[2,2]', b'"sizes":[1,2]', "elements are in no slice"),
        (b'"dtype":"F32"', b'"dtype":"F99"', "unknown dtype"),
        (b'"tied":"w"', b'"tied":"v"', "which is not stored"),
        (b'"files":["rng/r.pt"]', b'"files":["rng/s.pt"]', "not among the files"),
        (b'"step":20', b'"step":"20"', "is no count"),
        (b'"format_version":1', b'"format_version":2', "later format"),
        (b'"step":20,', b"", "not of the known form"),
        (b'"validated":true', b'"validated":1', "neither true nor false"),
        (b'"format":"automodel_ckpt"', b'"format":"another"', "another kind"),
    ],
)
def test_a_manifest_that_lies_is_refused_whatever_its_digest(old: bytes, new: bytes, message: str) -> None:
    data = example().to_bytes()
    assert old in data
    with pytest.raises(CheckpointUnusable, match=message):
        Manifest.parse(resealed(data.replace(old, new, 1)), WHERE)


def test_deeply_nested_json_is_refused_without_a_crash() -> None:
    with pytest.raises(CheckpointUnusable, match="no JSON"):
        Manifest.parse(resealed(b'{"a":' + b"[" * 200_000 + b',\n"digest": "'), WHERE)


def test_a_pipe_in_place_of_the_manifest_does_not_block(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "MANIFEST.json")
    with pytest.raises(CheckpointUnusable, match="regular file"):
        Manifest.read(tmp_path)


def test_a_link_in_place_of_the_manifest_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_bytes(example().to_bytes())
    (tmp_path / "MANIFEST.json").symlink_to("elsewhere.json")
    with pytest.raises(CheckpointUnusable, match="cannot be read"):
        Manifest.read(tmp_path)


def test_the_ranks_parts_are_merged_into_whole_tensors() -> None:
    def part(rank: int) -> Part:
        piece = Slice("w", "F32", (rank, 0), (1, 2), f"model/{rank}", 0, 8, "d")
        tensors = [Tensor("w", "F32", (2, 2), (piece,))]
        return Part.parse(Part(rank, {f"model/{rank}": FileRecord(8, "d")}, {"model": TreePart(tensors)}).to_bytes())

    tree = merge_tree("model", "safetensors", [part(0), part(1)], {})
    assert [piece.offsets for piece in tree.tensors["w"].slices] == [(0, 0), (1, 0)]
