"""Loading from an object store on real ranks whose disk lacks the space for the checkpoint."""

import os
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from werkzeug.wrappers import Request

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, Manifest, discover
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import CheckpointUnusable
from tests.support import ranks
from tests.support.servers.object_store import ObjectStore, object_store

URL = "s3://bucket/run"
STEP, NAME = 20, "epoch_0_step_20"
ROWS, COLUMNS = 640, 256


def sharded(seed: int) -> SimpleNamespace:
    """A model whose weights two ranks share, and an optimizer with state."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS), torch.nn.Linear(ROWS, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, COLUMNS)).square().mean().backward()
    optimizer.step()
    return SimpleNamespace(model=model, optimizer=optimizer)


def values(made: SimpleNamespace) -> list[torch.Tensor]:
    """This rank's part of the weights and of the optimizer's state."""
    found = list(made.model.state_dict().values())
    for state in made.optimizer.state.values():
        found += [state["exp_avg"], state["exp_avg_sq"], state["step"]]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def save(root: Path) -> list[torch.Tensor]:
    made = sharded(0)
    checkpointer = Checkpointer(root)
    checkpointer.save(discover(made), step=STEP, epoch=0)
    checkpointer.close()
    return values(made)


def load(root: Path) -> list[torch.Tensor]:
    """Load from the store; the disk seems to be full."""
    os.environ["AWS_SDK_UA_APP_ID"] = f"rank{dist.get_rank()}"
    made = sharded(1)
    checkpointer = Checkpointer(URL, options=CheckpointOptions(scratch_dir=str(root)))
    checkpointer.open()

    def check_disk(path: Path, manifest: Manifest) -> None:
        on_disk = sum(each.stat().st_size for each in root.rglob("*") if each.is_file())
        assert on_disk < manifest.nbytes / 10

    with pytest.MonkeyPatch.context() as patch:
        full = SimpleNamespace(total=1 << 30, used=1 << 30, free=0)
        patch.setattr(shutil, "disk_usage", lambda path: full)
        resumed = checkpointer.load(discover(made), before_loading=check_disk)
    checkpointer.transfers.finish()
    checkpointer.close()
    assert resumed is not None and resumed.step == STEP
    assert not [*root.glob("*/.fetched")]
    return values(made)


def test_each_rank_reads_its_slices_and_verifies_them(tmp_path: Path) -> None:
    saved = ranks.run(save, 2, tmp_path / "local")
    with object_store() as store:
        assert main(["push", str(tmp_path / "local" / NAME), URL]) == 0
        counted = count_ranges(store)
        loaded = ranks.run(load, 2, tmp_path / "empty")
        for rank in range(2):
            for one, other in zip(loaded[rank], saved[rank], strict=True):
                assert torch.equal(one, other)
        manifest = Manifest.read(tmp_path / "local" / NAME)
        tensors = [tensor for tree in manifest.trees.values() for tensor in tree.tensors.values()]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        assert nbytes > 1_900_000
        for rank in ("rank0", "rank1"):
            # Its half, small values that both ranks need, and what is between neighbors.
            assert nbytes / 2 <= counted[rank] <= 1.1 * nbytes / 2
        damage(manifest)
        for outcome in ranks.outcomes(load, 2, tmp_path / "other"):
            assert isinstance(outcome.error, CheckpointUnusable)
            assert "digest differs" in str(outcome.error)


def count_ranges(store: ObjectStore) -> dict[str, int]:
    """Count the bytes of the byte ranges that each rank requests from here on."""
    counted: dict[str, int] = defaultdict(int)

    def note(request: Request) -> None:
        agent = request.headers.get("User-Agent", "")
        span = request.headers.get("Range", "")
        if span and "app/rank" in agent:
            first, _, last = span.removeprefix("bytes=").partition("-")
            counted[agent.rpartition("app/")[2].split()[0]] += int(last) - int(first) + 1

    store.fault = note
    return counted


def damage(manifest: Manifest) -> None:
    """Change one byte of the first weight in the store; the object's size stays."""
    piece = manifest.trees["model"].tensors["0.weight"].slices[0]
    file = f"{URL}/{NAME}/{piece.file}"
    with fsspec.open(file, "rb") as stored:
        content = bytearray(stored.read())
    content[piece.start] ^= 1
    with fsspec.open(file, "wb") as stored:
        stored.write(content)
