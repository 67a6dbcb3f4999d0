"""The bytes of a tensor on a device reach a file through two small buffers, unchanged."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from automodel_ckpt.checkpoint.files.durable_file import begins_at_a_sector
from automodel_ckpt.checkpoint.jobs import described_tree
from automodel_ckpt.checkpoint.jobs.jobs import (
    RankManifest,
    SharedFile,
    merge_tree,
    run_all,
)
from automodel_ckpt.checkpoint.parts.manifest import Tree
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor
from automodel_ckpt.checkpoint.state.storable import blocks_of
from automodel_ckpt.checkpoint.tensors.box_reader import whole_checked


def content(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.mark.parametrize("start", [0, 1, 64, 448, 512, 4032])
def test_no_block_is_aligned_for_o_direct_wherever_its_memory_begins(start: int) -> None:
    def allocate(size: int) -> torch.Tensor:
        memory = torch.empty(size + 3 * 4096, dtype=torch.uint8)
        first = -memory.data_ptr() % 4096 + start
        return memory[first : first + size]

    for block in blocks_of(content(250), block_bytes=100, allocate=allocate):
        assert not begins_at_a_sector(block), "O_DIRECT would write it after it was overwritten"


def test_a_file_with_several_names_is_never_opened_for_writing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"shared")
    os.link(tmp_path / "a", tmp_path / "b")
    with pytest.raises(OSError, match="several names"):
        SharedFile(tmp_path / "b", nbytes=3)
    assert (tmp_path / "a").read_bytes() == b"shared"


KEY = ("optimizer", "state", "model.w", "exp_avg")
NAME = "optimizer.state.model.w.exp_avg"


def in_two_slices(directory: Path, shape: tuple[int, ...]) -> tuple[Tensor, np.ndarray]:
    """A tensor whose first three rows are in one file and the others, with a gap before them, in another."""
    values = np.arange(np.prod(shape), dtype="<f4").reshape(shape)
    (directory / "a").write_bytes(values[:3].tobytes())
    (directory / "b").write_bytes(b"gap!" + values[3:].tobytes())
    zeros = (0,) * (len(shape) - 1)
    first = Slice(NAME, "F32", (0, *zeros), (3, *shape[1:]), "a", 0, values[:3].nbytes)
    rest = Slice(NAME, "F32", (3, *zeros), (shape[0] - 3, *shape[1:]), "b", 4, values[3:].nbytes)
    return Tensor(NAME, "F32", shape, (first, rest)), values


@pytest.mark.parametrize("shape", [(7, 5), (11,), (5, 2, 3)])
def test_a_tensor_in_several_slices_is_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor, values = in_two_slices(tmp_path, shape)
    described = described_tree.DescribedTree(
        "optimizer",
        "optim",
        root=tmp_path,
        stored={KEY: tensor},
        numbers={("optimizer", "state", "model.w", "step"): 7.0},
        objects={("optimizer", "param_groups", 0, "lr"): 0.5},
    )
    target = tmp_path / "checkpoint"
    target.mkdir()
    written = RankManifest(0)
    run_all(described.jobs(), target, written)
    tree = merge_tree("optimizer", Tree("torch_save", {}, {}), [written])
    assert (whole_checked(target, tree.tensors[NAME]) == values).all()
    # torch's own reader finds it, too.
    step_name = "optimizer.state.model.w.step"
    lr_name = "optimizer.param_groups.0.lr"
    state = {NAME: torch.zeros(shape), step_name: torch.zeros(()), lr_name: None}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=target / "optim", no_dist=True)
    assert (state[NAME].numpy() == values).all() and state[step_name].item() == 7.0
    assert state[lr_name] == 0.5
