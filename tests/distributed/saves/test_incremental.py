"""Incremental saves by two ranks: shared files, also where only one rank's part of a frozen tensor has changed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from automodel_ckpt.checkpoint import Manifest, discover
from tests.support import ranks
from tests.support.checkpoints import is_intact
from tests.support.models import tiny


class Net(torch.nn.Module):
    """A trained and two frozen parameters: one is sharded by rows, one by columns, so that its slices interleave."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))

        def sharded(rows: int, dim: int) -> torch.Tensor:
            value = torch.arange(4.0 * rows).reshape(rows, 4)
            return distribute_tensor(value, mesh, [Shard(dim)])

        self.trained = torch.nn.Parameter(sharded(5, 0))
        self.rows = torch.nn.Parameter(sharded(7, 0), requires_grad=False)
        self.columns = torch.nn.Parameter(sharded(3, 1), requires_grad=False)


def local(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter.data, DTensor)
    return parameter.data.to_local()


def saved(root: Path, options: dict[str, Any]) -> None:
    """Save steps 1 to 5. All parameters of rank 1 change before step 3, those of rank 0 before step 4."""
    made = SimpleNamespace(model=Net())
    saver = tiny.checkpointer(root, incremental=True, **options)
    for step in range(1, 6):
        local(made.model.trained).add_(1)
        if (step, dist.get_rank()) in ((3, 1), (4, 0)):
            local(made.model.rows).add_(1)
            local(made.model.columns).add_(1)
        saver.save(discover(made), step=step, epoch=0)
        saver.wait_for_save()
    saver.close()


def loaded(root: Path, step: int) -> dict[str, torch.Tensor]:
    made = SimpleNamespace(model=Net())
    assert tiny.load(root, made, restore_from=f"epoch_0_step_{step}") is not None
    return {name: value.full_tensor() for name, value in made.model.state_dict().items()}


@pytest.mark.parametrize(
    "is_async", [False, pytest.param(True, marks=pytest.mark.further)], ids=["sync", "async"]
)
def test_ranks_share_what_none_of_them_changed_and_write_the_rest(
    tmp_path: Path, is_async: bool
) -> None:
    ranks.run(saved, 2, tmp_path, {"is_async": is_async})
    inodes: dict[int, set[int]] = {}
    for step in range(1, 6):
        path = tmp_path / f"epoch_0_step_{step}"
        manifest = Manifest.read(path)
        assert is_intact(path, deep=True)
        files = set()
        for name in ("rows", "columns"):
            tensor = manifest.trees["model"].tensors[name]
            files |= {(path / piece.file).stat().st_ino for piece in tensor.slices}
        inodes[step] = files
    assert all(len(files) == 2 for files in inodes.values())
    assert inodes[1] == inodes[2] and inodes[4] == inodes[5]
    # Of the rank that did not change, the shard is still shared.
    assert len(inodes[2] & inodes[3]) == len(inodes[3] & inodes[4]) == 1
    for size, step in ((2, 3), (1, 5)):
        found = ranks.run(loaded, size, tmp_path, step)[0]
        expected_rows = torch.arange(28.0).reshape(7, 4)
        expected_columns = torch.arange(12.0).reshape(3, 4)
        expected_rows[4:] += 1
        expected_columns[:, 2:] += 1
        if step == 5:
            expected_rows[:4] += 1
            expected_columns[:, :2] += 1
        assert torch.equal(found["rows"], expected_rows)
        assert torch.equal(found["columns"], expected_columns)
