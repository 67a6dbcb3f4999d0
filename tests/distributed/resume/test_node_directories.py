"""Runs in an object store on nodes that share no storage: what a start finds after the loss of nodes and processes.

Four ranks on two nodes. Each node has its own directory at the same path (``tests/support/servers/node_memory.py``).
"""

import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import RecipeError
from tests.support import ranks
from tests.support.models.sharded import ShardedTraining
from tests.support.servers.node_memory import (
    between,
    can_enter,
    clear,
    enter_node,
    make_nodes,
    memory_of_node,
)

pytestmark = pytest.mark.skipif(not can_enter(), reason="mount namespaces need root")

TIMEOUT = 170


def url_of(base: Path) -> str:
    return f"file://{base}/store"


def directory_of(base: Path, node: int) -> Path:
    """The run directory of a node, as this process sees it."""
    (found,) = memory_of_node(base, node).iterdir()
    return found


class Run(ShardedTraining):
    """A sharded model that is trained and saved into the store after every step, by each rank."""

    def __init__(self, base: Path, node: int, **options: Any) -> None:
        shm = enter_node(base, node)
        super().__init__()
        chosen = CheckpointOptions(scratch_dir=str(shm), **options)
        self.checkpointer = Checkpointer(url_of(base), options=chosen)
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
        return "store" if self.resumed.path.parent.name == ".fetched" else "nodes"

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
    if kills_uploads:
        # The request for the files of this node has hardly been written: both processes look every half second.
        kill_uploads()
    if is_stopped:
        run.checkpointer.transfers.finish_before_stop(0.0, lambda: False)
        run.checkpointer.close()
    else:
        run.finish()
    return found | {"weights": run.weights()}


def kill_uploads() -> None:
    """Kill the process of this rank that uploads the files of its node, if it has one."""
    for path in Path("/proc/self/task").glob("*/children"):
        for child in path.read_text().split():
            if b"part_uploader" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)


def names_on(base: Path, node: int) -> list[str]:
    return sorted(path.name for path in directory_of(base, node).glob("epoch_*"))


def check_store(base: Path, step: int) -> None:
    """The newest checkpoint in the store is of *step*, and complete; nothing else is there of its upload."""
    name, *_ = (base / "store" / "LATEST").read_text().split()
    assert name == f"epoch_0_step_{step}"
    assert main(["pull", f"{url_of(base)}/{name}", str(base / f"pulled-{step}")]) == 0
    assert not list((base / "store").rglob(".parts"))


SYNCHRONOUS = {"keep_last": 2}
ASYNCHRONOUS = {"keep_last": 2, "is_async": True}


def lose_and_go_on(base: Path) -> list[dict[str, Any]]:
    """Train on two nodes, again after the loss of a disk, and again with the first rank on the other node."""
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
    scratch = str(shm)
    runs: list[tuple[str, CheckpointOptions]] = [
        (url_of(base), CheckpointOptions(scratch_dir=scratch, model_layout="hf")),
        (url_of(base), CheckpointOptions(scratch_dir=scratch, incremental=True)),
        (url_of(base), CheckpointOptions(scratch_dir=scratch, on_incompatible="sibling")),
        (url_of(base), CheckpointOptions(scratch_dir=f"{scratch}/{dist.get_rank()}")),
        (f"{scratch}/local", CheckpointOptions()),
    ]
    errors = []
    for directory, options in runs:
        checkpointer = Checkpointer(directory, options=options)
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


def close_while_saving(base: Path) -> list[str]:
    run = Run(base, dist.get_rank(), is_async=True)
    run.checkpointer.save(run.state, step=1, epoch=0, before_publishing=lambda: time.sleep(1.5))
    run.checkpointer.close()
    return names_in(run)


def names_in(run: Run) -> list[str]:
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


@pytest.mark.further
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
    for names in ranks.run(close_while_saving, 2, tmp_path):
        assert "epoch_0_step_1" in names and not [name for name in names if "staging" in name]


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
