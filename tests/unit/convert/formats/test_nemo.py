"""Models of NeMo are read in place, unpacked and packed. The files in tests/fixtures/nemo were written by NeMo 3.0.

``state.safetensors`` there is the model's state dict. Other archives are made here.
"""

import io
import json
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.cli import ckpt
from tests.support.external_tensors import error_of, values

FIXTURES = Path(__file__).parents[3] / "fixtures" / "nemo"
EXPECTED = load_file(FIXTURES / "state.safetensors")


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# ---------------------------------------------------------------- files of NeMo


@pytest.mark.parametrize("name", ["model.nemo", "unpacked", "gzip.nemo"])
def test_the_tensors_of_a_model_of_nemo_are_read(name: str) -> None:
    assert_equal(values(FIXTURES / name), EXPECTED)


def test_a_damaged_compressed_nemo_file_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    content = (FIXTURES / "gzip.nemo").read_bytes()
    path = tmp_path / "model.nemo"
    path.write_bytes(content[:-40])
    assert "tar archive cannot be read" in error_of(path)
    path.write_bytes(content[:-100] + bytes(100))
    assert "tar archive cannot be read" in error_of(path)
    assert not list((tmp_path / "temporary").rglob("archive.tar"))


def test_a_compressed_nemo_file_can_be_unpacked(tmp_path: Path) -> None:
    assert ckpt.main(["unpack", str(FIXTURES / "gzip.nemo"), str(tmp_path / "model")]) == 0
    assert_equal(values(tmp_path / "model"), EXPECTED)


@pytest.mark.parametrize("name", ["model.nemo", "unpacked", "gzip.nemo"])
def test_show_prints_the_config(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt.main(["show", str(FIXTURES / name), "--json"]) == 0
    details = json.loads(capsys.readouterr().out)["trees"]["."]["details"]
    assert "width: 4" in details["model_config.yaml"]
    assert "_vocabulary.txt" in "".join(details["model_config.yaml"])


def test_import_lists_the_artifacts_that_it_does_not_transfer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run = str(FIXTURES / "model.nemo"), tmp_path / "run"
    assert ckpt.main(["import", source, str(run)]) == 0
    assert "artifacts of NeMo" in capsys.readouterr().out
    assert_equal(values(run / "epoch_0_step_0"), EXPECTED)


# ---------------------------------------------------------------- unpack and pack


def test_an_unpacked_model_can_be_edited_and_packed_again(tmp_path: Path) -> None:
    directory, packed = tmp_path / "model", tmp_path / "edited.nemo"
    assert ckpt.main(["unpack", str(FIXTURES / "model.nemo"), str(directory)]) == 0
    config = directory / "model_config.yaml"
    config.write_text(config.read_text().replace("width: 4", "width: 5"))
    assert ckpt.main(["pack", str(directory), str(packed)]) == 0
    assert_equal(values(packed), EXPECTED)
    # NeMo reads archives with Python's tarfile.
    with tarfile.open(packed, "r:") as archive:
        names = archive.getnames()
        content = archive.extractfile("./model_config.yaml")
        assert content is not None and b"width: 5" in content.read()
    assert names[:2] == [".", "./model_config.yaml"]


def test_packing_the_same_files_gives_the_same_bytes(tmp_path: Path) -> None:
    copies = [tmp_path / "a", tmp_path / "b"]
    for number, copy in enumerate(copies):
        shutil.copytree(FIXTURES / "unpacked", copy)
        os.utime(copy / "model_config.yaml", (number, number))
        os.chmod(copy / "model_config.yaml", 0o600 + number)
        assert ckpt.main(["pack", str(copy), f"{copy}.nemo"]) == 0
    assert (tmp_path / "a.nemo").read_bytes() == (tmp_path / "b.nemo").read_bytes()


@pytest.mark.parametrize("name", ["extra", "directory"])
def test_pack_rejects_links(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path(shutil.copytree(FIXTURES / "unpacked", tmp_path / "model"))
    (directory / name).symlink_to("/etc/passwd" if name == "extra" else "/etc")
    assert ckpt.main(["pack", str(directory), str(tmp_path / "model.nemo")]) == 3
    assert os.listdir(tmp_path) == ["model"]
    message = capsys.readouterr().err
    assert "a symbolic link to /etc" in message and "replace it by a copy" in message


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["pack", "model", "model/new.nemo"], 2, "would be in the directory that it packs"),
        (["pack", "model", "there"], 4, "choose another output path, or add --force"),
        (["pack", "there", "new.nemo"], 3, "`ckpt unpack` unpacks an archive"),
        (["pack", "nowhere", "new.nemo"], 3, "name a directory that `ckpt unpack` wrote"),
        (["unpack", "model", "new"], 3, "`ckpt pack` packs a directory"),
        (["unpack", "nowhere", "new"], 3, "name a .nemo or .qnemo file"),
    ],
)
def test_pack_and_unpack_state_what_to_name_instead(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    hint: str,
) -> None:
    shutil.copytree(FIXTURES / "unpacked", tmp_path / "model")
    (tmp_path / "there").touch()
    monkeypatch.chdir(tmp_path)
    assert ckpt.main(words) == code
    assert hint in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["model", "there"]


