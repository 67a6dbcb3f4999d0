"""Damage in an export is found by whatever reads it, before a value of it is used."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.export.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.layout import RankLayout
from automodel_ckpt.checkpoint.files.safetensors_header import read_header
from automodel_ckpt.checkpoint.tensors.box_reader import whole_checked
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.convert.merging.merged_model import base_tensors
from automodel_ckpt.convert.open import open_source, open_weights
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.training.model.pretrained_files import verify_base, verify_side_files
from tests.support.models.shards import bits, cut, write_checkpoint

Capture = pytest.CaptureFixture[str]
TENSORS = {
    "a": torch.arange(40, dtype=torch.float32).reshape(5, 8),
    "b": torch.arange(24, dtype=torch.bfloat16).reshape(1, 24),
    "n": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of three ranks whose export consists of tensors of several byte ranges."""
    path = tmp_path / "run" / "epoch_0_step_20"
    pieces = [*cut("a", TENSORS["a"], 3), *cut("b", TENSORS["b"], 3, dim=1)]
    pieces += [piece for name in ("n", "empty") for piece in cut(name, TENSORS[name], 1)]
    write_checkpoint(path, TENSORS, pieces, step=20)
    consolidate(path)
    return path


@pytest.fixture
def export(checkpoint: Path) -> Path:
    return checkpoint / "model" / layout.CONSOLIDATED


def weights_of(export: Path) -> Path:
    return next(export.glob("*.safetensors"))


def damage(export: Path, tensor: str) -> None:
    """Flip a bit in the last element of a tensor."""
    path = weights_of(export)
    at = read_header(path).tensors[tensor].end - 1
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_an_intact_export_has_the_digests_of_all_tensors(export: Path) -> None:
    source = open_source(export)
    assert len(source.tensors["a"].slices) == 3 and source.has_digests and source.notes == ()
    for name, tensor in TENSORS.items():
        assert all(
            piece.digest is not None for piece in source.tensors[name].slices if piece.nbytes
        )
        stored = whole_checked(source.root, source.tensors[name])
        assert stored.tobytes() == bits(tensor).tobytes()


