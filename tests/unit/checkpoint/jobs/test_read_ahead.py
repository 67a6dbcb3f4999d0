"""Several threads read blocks of files: into little memory, which is not overwritten before it was copied."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from automodel_ckpt.checkpoint.formats import read_ahead
from automodel_ckpt.checkpoint.formats.reading import read_tree
from automodel_ckpt.checkpoint.parts.manifest import Tree
from automodel_ckpt.convert.open import open_weights
from automodel_ckpt.errors import CheckpointUnusable


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of 3 MB, which are read by threads."""
    monkeypatch.setattr(read_ahead, "_PARALLEL_FROM_BYTES", 1)
    for name in "ab":
        save_file({name: torch.randn(750, 1000)}, tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("damaged", "error"), [("truncated", CheckpointUnusable), ("missing", OSError)]
)
def test_an_error_of_a_thread_names_the_first_file_and_leaves_none_open(
    stored: Path, damaged: str, error: type[Exception]
) -> None:
    source = open_weights(stored).modules["model"]
    tree = Tree("", dict(source.tensors), {})
    for name in "ab":
        if damaged == "missing":
            (stored / f"{name}.safetensors").unlink()
        else:
            os.truncate(stored / f"{name}.safetensors", 2 << 20)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=r"a\.safetensors"):
        read_tree(source.root, tree, {name: torch.empty(750, 1000) for name in "ab"})
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_strided_tensor_of_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"transposed": torch.randn(100, 200).t()}, path)
    source = open_weights(tmp_path).modules["model"]
    os.truncate(path, 40_000)
    with pytest.raises(CheckpointUnusable, match=r"pytorch_model\.bin"):
        read_tree(
            source.root, Tree("", dict(source.tensors), {}), {"transposed": torch.empty(200, 100)}
        )
