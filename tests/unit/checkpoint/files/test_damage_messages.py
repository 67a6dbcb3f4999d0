"""What is said where a checkpoint, an export or a source of weights is damaged in a way that no other test has."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint.export.export_manifest import export_problems
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import FileRecord, digest_of
from automodel_ckpt.checkpoint.files.safe_open import SPARSE_FROM_BYTES
from automodel_ckpt.checkpoint.files.safetensors_header import build_header
from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.checkpoint.parts import verify
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.slices import nbytes_of
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, RecipeError
from tests.support.models import tiny
from tests.support.models.shards import checkpoint_in

Patch = pytest.MonkeyPatch


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return checkpoint_in(tmp_path, 20)


def found(checkpoint: Path) -> str:
    return "\n".join(map(str, verify.verify_deep(checkpoint, Manifest.read(checkpoint))))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"../x": {"size": 1, "digest": "00"}}, "a file outside of the export"),
        ({"a": {"size": 1, "digest": "00"}}, "a file of the export is damaged"),
        ({"a": {"size": 1, "parts": [[2, "00"]]}}, "byte ranges of 2 bytes for a file of 1"),
    ],
)
def test_an_export_that_is_not_what_its_list_says(
    checkpoint: Path, files: dict[str, object], said: str
) -> None:
    export = checkpoint / "model" / layout.CONSOLIDATED
    export.mkdir()
    (export / "a").write_bytes(b"x")
    (export / layout.EXPORT_MANIFEST).write_text(json.dumps({"files": files}))
    problems = "\n".join(map(str, export_problems(export)))
    assert said in problems and "export again" in problems


def test_digests_of_slices_that_are_not_those_of_their_file(checkpoint: Path) -> None:
    path = next((checkpoint / "model").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    name = f"model/{path.name}"
    manifest = Manifest.read(checkpoint)
    manifest.files[name] = type(manifest.files[name])(len(data), digest_of(bytes(data)))  # type: ignore[index]
    (checkpoint / layout.MANIFEST).write_bytes(manifest.to_bytes())
    assert "the manifest's digests disagree" in found(checkpoint) and path.name in found(checkpoint)


@pytest.mark.parametrize("place", ["header", "first", "last"])
def test_damage_of_a_large_file_is_found_by_one_of_the_ranks(tmp_path: Path, place: str) -> None:
    """The ranks divide it into parts of 64 MiB."""
    module = torch.nn.Module()
    for name in ("first", "second", "last"):
        module.register_buffer(name, torch.zeros(40 << 20, dtype=torch.uint8))
    checkpoint = tiny.save(tmp_path, SimpleNamespace(model=module)).path
    (path,) = (checkpoint / "model").glob("*.safetensors")
    manifest = Manifest.read(checkpoint)
    assert verify.verify(checkpoint, manifest) == []
    start = {"header": 20, "first": 1 << 20, "last": path.stat().st_size - 1}[place]
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"x")
    found = [verify.verify(checkpoint, manifest, rank=rank, num_ranks=4) for rank in range(4)]
    (problem,) = (problem for each in found for problem in each)
    expected = "the damage is in no tensor" if place == "header" else f"tensor {place}"
    assert problem.where == str(path) and expected in str(problem.value)


@pytest.mark.parametrize("level", ["size", "digest"])
def test_a_file_of_the_right_size_that_is_nearly_all_hole_is_found_without_reading_it(
    checkpoint: Path, level: verify.Level, monkeypatch: Patch
) -> None:
    path = next((checkpoint / "model").glob("*.safetensors"))
    os.truncate(path, 0)
    os.truncate(path, SPARSE_FROM_BYTES + 1)
    manifest = Manifest.read(checkpoint)
    manifest.files[f"model/{path.name}"] = FileRecord(SPARSE_FROM_BYTES + 1, "xxh3_128:" + "0" * 32)  # type: ignore[index]
    monkeypatch.setattr(
        verify, "file_record", lambda *_: pytest.fail("a file that is nearly all hole was read")
    )
    (problem,) = verify.verify(checkpoint, manifest, level)
    assert "nearly all hole" in problem.what and problem.where == str(path)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: Patch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("automodel_ckpt"), "propagate", True)
    return caplog


def test_a_pointer_that_cannot_be_moved_is_a_warning(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "LATEST.txt").mkdir()
    recipe = tiny.recipe()
    tiny.train(recipe)
    tiny.save(tmp_path, recipe)
    assert "could not update LATEST and LOWEST_VAL" in warnings.text
    assert f"{tmp_path / 'LATEST.txt'}" in warnings.text and "EISDIR" in warnings.text


class Stubborn(tiny.Counter):
    def load_state_dict(self, state: dict[str, object]) -> None:
        raise KeyError("another")


def test_an_object_that_does_not_take_its_state_is_named(tmp_path: Path) -> None:
    recipe = tiny.recipe(count=tiny.Counter(3))
    tiny.train(recipe)
    tiny.save(tmp_path, recipe)
    with pytest.raises(
        CheckpointUnusable, match=r"'count' could not load the state that was saved[\s\S]*another"
    ):
        tiny.load(tmp_path, tiny.recipe(count=Stubborn()))


def test_a_file_that_was_cut_after_it_was_looked_at(tmp_path: Path) -> None:
    recipe = tiny.recipe()
    tiny.train(recipe)
    path = tiny.save(tmp_path, recipe).path
    for shard in (path / "model").glob("*.safetensors"):
        os.truncate(shard, 4100)
    with pytest.raises(CheckpointUnusable, match="a file is shorter than the manifest states"):
        tiny.load(tmp_path, tiny.recipe(), verify="none")


def shard(info: object, dtype: str = "F32") -> dict[str, bytes]:
    text = info if isinstance(info, str) else json.dumps(info)
    header, _ = build_header([("w", dtype, [1])], {"format": "pt", "DCP_SHARDING_INFO": text})
    return {"shard-00001-model-00001-of-00001.safetensors": header + bytes(nbytes_of(dtype, [1]))}


def second(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name.replace("shard-00001", "shard-00002"): data for name, data in files.items()}


def at(offset: int, shape: int) -> dict[str, object]:
    return {"w": {"saved_offsets": [offset], "global_shape": [shape]}}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (shard("{"), "DCP_SHARDING_INFO is not a JSON mapping"),
        (shard([]), "the header does not state where its slice"),
        (shard({"w": {}}), "the header does not state where its slice of 'w' belongs"),
        (shard(at(0, 2)) | second(shard(at(1, 3))), "shards disagree on the shape of 'w'"),
        (
            shard(at(0, 2)) | second(shard(at(1, 2), "I32")),
            "shards disagree on the dtype or rank of 'w'",
        ),
    ],
)
def test_bare_shards_that_contradict_themselves(
    tmp_path: Path, files: dict[str, bytes], said: str
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointUnusable, match=said):
        open_source(tmp_path)


def test_shards_in_no_place_to_export_from(tmp_path: Path, checkpoint: Path) -> None:
    unfinished = tmp_path / layout.staging_name("epoch_0_step_40", "0" * 32)
    unfinished.mkdir()
    with pytest.raises(CheckpointUnusable, match="this checkpoint was never finished"):
        open_source(unfinished)
    (checkpoint / "link").symlink_to(checkpoint / "model")
    with pytest.raises(CheckpointUnusable, match="a checkpoint contains a symbolic link"):
        open_source(checkpoint / "link")
    odd = tmp_path / "odd"
    odd.mkdir()
    os.mkfifo(odd / "a.safetensors")
    with pytest.raises(CheckpointUnusable, match="a file of the model is not a regular file"):
        open_source(odd)


def index_with(directory: Path, content: Any) -> Path:
    path = directory / "model.safetensors.index.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the index of the weights cannot be read"),
        ("[" * 100_000, "the index of the weights cannot be read"),
        ([1], "no weight_map of file names"),
        ({}, "no weight_map of file names"),
        ({"weight_map": ["a"]}, "no weight_map of file names"),
        ({"weight_map": {"a": 1}}, "outside of its directory"),
        ({"weight_map": {"a": "../x.safetensors"}}, "outside of its directory"),
        ({"weight_map": {"a": "/x.safetensors"}}, "outside of its directory"),
        ({"weight_map": {"a": "inner/x.safetensors"}}, "outside of its directory"),
        ({"weight_map": {"a": "x\0.safetensors"}}, "outside of its directory"),
        ({"weight_map": {"a": ""}}, "outside of its directory"),
    ],
)
@pytest.mark.parametrize("kind", [CheckpointUnusable, RecipeError])
def test_an_invalid_index_is_an_error_of_the_requested_kind(
    tmp_path: Path, content: Any, message: str, kind: type[AutomodelError]
) -> None:
    index = index_with(tmp_path, content)
    with pytest.raises(kind) as caught:
        read_weight_map(index, kind=kind)
    assert message in str(caught.value) and str(index) in str(caught.value)
