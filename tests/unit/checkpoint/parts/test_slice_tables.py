"""Checkpoints whose slices are in tables: everything that reads a checkpoint reads them, and damage is found."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.formats.torch_save import regular_boxes
from automodel_ckpt.checkpoint.jobs import rank_manifest
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.sharding import MAX_RANKS, RegularSlices, Sharding
from automodel_ckpt.checkpoint.parts.slice_table import (
    ROW,
    SEGMENT,
    Segment,
    SliceTable,
    _rank_offsets,
)
from automodel_ckpt.checkpoint.parts.slices import Box, Slice, Tensor
from automodel_ckpt.checkpoint.parts.tiling import tiling_fault
from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.parts.verify import verify, verify_deep
from automodel_ckpt.checkpoint.run.maintenance import drop_optimizer
from automodel_ckpt.checkpoint.tensors.box_reader import require_intact
from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed
from tests.support.models import tiny
from tests.unit.checkpoint.parts.test_manifest import resealed

NAME = "epoch_0_step_20"
FORMATS = {
    "shards": {},
    "hf": {"model_layout": "hf"},
    "torch_save": {"model_save_format": "torch_save"},
}


def saved(root: Path, monkeypatch: pytest.MonkeyPatch, *, rows: int = 0, **options: str) -> Path:
    """A checkpoint with tables where a tree has at least *rows* slices."""
    with monkeypatch.context() as patched:
        patched.setattr(rank_manifest, "MIN_TABLE_ROWS", rows)
        made = tiny.recipe(1)
        tiny.train(made)
        return tiny.save(root, made, **options).path


@pytest.mark.parametrize("kind", FORMATS)
def test_what_reads_a_checkpoint_reads_tables(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "run", monkeypatch, **FORMATS[kind])
    listed = saved(tmp_path / "listed", monkeypatch, rows=10**6, **FORMATS[kind])
    manifest = Manifest.read(path)
    assert manifest.format_version == 2 and Manifest.read(listed).format_version == 1
    assert {file for file in manifest.files if file.endswith("/.slices")} == {
        "model/.slices",
        "optim/.slices",
    }
    for name, tree in Manifest.read(listed).trees.items():
        for fqn, tensor in tree.tensors.items():
            in_table = manifest.trees[name].tensors[fqn]
            assert isinstance(in_table.slices, RegularSlices)
            assert in_table == tensor
    assert verify(path, manifest) == [] == verify_deep(path, manifest)
    made, expected = tiny.recipe(2), tiny.recipe(1)
    tiny.train(expected)
    assert tiny.load(path.parent, made, **FORMATS[kind]) is not None
    tiny.assert_equal_state(made, expected)
    # Written again, the manifest is the same.
    again = replace(manifest, digest="").to_bytes()
    assert again == (path / layout.MANIFEST).read_bytes()


def test_commands_accept_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    path = saved(run, monkeypatch)
    listed = saved(tmp_path / "listed", monkeypatch, rows=10**6)
    for command in (
        ["verify", "--deep", str(path)],
        ["diff", str(path), str(listed)],
        ["push", str(path), f"file://{tmp_path}/store"],
        ["pull", f"file://{tmp_path}/store/{NAME}", str(tmp_path / "pulled")],
        ["verify", "--deep", str(tmp_path / "pulled" / NAME)],
        ["show", "--json", f"file://{tmp_path}/store/{NAME}"],
        ["archive", str(path), "-o", str(tmp_path / "a.tar.zst")],
        ["unarchive", str(tmp_path / "a.tar.zst"), "-o", str(tmp_path / "unpacked")],
        ["verify", "--deep", str(tmp_path / "unpacked" / NAME)],
        ["export", "--to", "torch", str(path), "-o", str(tmp_path / "out")],
        ["export", "--to", "dcp", str(path), "-o", str(tmp_path / "dcp")],
    ):
        code = ckpt(command)
        output = capsys.readouterr()
        assert code == 0, (command, output)
        if command[0] == "show":
            shown = json.loads(output.out)
            assert shown["trees"]["model"]["tensors"]["frozen"]["slices"] == 1
    # Only the table of the optimizer is dropped with it; the other is still that of its tree.
    (run / layout.LATEST).unlink()
    assert drop_optimizer(run, NAME) > 0
    slim = Manifest.read(path)
    assert "model/.slices" in slim.files and "optim/.slices" not in slim.files
    assert verify(path, slim) == []


# ---------------------------------------------------------------- damage


def test_every_flipped_bit_of_a_table_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, monkeypatch)
    table = path / "model/.slices"
    content = table.read_bytes()
    for index in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[index] ^= 1 << index % 8
        table.write_bytes(bytes(damaged))
        with pytest.raises(CheckpointUnusable, match=r"table of the .* damaged") as caught:
            read_all(path)
        assert str(table) in str(caught.value)
    table.write_bytes(content)
    assert read_all(path) == 8
    table.write_bytes(content + b"x")
    with pytest.raises(CheckpointUnusable, match="another size"):
        consolidate(path)
    table.write_bytes(content[:-1])
    with pytest.raises(CheckpointUnusable, match="shorter than the manifest states"):
        read_all(path)
    (problem,) = verify(path, Manifest.read(path))
    assert problem.where == str(table)
    table.unlink()
    with pytest.raises(CheckpointUnusable, match="cannot be read"):
        Manifest.read(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_damage_of_a_tensor_in_a_table_is_noticed_where_it_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, monkeypatch, **FORMATS[kind])
    tensor = Manifest.read(path).trees["model"].tensors["frozen"]
    require_intact(path, tensor)
    (stored,) = tensor.slices
    with (path / stored.file).open("r+b") as file:
        file.seek(stored.start)
        byte = file.read(1)[0]
        file.seek(stored.start)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CheckpointUnusable, match="'frozen' is damaged"):
        require_intact(path, tensor)


def read_all(path: Path) -> int:
    tensors = Manifest.read(path).trees["model"].tensors.values()
    return len([piece for tensor in tensors for piece in tensor.slices])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"sharding":0,', b'"sharding":9,', "malformed"),
        (b'"sharding":0,', b'"sharding":-1,', "malformed"),
        (b'"mesh":[],', b'"mesh":[2],', "partition the tensor exactly once"),
        (b'"mesh":[],', b'"mesh":["x"],', "not a count"),
        (b'"split":{}', b'"split":{"0":[0]}', "partition the tensor exactly once"),
        (b'"split":{}', b'"split":{"x":[]}', "is not a dimension"),
        (b'"model/.slices","head_bytes"', b'"model/none","head_bytes"', "is not the table of its"),
        (b'"head_bytes":48', b'"head_bytes":47', "is not the table of its"),
        (b'"shape":[5,3]', b'"shape":[5,4]', "another length than its slices"),
        (b'"shape":[5,3]', b'"shape":[5,0]', "another length than its slices"),
        (b'"rank":0', b'"rank":1', "fewer slices than its tensors"),
        (b'"rank":0', b'"rank":0,"part":7', "fewer slices than its tensors"),
    ],
)
def test_a_manifest_that_does_not_match_its_table_is_an_error(
    old: bytes, new: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, monkeypatch)
    manifest = path / layout.MANIFEST
    content = manifest.read_bytes()
    assert old in content
    manifest.write_bytes(resealed(content.replace(old, new, 1)))
    with pytest.raises(CheckpointUnusable, match=message):
        read_all(path)


def test_a_head_of_an_impossible_size_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, monkeypatch)
    manifest = path / layout.MANIFEST
    size = (path / "model/.slices").stat().st_size
    content = manifest.read_bytes()
    for old, new in (
        (b'"head_bytes":48', b'"head_bytes":47'),
        (b'"model/.slices":{"size":%d' % size, b'"model/.slices":{"size":%d' % (size - 1)),
    ):
        assert old in content
        content = content.replace(old, new, 1)
    manifest.write_bytes(resealed(content))
    with pytest.raises(CheckpointUnusable, match="is not the table of its"):
        Manifest.read(path)


@pytest.mark.parametrize(("start", "shape"), [(100, (0,)), (98, (4,))])
def test_a_manifest_whose_table_overlaps_other_slices_is_not_published(
    start: int, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest.read(saved(tmp_path, monkeypatch))
    stop = start + shape[0]
    segment = Segment(0, "f", start, stop, np.zeros(1, ROW).tobytes())
    table = SliceTable.merged({0: [segment]})
    in_table = table.add(RegularSlices("a", "U8", shape, Sharding(), 0))
    listed = Slice("b", "U8", (0,), (50,), "f", 100, 50, digest_of(b""))
    tensors = {"a": in_table, "b": Tensor("b", "U8", (50,), (listed,))}
    table.store_in("t")
    changed = replace(
        manifest,
        state={},
        trees={"model": Tree("safetensors", tensors, {}, table=table)},
        files={"f": FileRecord(150, ""), "t": FileRecord(len(table.content()), "")},
    )
    if stop == start:
        assert rank_manifest.readable_bytes(changed, tmp_path)
        return
    with pytest.raises(SaveFailed, match="share bytes of 'f'"):
        rank_manifest.readable_bytes(changed, tmp_path)


def resealed_table(path: Path, change: Callable[[np.ndarray, np.ndarray], None]) -> None:
    """Change the head and the rows of the model's table as an attacker would, with all digests that fit."""
    manifest, table = path / layout.MANIFEST, path / "model/.slices"
    raw = json.loads(manifest.read_bytes())
    head_bytes = raw["trees"]["model"]["table"]["head_bytes"]
    content = table.read_bytes()
    segments = np.frombuffer(content[:head_bytes], SEGMENT).copy()
    rows = np.frombuffer(content[head_bytes:], ROW).copy()
    change(segments, rows)
    first = 0
    for segment in segments:
        last = first + int(segment["rows"])
        segment["digest"] = np.void(xxhash.xxh3_128_digest(rows[first:last].tobytes()))
        first = last
    table.write_bytes(segments.tobytes() + rows.tobytes())
    raw["trees"]["model"]["table"]["digest"] = digest_of(segments.tobytes())
    raw["files"]["model/.slices"]["digest"] = digest_of(table.read_bytes())
    text = json.dumps(raw, separators=(",", ":")).encode()
    head = text[: text.rindex(b',"digest"')] + b',\n"digest": "'
    manifest.write_bytes(resealed(head))


