"""MANIFEST.json: what it keeps, and what it refuses."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.files.durable_file import FileRecord, digest_of
from automodel_ckpt.checkpoint.jobs.jobs import (
    RankManifest,
    RankTree,
    finalize,
)
from automodel_ckpt.checkpoint.parts import manifest as manifest_module
from automodel_ckpt.checkpoint.parts.commit import reserve
from automodel_ckpt.checkpoint.parts.manifest import Blob, Manifest, StateRecord, Summary, Tree
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed

WHERE = Path("MANIFEST.json")


def example() -> Manifest:
    piece = Slice("w", "F32", (0, 0), (2, 2), "model/a", 8, 16, "xxh3_128:00")
    return Manifest(
        step=20,
        epoch=0,
        created=1.5,
        world_size=2,
        dp_size=2,
        progress={"consumed_samples": 5},
        losses={"val_loss": None},
        validated=True,
        environment={},
        lineage={},
        state={
            "model": StateRecord("module", "replicated", "model/"),
            "rng": StateRecord("object", "rank_rng", "rng", ("rng/r.pt",), ("other",)),
        },
        trees={
            "model": Tree(
                "safetensors",
                {"w": Tensor("w", "F32", (2, 2), (piece,))},
                {"x": Blob("x", "model/a", 0, 8, "xxh3_128:11")},
                {"tied": "w"},
            )
        },
        files={"model/a": FileRecord(24, "xxh3_128:22"), "rng/r.pt": FileRecord(0, "xxh3_128:33")},
    )


def test_every_flipped_bit_is_noticed() -> None:
    data = example().to_bytes()
    for index in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[index] ^= 1 << bit
            with pytest.raises(CheckpointUnusable):
                Manifest.parse(bytes(damaged), WHERE)


def resealed(text: bytes) -> bytes:
    """The manifest as an attacker writes it: any content, a fitting digest."""
    head = text[: text.rindex(b'"digest": ')]
    return head + b'"digest": "' + digest_of(head).encode() + b'"\n}\n'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"model/a":{"size":24', b'"../a":{"size":24', "not a plain relative path"),
        (b'"model/a":{"size":24', b'"/etc/passwd":{"size":24', "not a plain relative path"),
        (b'"size":24', b'"size":20', "is not in 'model/a'"),
        (b'"size":24', b'"size":-24', "is not a count"),
        (b'"sizes":[2,2]', b'"sizes":[1,2]', "elements are not in any slice"),
        (b'"dtype":"F32"', b'"dtype":"F99"', "unknown dtype"),
        (b'"tied":"w"', b'"tied":"v"', "which is not stored"),
        (b'"files":["rng/r.pt"]', b'"files":["rng/s.pt"]', "not among the files"),
        (b'"step":20', b'"step":"20"', "'20' is not a count"),
        (b'"step":20', b'"step":[20]', "a value of type list is not a count"),
        (b'"sizes":[2,2]', b'"sizes":[' + b"1," * 64 + b"1]", "65 dimensions"),
        (b'"format_version":1', b'"format_version":4', "does not support"),
        (b'"step":20,', b"", "the manifest is malformed"),
        (b'"created":1.5', b'"created":-1', "is not a time"),
        (b'"validated":true', b'"validated":1', "neither true nor false"),
        (b'"format":"automodel_ckpt"', b'"format":"another"', "not a manifest of this format"),
        (b'"kind":"module"', b'"kind":7', "is not text"),
        (b'"losses":{', b'"losses":[{', "the manifest"),
        (b'"progress":{"consumed_samples":5}', b'"progress":[5]', "is not a mapping"),
        (b'"consumed_samples":5', b'"consumed_samples":9223372036854775808', "more than 64 bits"),
        (b'"consumed_samples":5', b'"x":' + b"[" * 8 + b"]" * 8, "nested more than 8 levels"),
    ],
)
def test_a_manifest_that_lies_is_refused_whatever_its_digest(
    old: bytes, new: bytes, message: str
) -> None:
    data = example().to_bytes()
    assert old in data
    with pytest.raises(CheckpointUnusable, match=message):
        Manifest.parse(resealed(data.replace(old, new, 1)), WHERE)


def of_tensors(names: Iterable[str]) -> Manifest:
    """A manifest of tensors of two floats each."""
    tensors, start = {}, 0
    for name in names:
        piece = Slice(
            name,
            "F32",
            (0,),
            (2,),
            "model/a",
            start,
            8,
            digest_of(name.encode("utf-8", "surrogatepass")),
        )
        tensors[name] = Tensor(name, "F32", (2,), (piece,))
        start += 8
    files = {"model/a": FileRecord(start, digest_of(b""))}
    return replace(
        example(), state={}, trees={"model": Tree("safetensors", tensors, {})}, files=files
    )


def test_a_checkpoint_that_a_reader_would_reject_is_never_finalized(tmp_path: Path) -> None:
    staging = reserve(tmp_path, "epoch_0_step_20")
    tensors = list(of_tensors(["a\ud800b"]).trees["model"].tensors.values())
    written = RankManifest(
        0, {"model/a": FileRecord(8, digest_of(b""))}, {"model": RankTree(tensors)}
    )
    partial_manifest = replace(
        example(), state={}, trees={"model": Tree("safetensors", {}, {})}, files={}
    )
    with pytest.raises(SaveFailed, match="not valid Unicode"):
        finalize(staging, partial_manifest, [written])
    assert not (staging / "MANIFEST.json").exists()


def placed() -> Manifest:
    """A file that two ranks filled: columns of one tensor, rows of another, and that a second time as a copy."""
    columns = [Slice("w", "F32", (0, at), (2, 1), "m/a", 8, 8, f"d{at}", True) for at in range(2)]
    rows = [Slice("v", "F32", (at,), (1,), "m/a", 24 + 4 * at, 4, f"e{at}") for at in range(2)]
    copy = [replace(piece, fqn="v2", start=piece.start + 8) for piece in rows]
    tensors = {
        "w": Tensor("w", "F32", (2, 2), tuple(columns)),
        "v": Tensor("v", "F32", (2,), tuple(rows)),
    }
    tree = Tree("hf", tensors, {}, {"v2": "v"}, {"v2": Tensor("v2", "F32", (2,), tuple(copy))})
    return replace(
        example(),
        trees={"model": tree},
        files={
            "m/a": FileRecord(40, "xxh3_128_parts:00"),
            "rng/r.pt": FileRecord(0, "xxh3_128:33"),
        },
    )


def test_files_that_several_ranks_filled_are_read_again_and_have_to_be_full() -> None:
    manifest = placed()
    assert replace(Manifest.parse(manifest.to_bytes(), WHERE), digest="") == manifest
    tree = manifest.trees["model"]
    first, second = tree.tensors["w"].slices
    elsewhere = Tensor("w", "F32", (2, 2), (first, replace(second, start=12)))
    alone = Tensor("w", "F32", (2, 2), (first, replace(second, interleaved=False)))
    apart = {
        "v2": replace(
            tree.copies["v2"],
            slices=tuple(replace(p, start=p.start + 4) for p in tree.copies["v2"].slices),
        )
    }
    for changed, what in (
        (replace(tree, tensors=tree.tensors | {"w": elsewhere}), "interleaved, in one place"),
        (replace(tree, tensors=tree.tensors | {"w": alone}), "interleaved, in one place"),
        (replace(tree, copies=apart), "do not fill it|is not in 'm/a'"),
        (replace(tree, copies={}), "do not fill it"),
        (replace(tree, objects={"x": Blob("x", "m/a", 0, 8, "f")}), "among slices"),
        (
            replace(
                tree,
                copies={
                    "v2": replace(tree.copies["v2"], fqn="v2", slices=tree.tensors["v"].slices)
                },
            ),
            "share bytes",
        ),
    ):
        with pytest.raises(CheckpointUnusable, match=what):
            Manifest.parse(replace(manifest, trees={"model": changed}).to_bytes(), WHERE)


def test_a_manifest_above_the_limit_is_rejected_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = example().to_bytes()
    (tmp_path / "MANIFEST.json").write_bytes(data)
    monkeypatch.setattr(manifest_module, "MAX_BYTES", len(data))
    assert Manifest.read(tmp_path) == Manifest.parse(data, WHERE)
    monkeypatch.setattr(manifest_module, "MAX_BYTES", len(data) - 1)
    for read in (Manifest.read, Summary.read):
        with pytest.raises(CheckpointUnusable, match="exceed the limit"):
            read(tmp_path)
