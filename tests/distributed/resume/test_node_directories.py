"""Runs in an object store on nodes that share no storage: what a start finds after the loss of nodes and processes.

Four ranks on two nodes. Each node has its own directory at the same path (``tests/support/servers/node_memory.py``).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from automodel_ckpt.base.store_url import scratch_directory
from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, node_directories
from automodel_ckpt.checkpoint.files.layout import DataParallelRanks
from automodel_ckpt.checkpoint.jobs import rank_manifest
from automodel_ckpt.checkpoint.options import RemoteStorage
from automodel_ckpt.checkpoint.remote.pull import pull_checkpoint
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.run.generation import RunGeneration
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.checkpoint.run.transfer_files import DIRECTORY
from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.errors import RecipeError
from tests.support import ranks
from tests.support.models.sharded import ShardedTraining
from tests.support.servers.node_memory import can_enter, enter_node, make_nodes, memory_of_node

pytestmark = pytest.mark.skipif(not can_enter(), reason="mount namespaces need root")

TIMEOUT = 170


def url_of(base: Path) -> str:
    return f"file://{base}/store"


def directory_of(base: Path, node: int) -> Path:
    """The run directory of a node, as this process sees it."""
    inside = scratch_directory(url_of(base), str(base / "shm"))
    return memory_of_node(base, node) / inside.name


class Run(ShardedTraining):
    """A sharded model that is trained and saved into the store after every step, by each rank."""

    def __init__(self, base: Path, node: int, **options: Any) -> None:
        shm = enter_node(base, node)
        world_size = dist.get_world_size()
        layout = DataParallelRanks(dist.get_rank(), world_size)
        super().__init__()
        chosen = CheckpointOptions(scratch_dir=str(shm), **options)
        self.checkpointer = Checkpointer(url_of(base), layout, dist.group.WORLD, chosen)
        self.checkpointer.open()
        self.resumed = self.checkpointer.load(self.state)
        self.step = 0 if self.resumed is None else self.resumed.step

    @property
    def log(self) -> Path:
        return self.checkpointer.directory / "training.jsonl"

    def logged(self) -> list[int]:
        """The steps in the log, which rank 0 writes."""
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []

    @property
    def origin(self) -> str:
        """Where the state came from: the nodes, the store, or nothing."""
        if self.resumed is None:
            return ""
        return "store" if self.resumed.path.parent.name == DIRECTORY else "nodes"

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.take_step()
            if dist.get_rank() == 0:
                with self.log.open("a") as log:
                    log.write(f"{self.step}\n")
            self.checkpointer.save(self.state, step=self.step, epoch=0)
        self.checkpointer.wait_for_save()

    def finish(self) -> None:
        self.checkpointer.transfers.finish()
        self.checkpointer.close()


def train(
    base: Path,
    nodes: list[int],
    steps: int,
    options: Mapping[str, Any],
    *,
    kills_uploads: bool = False,
    is_stopped: bool = False,
) -> dict[str, Any]:
    """Start on the node of each rank, train some steps, and end, as after a signal if it *is_stopped*.

    *kills_uploads*: kill the uploading process of other nodes than rank 0's.
    """
    run = Run(base, nodes[dist.get_rank()], **options)
    found = {"step": run.step, "origin": run.origin, "counter": run.counter.value}
    found["loaded"] = run.weights()
    if dist.get_rank() == 0:
        assert run.logged() == list(range(1, run.step + 1))
    run.train(steps)
    part_uploads = run.checkpointer.transfers._part_uploads
    if kills_uploads and part_uploads is not None:
        # The request for the files of this node has hardly been written: both processes look every half second.
        part_uploads._process.kill()
    if is_stopped:
        run.checkpointer.transfers.finish_before_stop(0.0, lambda: False)
        run.checkpointer.close()
    else:
        run.finish()
    return found | {"weights": run.weights()}


def clear(directory: Path) -> None:
    """Lose the disk of a node. It may be mounted."""
    for path in directory.iterdir():
        shutil.rmtree(path)


def names_on(base: Path, node: int) -> list[str]:
    return [str(name) for name in checkpoint_names(directory_of(base, node))]


def check_store(base: Path, step: int) -> None:
    """The newest checkpoint in the store is of *step*, and complete; nothing else is there of its upload."""
    run = RemoteRun(Store(url_of(base)))
    newest = run.newest()
    assert newest is not None and newest.name.step == step
    assert run.pointed("LATEST") == str(newest.name)
    target = base / f"pulled-{step}"
    target.mkdir()
    pull_checkpoint(run, str(newest.name), target)
    assert not list((base / "store").rglob(".parts"))


def between(change: Callable[[], object]) -> None:
    """Do something while no rank runs."""
    dist.barrier()
    if dist.get_rank() == 0:
        change()
    dist.barrier()


SYNCHRONOUS = {"keep_last": 2}
ASYNCHRONOUS = {"keep_last": 2, "is_async": True}


def lose_and_go_on(base: Path) -> list[dict[str, Any]]:
    """Train on two nodes, again after the loss of a disk, and again with the first rank on the other node."""
    with pytest.MonkeyPatch.context() as patch:
        # Slices in tables, as those of thousands of ranks.
        patch.setattr(rank_manifest, "MIN_TABLE_ROWS", 0)
        found = [train(base, [0, 1, 1], 3, SYNCHRONOUS)]

    def lose_disk() -> None:
        check_store(base, 3)
        assert names_on(base, 0) == names_on(base, 1) == ["epoch_0_step_3"]
        shards = [
            {path.name for path in directory_of(base, node).glob("*/model/*.safetensors")}
            for node in (0, 1)
        ]
        assert all(shards) and not shards[0] & shards[1]
        clear(memory_of_node(base, 0))

    between(lose_disk)
    found.append(train(base, [1, 0, 0], 1, ASYNCHRONOUS, kills_uploads=True))
    between(lambda: check_store(base, 4))
    found.append(train(base, [0, 1, 1], 1, ASYNCHRONOUS, is_stopped=True))
    between(lambda: check_store(base, 5))
    return found


def check(before: dict[str, Any], found: dict[str, Any], origin: str) -> None:
    """*found* continued from the end of the start *before*, bit for bit."""
    assert found["loaded"] == before["weights"]
    assert found["origin"] == origin and found["counter"] == found["step"]


def rejected(base: Path) -> list[str]:
    """Open runs that nodes without shared storage do not support; return the errors."""
    shm = enter_node(base, dist.get_rank())
    layout = DataParallelRanks(dist.get_rank(), 2)
    scratch = str(shm)
    runs: list[tuple[str, CheckpointOptions]] = [
        (url_of(base), CheckpointOptions(scratch_dir=scratch, model_layout="hf")),
        (url_of(base), CheckpointOptions(scratch_dir=scratch, incremental=True)),
        (url_of(base), CheckpointOptions(scratch_dir=scratch, on_incompatible="sibling")),
        (url_of(base), CheckpointOptions(scratch_dir=f"{scratch}/{dist.get_rank()}")),
        (f"{scratch}/local", CheckpointOptions(remote=RemoteStorage(url_of(base)))),
    ]
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_directories, "_PATIENCE_SECONDS", 0.1)
        for directory, options in runs:
            checkpointer = Checkpointer(directory, layout, dist.group.WORLD, options)
            with pytest.raises(RecipeError) as caught:
                checkpointer.open()
            checkpointer.close()
            errors.append(str(caught.value))
    return errors


def test_what_needs_shared_storage_is_rejected_before_training(tmp_path: Path) -> None:
    make_nodes(tmp_path, 2)
    expected = (
        "checkpoint.model_layout",
        "checkpoint.incremental",
        "checkpoint.on_incompatible",
        "the ranks have different directories",
        "the ranks do not share storage",
    )
    for errors in ranks.run(rejected, 2, tmp_path):
        for error, text in zip(errors, expected, strict=True):
            assert text in error


def opened_on_shared_storage(base: Path) -> bool:
    """Open a run whose ranks are on two machines and see the same directory; return whether it is distributed."""
    rank = dist.get_rank()
    options = CheckpointOptions(scratch_dir=str(base))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("automodel_ckpt.checkpoint.memory.nodes.kernel_boot_id", lambda: f"{rank}")
        checkpointer = Checkpointer(url_of(base), DataParallelRanks(rank, 2), options=options)
        checkpointer.open()
        is_distributed = checkpointer.nodes is not None
        checkpointer.close()
    return is_distributed


def test_nodes_that_share_storage_again_use_it(tmp_path: Path) -> None:
    root = scratch_directory(url_of(tmp_path), str(tmp_path))
    root.mkdir()
    # A mount was missing on a node when the run started before.
    RunGeneration().next([]).write(root)
    assert ranks.run(opened_on_shared_storage, 2, tmp_path) == [False, False]


def close_while_saving(base: Path, *, dies: bool) -> list[str]:
    """Close with an asynchronous save in progress. If rank 1 *dies*, its node has not sent its part."""
    run = Run(base, dist.get_rank(), is_async=True)
    with pytest.MonkeyPatch.context() as patch:
        warnings: list[object] = []
        patch.setattr(
            "automodel_ckpt.checkpoint.memory.nodes.log.warning",
            lambda *text: warnings.append(text),
        )
        # Without a checkpoint, there is nothing to keep.
        run.checkpointer.transfers.finish()
    assert not warnings
    is_dying = dies and dist.get_rank() == 1
    if is_dying:
        directories = run.checkpointer._directories
        assert directories is not None
        directories.nodes.contribute = lambda *_: time.sleep(60)  # type: ignore[method-assign]
    run.checkpointer.save(run.state, step=1, epoch=0, before_publishing=lambda: time.sleep(1.5))
    if is_dying:
        os._exit(0)
    run.checkpointer.close()
    return [path.name for path in run.checkpointer.directory.glob("*epoch*step*")]


def start(base: Path, nodes: list[int], steps: int = 0) -> tuple[int, str, list[int], list[str]]:
    """Start as a recipe does, which shortens the log to the step, and train some steps.

    Returns the step and the origin of the loaded checkpoint, the logged steps (of rank 0), and what is kept of others.
    """
    run = Run(base, nodes[dist.get_rank()])
    step, logged = run.step, run.logged()[: run.step]
    if dist.get_rank() == 0:
        run.log.write_text("".join(f"{each}\n" for each in logged))
    run.train(steps)
    dist.barrier()
    kept = sorted(os.path.basename(path) for path in run.checkpointer.directory.glob(".[ue][na]*"))
    run.finish()
    return step, run.origin, logged, kept


def start_without_a_node(base: Path) -> list[tuple[int, str, list[int], list[str]]]:
    """The store has step 1, and the disks of nodes 0 and 1 have step 3."""
    store = base / "store"

    def keep_store() -> None:
        shutil.copytree(store, base / "copy")

    def go_back() -> None:
        shutil.rmtree(store)
        shutil.copytree(base / "copy", store)

    run = Run(base, dist.get_rank())
    run.train(1)
    run.checkpointer.transfers.finish()
    between(keep_store)
    run.train(2)
    run.finish()
    found = []
    for nodes, steps in (([0, 2], 0), ([2, 1], 0), ([1, 0], 0), ([0, 2], 1)):
        # The uploads of the start before had no effect.
        between(go_back)
        found.append(start(base, nodes, steps))
        dist.barrier()
    return found


def test_a_start_without_a_node_keeps_what_the_others_have_until_the_next_checkpoint(
    tmp_path: Path,
) -> None:
    make_nodes(tmp_path, 3)
    by_rank = ranks.run(start_without_a_node, 2, tmp_path, timeout=TIMEOUT)
    first, second = by_rank
    assert [each[:3] for each in first] == [
        (1, "store", [1]),
        (1, "store", [1]),
        # Node 1 leads now; the log of three steps was on node 0, and shortened since.
        (3, "nodes", [1, 2, 3]),
        (1, "store", [1]),
    ]
    part = ".unusable-epoch_0_step_3"
    assert part in first[0][3] and part in second[1][3]
    for found in by_rank:
        assert [each[3] for each in found[2:]] == [[], []]


def test_a_save_in_progress_is_published_on_all_nodes_before_they_close(tmp_path: Path) -> None:
    make_nodes(tmp_path, 2)
    close = partial(close_while_saving, dies=False)
    for names in ranks.run(close, 2, tmp_path):
        assert "epoch_0_step_1" in names and not [name for name in names if "staging" in name]


def test_a_save_in_progress_is_abandoned_if_a_node_ends_without_its_part(tmp_path: Path) -> None:
    make_nodes(tmp_path, 2)
    close = partial(close_while_saving, dies=True)
    first, _ = ranks.outcomes(close, 2, tmp_path)
    assert first.value == []


def test_each_node_uploads_its_part_and_any_nodes_continue(tmp_path: Path) -> None:
    make_nodes(tmp_path, 2)
    for first, second, third in ranks.run(lose_and_go_on, 3, tmp_path, timeout=TIMEOUT):
        assert (first["step"], first["origin"]) == (0, "")
        check(first, second, "store")
        check(second, third, "nodes")
    # On one node, with another number of ranks. The part of a checkpoint there is not one: it was downloaded.
    (found,) = ranks.run(train, 1, tmp_path, [1], 1, SYNCHRONOUS, timeout=TIMEOUT)
    assert found["step"] == 5
    check(third, found, "nodes")
    assert names_on(tmp_path, 1) == ["epoch_0_step_6"]
    check_store(tmp_path, 6)