def set_field(name: str, value: int) -> Callable[[np.ndarray, np.ndarray], None]:
    def change(segments: np.ndarray, rows: np.ndarray) -> None:
        target = rows if name == "gap" else segments
        target[name][0] = value

    return change


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rank", 1, "fewer slices"),
        ("part", 1, "not those of the tensors"),
        ("file", 1, "not those of the tensors"),
        ("file", 2**32 - 1, "not those of the tensors"),
        ("rows", 3, "not those of the tensors"),
        ("start", 0, "another length"),
        ("start", 2**63, "not in order"),
        ("stop", 2**63, "not in order"),
        ("stop", 2**62, "exceed"),
        ("gap", 2**32 - 1, "another length"),
    ],
)
def test_a_hostile_table_is_an_error(
    name: str, value: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, monkeypatch)
    resealed_table(path, lambda segments, rows: None)
    assert read_all(path) == 8
    resealed_table(path, set_field(name, value))
    with pytest.raises(CheckpointUnusable, match=message):
        read_all(path)


@pytest.mark.parametrize("name", ["rank", "gap"])
def test_a_deep_verification_lists_the_damage_of_a_table_and_goes_on(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = saved(tmp_path, monkeypatch)
    (path / "stray").touch()
    resealed_table(path, set_field(name, 1))
    problems = verify(path, Manifest.read(path)) + verify_deep(path, Manifest.read(path))
    assert [problem.where for problem in problems] == [
        str(path / "model/.slices"),
        str(path / "stray"),
    ]
    assert ckpt(["verify", "--deep", str(path)]) == 3
    assert capsys.readouterr().out.count("the table of the checkpoint's slices is damaged") == 1


def test_ranks_that_wrote_other_slices_than_planned_fail_the_save_by_the_name_of_the_tree() -> None:
    segments = {0: [Segment(0, "f", 0, 4, np.zeros(1, ROW).tobytes())]}
    table = SliceTable.merged(segments, "optimizer")
    table.add(RegularSlices("a", "U8", (4,), Sharding(), 1))
    with pytest.raises(SaveFailed, match=r"did not write the slices[\s\S]*optimizer[\s\S]*report"):
        table.check_counts()


def test_a_huge_mesh_takes_no_memory_for_ranks_that_store_nothing() -> None:
    sharding = Sharding((MAX_RANKS // 4, 4), (4, 1), ((0, (0,)), (1, (1,))))
    tracemalloc.start()
    ranks = _rank_offsets(sharding, (3, 2)) + 7
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ranks.tolist() == [7, 8, 11, 12, 15, 16]
    assert peak_bytes < 100_000


# ---------------------------------------------------------------- formulas


def shardings() -> list[tuple[Sharding, tuple[int, ...]]]:
    """Meshes of up to three dimensions, with tensors that they do and do not divide evenly."""
    found = []
    for extent in (1, 2, 5, 8, 13):
        found += [
            (Sharding((4,), (2,), ((0, (0,)),)), (extent, 3)),
            (Sharding((2, 3), (3, 1), ((0, (1, 0)),)), (extent,)),
            (Sharding((2, 3), (1, 2), ((0, (0,)), (1, (1,)))), (extent, 4)),
            (Sharding((2, 1, 2), (4, 9, 1), ((0, (2, 1, 0)),)), (extent, 2)),
        ]
    return [*found, (Sharding(), (3, 0)), (Sharding(), ())]


@pytest.mark.parametrize(("sharding", "shape"), shardings())
def test_a_formula_divides_a_tensor_completely_and_finds_what_overlaps(
    sharding: Sharding, shape: tuple[int, ...]
) -> None:
    assert sharding.fault() is None
    slices = RegularSlices("w", "F32", shape, sharding, 3)
    boxes = [piece.box for piece in slices]
    assert tiling_fault(boxes, shape) is None and len(boxes) == len(slices)
    arrays = regular_boxes(sharding, shape)
    assert arrays.offsets().tolist() == [list(box.offsets) for box in boxes]
    assert arrays.sizes().tolist() == [list(box.sizes) for box in boxes]
    ranks = sorted((arrays.ranks + slices.first).tolist())
    assert [rank for rank in range(40) if slices.of_rank(rank) is not None] == ranks
    assert len(ranks) == len(boxes)
    for box in (*boxes, Box((0,) * len(shape), shape)):
        found = [piece.box for piece in slices.overlapping(box)]
        touching = [other for other in boxes if _touches(other, box)]
        assert all(other in found for other in touching)


def _touches(one: Box, other: Box) -> bool:
    pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in pairs)


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding((2,), (1,), ()),
        Sharding((2, 2), (2, 1), ((0, (0,)),)),
        Sharding((2,), (1,), ((0, (0, 0)),)),
        Sharding((2, 2), (1, 1), ((0, (0, 1)),)),
        Sharding((2, 3), (2, 1), ((0, (0, 1)),)),
        Sharding((2,), (0,), ((0, (0,)),)),
        Sharding((0,), (1,), ((0, (0,)),)),
        Sharding((2, 2), (2, 1), ((1, (0,)), (0, (1,)))),
        Sharding((MAX_RANKS, 2), (2, 1), ((0, (0, 1)),)),
    ],
)
def test_an_impossible_sharding_is_rejected(sharding: Sharding) -> None:
    assert sharding.fault() is not None


def test_a_table_of_a_tree_of_which_tensors_were_selected_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, monkeypatch)
    manifest = Manifest.read(path)
    tree = manifest.trees["model"]
    some = {fqn: tensor for fqn, tensor in tree.tensors.items() if fqn != "frozen"}
    fewer = replace(manifest, trees={"model": replace(tree, tensors=some)}, state={})
    read = Manifest.parse(fewer.to_bytes(), path / layout.MANIFEST)
    assert read.format_version == 1 and isinstance(
        read.trees["model"].tensors["brief"].slices, tuple
    )
    assert torch.equal(
        torch.tensor(read.trees["model"].tensors["brief"].shape), torch.tensor([3, 2])
    )
    shutil.rmtree(path)
