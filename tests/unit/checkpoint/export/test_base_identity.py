"""A base model is known by its bytes, read once."""

import json
import os
import shutil
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.export.base_identity import (
    find_base,
    identify_base,
    read_peft_record,
)
from automodel_ckpt.errors import CheckpointUnusable, RecipeError


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "models" / "base"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(1000))
    (directory / "README.md").write_text("no part of the model")
    return directory


def test_a_copy_is_the_same_base_and_one_other_byte_makes_another(
    base: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "first"
    found = identify_base(str(base), base, run=run)
    assert (found.name, found.relative) == (str(base), "../../models/base")
    copy = shutil.copytree(base, tmp_path / "copy")
    (copy / "README.md").unlink()
    assert identify_base(str(copy), copy, run=run).digest == found.digest
    (copy / "model.safetensors").write_bytes(bytes(999) + b"\1")
    assert identify_base(str(copy), copy, run=run).digest != found.digest


def test_the_files_of_an_index_and_links_to_them_are_read(base: Path, tmp_path: Path) -> None:
    (base / "model.safetensors").rename(tmp_path / "blob")
    (base / "part.safetensors").symlink_to(tmp_path / "blob")
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "part.safetensors"}})
    )
    files = identify_base("org/name", base, run=tmp_path).files
    assert files.keys() == {"config.json", "model.safetensors.index.json", "part.safetensors"}


def test_a_digest_is_kept_until_the_file_changes(base: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = identify_base(str(base), base, run=tmp_path, cache=cache)
    (kept,) = (cache / "base-digests").iterdir()
    note = kept.read_text()
    kept.write_text(note.replace("xxh3_128:", "xxh3_128:0"))
    assert identify_base(str(base), base, run=tmp_path, cache=cache).digest != first.digest
    kept.write_text(note)
    assert identify_base(str(base), base, run=tmp_path, cache=cache).digest == first.digest
    weights = base / "model.safetensors"
    status = weights.stat()
    weights.write_bytes(bytes(999) + b"\1")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = identify_base(str(base), base, run=tmp_path, cache=cache)
    assert changed.digest != first.digest
    kept.write_text("nonsense")
    assert identify_base(str(base), base, run=tmp_path, cache=cache).digest == changed.digest


def test_a_base_without_weights_or_that_cannot_be_read_is_refused(
    base: Path, tmp_path: Path
) -> None:
    (base / "config.json").unlink()
    with pytest.raises(RecipeError, match=r"cannot be read"):
        identify_base(str(base), base, run=tmp_path)
    (base / "model.safetensors").unlink()
    with pytest.raises(RecipeError, match="no weights"):
        identify_base(str(base), base, run=tmp_path)


def test_a_base_that_moved_with_its_run_is_found_and_one_that_is_gone_is_not(
    base: Path, tmp_path: Path
) -> None:
    record = {"base": identify_base(str(base), base, run=tmp_path / "run").to_dict()}
    assert find_base(record, tmp_path / "elsewhere" / "run") == str(base)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "models").rename(tmp_path / "elsewhere" / "models")
    moved = find_base(record, tmp_path / "elsewhere" / "run")
    assert moved == str(tmp_path / "elsewhere" / "models" / "base")
    shutil.rmtree(moved)
    with pytest.raises(CheckpointUnusable, match="not where it was"):
        find_base(record, tmp_path / "elsewhere" / "run")
    assert (
        find_base({"base": {"name": "org/name", "relative_to_run": None}}, tmp_path) == "org/name"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "holds no adapters"),
        ('{"format_version": 1, "base": {}}', "it lacks base or adapter"),
        ('{"base": {}, "adapter": {}, "format_version": 9}', "its format_version is not 1"),
        (
            '{"format_version": 1, "base": {"name": "a\\u0000b"}, "adapter": {}}',
            "it does not state where the base is",
        ),
    ],
)
def test_a_description_that_is_missing_or_odd_is_refused(
    tmp_path: Path, text: str | None, said: str
) -> None:
    (tmp_path / "model").mkdir()
    if text is not None:
        (tmp_path / "model" / "automodel_peft_config.json").write_text(text)
    with pytest.raises(CheckpointUnusable) as caught:
        read_peft_record(tmp_path, "model")
    assert said in str(caught.value)