def test_unpack_needs_an_empty_directory_and_a_known_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert ckpt.main(["unpack", str(FIXTURES / "model.nemo"), str(tmp_path / "full")]) == 4
    (tmp_path / "other.tar").write_bytes(tar_of({"readme.txt": b"x"}))
    assert ckpt.main(["unpack", str(tmp_path / "other.tar"), str(tmp_path / "new")]) == 3
    assert "readme.txt" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["full", "other.tar"]


# ---------------------------------------------------------------- several ranks


def test_a_file_for_each_rank_is_an_error_that_names_nemos_script(tmp_path: Path) -> None:
    ranks = [f"tp_rank_{rank:02d}_pp_rank_000" for rank in range(2)]
    files = {f"./{rank}/model_weights.ckpt": saved({"w": torch.ones(1)}) for rank in ranks}
    path = tmp_path / "model.nemo"
    path.write_bytes(tar_of({"./model_config.yaml": b"mcore_gpt: true\n", **files}))
    assert "megatron_change_num_partitions.py" in error_of(path)
    assert ckpt.main(["unpack", str(path), str(tmp_path / "model")]) == 0
    assert "megatron_change_num_partitions.py" in error_of(tmp_path / "model")


def distributed(config: bytes) -> dict[str, bytes]:
    """Return the members of a .nemo file with the distributed checkpoint of the megatron-core fixture."""
    checkpoint = next((FIXTURES.parent / "megatron" / "llama").glob("iter_*"))
    files = {"model_config.yaml": config}
    for path in sorted(checkpoint.iterdir()):
        files[f"model_weights/{path.name}"] = path.read_bytes()
    return files


def test_a_distributed_checkpoint_is_read_after_it_was_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "model.nemo"
    path.write_bytes(tar_of(distributed((FIXTURES / "distributed_config.yaml").read_bytes())))
    assert "ckpt unpack" in error_of(path)
    assert ckpt.main(["unpack", str(path), str(tmp_path / "model")]) == 0
    found = values(tmp_path / "model", FIXTURES.parent / "megatron" / "llama" / "expected")
    assert "model.layers.1.mlp.gate_proj.weight" in found


@pytest.mark.parametrize(
    "config",
    [b"a: &a [1]\nb: *a\n", b"[" * 100 + b"]" * 100, b"\xff", b"- 1\n", b"a: b: c\n"],
    ids=["reference", "deep", "not UTF-8", "list", "syntax"],
)
def test_a_damaged_config_is_an_error(config: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.nemo"
    path.write_bytes(tar_of({"model_config.yaml": config, "model_weights.ckpt": saved({})}))
    assert "config" in error_of(path)


def test_export_reads_a_nemo_file(tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert ckpt.main(["export", str(FIXTURES / "model.nemo"), "-o", str(output)]) == 0
    assert_equal(values(output), EXPECTED)
