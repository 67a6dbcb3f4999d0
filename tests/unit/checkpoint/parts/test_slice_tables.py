"""Checkpoints whose slices are in tables: everything that reads a checkpoint reads them, and damage is found."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.jobs import jobs
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.slice_table import ROW, SEGMENT
from automodel_ckpt.checkpoint.parts.slices import RegularSlices
from automodel_ckpt.checkpoint.parts.verify import verify, verify_deep
from automodel_ckpt.checkpoint.run.maintenance import drop_optimizer
from automodel_ckpt.checkpoint.tensors.box_reader import require_intact
from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.errors import CheckpointUnusable
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
        patched.setattr(jobs, "MIN_TABLE_ROWS", rows)
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
        (b'"rank":0', b'"rank":1', "other slices than its tensors"),
        (b'"rank":0', b'"rank":0,"part":7', "other slices than its tensors"),
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
        ("rank", 1, "other slices"),
        ("part", 1, "not the tensors'"),
        ("file", 1, "not the tensors'"),
        ("file", 2**32 - 1, "not the tensors'"),
        ("rows", 3, "not the tensors'"),
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
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