def test_verify_reports_each_export_in_a_row_of_its_own(
    checkpoint: Path, export: Path, capsys: Capture
) -> None:
    for path in (checkpoint, checkpoint.parent):
        assert main(["verify", str(path)]) == 0
        assert f"{checkpoint}: ok\n{export}: ok\n" == capsys.readouterr().out
    damage(export, "a")
    for path in (checkpoint, checkpoint.parent):
        assert main(["verify", str(path), "--json"]) == 3
        rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
        assert rows[str(checkpoint)]["ok"] and not rows[str(export)]["ok"]
        assert "digest differs" in rows[str(export)]["problems"][0]["value"]
    assert main(["ls", str(checkpoint.parent), "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)[0]["damaged"]


def test_statistics_of_a_damaged_tensor_are_not_printed(
    checkpoint: Path, export: Path, capsys: Capture
) -> None:
    damage(export, "b")
    assert main(["show", str(export)]) == 0
    capsys.readouterr()
    assert main(["show", str(export), "--stats", "--json"]) == 3
    said = capsys.readouterr()
    tensors = json.loads(said.out)["trees"]["."]["tensors"]
    assert "statistics" not in tensors["b"] and tensors["a"]["statistics"]["max"] == 39
    assert "'b' is damaged" in said.err and "'a'" not in said.err
    shard = next((checkpoint / "model").glob("shard-00002*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["show", str(checkpoint), "--stats"]) == 3
    said = capsys.readouterr()
    assert " damaged" in said.out and "is damaged: its digest differs" in said.err


def test_diff_does_not_compare_a_damaged_tensor(
    export: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = shutil.copytree(export, tmp_path / "other")
    (other / layout.EXPORT_MANIFEST).unlink()
    assert main(["diff", str(export), str(other)]) == 0
    capsys.readouterr()
    damage(export, "a")
    assert main(["diff", str(export), str(other), "--json"]) == 3
    said = capsys.readouterr()
    model = json.loads(said.out)["trees"]["model"]
    assert [*model["damaged"]] == ["a"] and model["changed"] == [] and "'a' is damaged" in said.err
    assert main(["diff", str(other), str(export)]) == 3
    assert "1 damaged, not compared: a" in capsys.readouterr().out


def test_import_takes_no_damaged_values(export: Path, tmp_path: Path, capsys: Capture) -> None:
    moved = shutil.copytree(export, tmp_path / "moved")
    assert main(["import", str(moved), str(tmp_path / "intact")]) == 0
    assert "digests verified" in capsys.readouterr().out
    damage(moved, "b")
    assert main(["import", str(moved), str(tmp_path / "run2")]) == 3
    assert "'b' is damaged" in capsys.readouterr().err and not [*(tmp_path / "run2").glob("*step*")]


def test_weights_to_start_from_are_compared_by_all_ranks_together(export: Path) -> None:
    open_weights(export).verify("digest", 0, 1)
    damage(export, "a")
    found = []
    for rank in range(2):
        try:
            open_weights(export).verify("digest", rank, 2)
        except CheckpointUnusable as error:
            found += error.problems
    assert len(found) == 1 and "digest differs" in str(found[0].value)


class OneRank(RankLayout):
    rank, world_size, dp_rank, dp_size = 0, 1, 0, 1  # type: ignore[assignment]


def test_a_damaged_base_model_is_not_trained_on(export: Path) -> None:
    verify_base(str(export), "digest", OneRank(), None)
    damage(export, "n")
    with pytest.raises(CheckpointUnusable, match="digest does not match"):
        verify_base(str(export), "digest", OneRank(), None)


def test_a_damaged_tokenizer_of_an_export_is_not_read(export: Path) -> None:
    verify_side_files(str(export), "digest")
    verify_side_files("no/such/model", "digest")
    damage(export, "a")  # which is not read here
    verify_side_files(str(export), "digest")
    change_index(export)
    with pytest.raises(CheckpointUnusable, match="digest does not match"):
        verify_side_files(str(export), "digest")


def test_a_damaged_base_is_not_merged(export: Path) -> None:
    damage(export, "a")
    tensors, _ = base_tensors(export)
    assert whole_checked(Path("/"), tensors["b"]).tobytes() == bits(TENSORS["b"]).tobytes()
    with pytest.raises(CheckpointUnusable, match="'a' is damaged"):
        whole_checked(Path("/"), tensors["a"])


def rename_tensor(export: Path) -> None:
    path = weights_of(export)
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"z"', 1))


def truncate(export: Path) -> None:
    path = weights_of(export)
    path.write_bytes(path.read_bytes()[:-1])


def change_index(export: Path) -> None:
    path = export / layout.HF_INDEX
    path.write_text(path.read_text().replace("total_size", "total_tize"))


def change_ranges(export: Path) -> None:
    """List byte ranges of the right total that do not end where tensors do."""
    path = export / layout.EXPORT_MANIFEST
    document = json.loads(path.read_text())
    parts = document["files"][weights_of(export).name]["parts"]
    parts[-1][0] -= 1
    parts[-2][0] += 1
    path.write_text(json.dumps(document))


def drop_from_manifest(export: Path) -> None:
    path = export / layout.EXPORT_MANIFEST
    document = json.loads(path.read_text())
    del document["files"][weights_of(export).name]
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change", [rename_tensor, truncate, change_index, change_ranges, drop_from_manifest]
)
def test_files_that_do_not_fit_the_manifest_are_not_opened(
    export: Path, change: Callable[[Path], Any]
) -> None:
    change(export)
    for open_it in (open_source, open_weights):
        with pytest.raises(CheckpointUnusable) as raised:
            open_it(export)
        assert "export" in str(raised.value)


def test_a_manifest_behind_a_link_is_read_only_where_links_are_followed(tmp_path: Path) -> None:
    content = tmp_path / "blob"
    content.write_text('{"files": {"config.json": {"size": 2, "digest": "x"}}}')
    directory = tmp_path / "export"
    directory.mkdir()
    (directory / layout.EXPORT_MANIFEST).symlink_to(content)
    with pytest.raises(CheckpointUnusable):
        ExportManifest.read(directory)
    followed = ExportManifest.read(directory, follow_links=True)
    assert list(followed.files) == ["config.json"] and followed.follow_links
    assert not ExportManifest(directory, {}).follow_links


@pytest.mark.parametrize(
    "entry",
    [
        {"size": 5, "parts": [[3, "a"], [1, "b"]]},
        {"size": 1, "parts": [[3, "a"], [-2, "b"]]},
        {"size": 1},
        {"digest": "a"},
    ],
)
def test_an_entry_whose_byte_ranges_do_not_make_up_the_file_is_rejected(
    tmp_path: Path, entry: dict[str, Any]
) -> None:
    (tmp_path / layout.EXPORT_MANIFEST).write_text(json.dumps({"files": {"w": entry}}))
    with pytest.raises(CheckpointUnusable):
        ExportManifest.read(tmp_path)
