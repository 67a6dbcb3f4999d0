"""The data files that are checked before torch is imported."""

from __future__ import annotations

from pathlib import Path

from automodel_ckpt.cli.checks.data_files import missing_data_files
from automodel_ckpt.config.tree.yaml_tree import Node


def problems(target: str, path: str) -> list[str]:
    section = {"_target_": Node(target, "recipe.yaml:1"), "path": Node(path, "recipe.yaml:2")}
    root = Node({"dataset": Node(dict(section), "recipe.yaml:1")}, "recipe.yaml:1")
    return [problem.what for problem in missing_data_files(root)]


def test_a_file_of_rows_has_to_exist_and_the_prefix_of_megatrons_files_is_no_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "web.idx").touch()
    (tmp_path / "web.bin").touch()
    (missing,) = problems("automodel_ckpt.data.text.text", str(tmp_path / "rows.jsonl"))
    assert "cannot be read" in missing
    for name in ("web", "we*"):
        assert problems("automodel_ckpt.data.token_files.megatron", str(tmp_path / name)) == []
