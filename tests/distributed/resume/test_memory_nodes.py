"""Checkpoints in the memory of several nodes: what a restart finds after the loss of nodes, files and processes.

Three ranks on two nodes. Each node has its own directory at the same path
(``tests/support/servers/node_memory.py``).
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.files.layout import DataParallelRanks
from automodel_ckpt.checkpoint.memory import nodes
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig, MemoryConfig
from automodel_ckpt.training.saves.memory_saves import MemorySaves
from tests.distributed.resume import test_node_directories
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

STEPS = 3
NODES = [0, 1, 1]
"""The node of each rank."""
TIMEOUT = 170


class Run(ShardedTraining):
    """A sharded model that is trained and saved to memory after every step, by each rank."""

    def __init__(self, base: Path, node: int, **section: Any) -> None:
        shm = enter_node(base, node)
        world_size = dist.get_world_size()
        layout = DataParallelRanks(dist.get_rank(), world_size)
        super().__init__()
        self.disk = Checkpointer(base / "run", layout, dist.group.WORLD)
        self.disk.open()
        self.memory = MemorySaves(
            MemoryConfig(directory=str(shm), **section),
            CheckpointConfig(),
            self.disk,
            layout,
            dist.group.WORLD,
            60.0,
        )
        self.resumed = self.disk.load(self.state)
        self.step = 0 if self.resumed is None else self.resumed.step
        in_memory = self.resumed is not None and self.resumed.in_memory
        self.origins = self.memory.origins() if in_memory else ""
        self.memory.start(self.resumed, self.step)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.take_step()
            if self.memory.is_due(cast(Any, SimpleNamespace(step=self.step))):
                self.memory.save(self.step, self.save)

    def fail(self) -> None:
        """End as after an error on all ranks: the checkpoints in memory stay."""
        self.memory.finish_save()
        self.memory.close()
        self.disk.close()

    def save(self, checkpointer: Checkpointer) -> None:
        checkpointer.save(self.state, step=self.step, epoch=0)


def train_and_fail(base: Path) -> list[list[float]]:
    """Train, and end as after a failure: nothing is closed or removed. Returns the weights."""
    run = start(base)
    run.train(STEPS)
    run.memory.finish_save()
    return run.weights()


def resume(base: Path, nodes: list[int]) -> dict[str, Any]:
    """Start again; what was loaded. In the end, all is removed."""
    run = Run(base, nodes[dist.get_rank()])
    found = {
        "step": run.step,
        "in_memory": run.resumed is not None and run.resumed.in_memory,
        "weights": run.weights(),
        "origins": run.origins,
        "counter": run.counter.value,
    }
    run.train(1)
    run.memory.remove()
    run.disk.close()
    return found


def left(base: Path) -> list[str]:
    return [path.name for node in base.glob("node-*") for path in node.iterdir()]


# ---------------------------------------------------------------- what happens between failure and restart


def lose_nothing(base: Path) -> None:
    pass


def lose_second_node(base: Path) -> None:
    clear(memory_of_node(base, 1))


def damage_a_file(base: Path) -> None:
    """One byte of a tensor on the first node: the second one has a copy."""
    (path,) = memory_of_node(base, 0).glob("*/epoch_0_step_3/model/shard-00001-*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def fail_before_the_first_node_publishes(base: Path) -> None:
    """The second node has published step 3 already, and the first one has it in a staging directory."""
    (path,) = memory_of_node(base, 0).glob("*/epoch_0_step_3")
    path.rename(path.with_name(f".{path.name}.staging-{'0' * 32}"))


Case = Callable[[Path], None]
CASES: Sequence[Case] = (
    lose_second_node,
    damage_a_file,
    lose_nothing,
    fail_before_the_first_node_publishes,
)


def resume_after_each(base: Path, kept: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """Restore the state after the failure from *kept*, and resume, for each case."""
    found = {}
    for case in cases:
        between(partial(restore, base, kept))
        between(partial(case, base))
        found[case.__name__] = resume(base, NODES)
    return found


def restore(base: Path, kept: Path) -> None:
    for path in kept.iterdir():
        if path.name != "shm":
            clear(base / path.name)
            shutil.copytree(path, base / path.name, dirs_exist_ok=True)


@pytest.mark.parametrize(
    "cases",
    [CASES[:2], pytest.param(CASES[2:], marks=pytest.mark.further)],
    ids=["lost or damaged", "others"],
)
def test_with_a_replica_any_one_node_can_be_lost(tmp_path: Path, cases: Sequence[Case]) -> None:
    base, kept = tmp_path / "run", tmp_path / "kept"
    base.mkdir()
    make_nodes(base, 2)
    weights = ranks.run(train_and_fail, 3, base, timeout=TIMEOUT)[0]
    shutil.copytree(base, kept)
    all_found = ranks.run(resume_after_each, 3, base, kept, cases, timeout=TIMEOUT)
    for rank, of_cases in enumerate(all_found):
        for case, found in of_cases.items():
            assert found["step"] == STEPS and found["in_memory"], (rank, case, found)
            assert found["weights"] == weights and found["counter"] == STEPS, (rank, case)
        if lose_nothing in cases:
            origins = of_cases["lose_nothing"]["origins"]
            assert origins == ": each rank's state from its own node" or rank
        else:
            assert "from the memory of other nodes" in of_cases["lose_second_node"]["origins"]
    assert left(base) == []
    restore(base, kept)
    # With another number of ranks, on the second node alone.
    clear(memory_of_node(base, 0))
    for found in ranks.run(resume, 2, base, [1, 1], timeout=TIMEOUT):
        assert found["step"] == STEPS and found["in_memory"] and found["weights"] == weights


# ---------------------------------------------------------------- several failures in one run


def start(base: Path, **section: Any) -> Run:
    return Run(base, NODES[dist.get_rank()], **section)


def without_replicas(base: Path) -> list[int]:
    """The steps that are resumed from, with all nodes and without one."""
    steps = []
    for loss in (lose_nothing, lose_second_node):
        run = start(base, replicas=0)
        run.train(STEPS)
        run.fail()
        between(partial(loss, base))
        run = start(base, replicas=0)
        steps.append(run.step)
        run.fail()
    return steps


def process_killed(base: Path) -> list[str]:
    """What is in memory after the process of the second node was killed between two saves."""
    run = start(base)
    run.train(1)
    run.memory.finish_save()
    nodes = run.memory.nodes
    assert nodes is not None
    if dist.get_rank() == 1:
        assert nodes._process is not None
        os.kill(nodes._process.pid, signal.SIGKILL)
    dist.barrier()
    run.train(2)
    run.memory.finish_save()
    run.disk.wait()
    found = sorted(path.name for path in run.memory.directory.glob("epoch_*"))
    run.fail()
    return found


def absent_node(base: Path) -> dict[str, int]:
    """The steps that are resumed from after a node was absent, with what it had at step 2."""
    found = {}
    second, absent = memory_of_node(base, 1), base / "absent"
    run = start(base)
    run.train(2)
    run.fail()

    def leave() -> None:
        shutil.copytree(second, absent)
        clear(second)

    def come_back_alone() -> None:
        clear(memory_of_node(base, 0))
        clear(second)
        shutil.copytree(absent, second, dirs_exist_ok=True)

    between(leave)
    run = start(base)
    run.train(1)
    run.fail()
    between(come_back_alone)
    # It is the checkpoint that the start without it loaded.
    run = start(base)
    found["base"] = run.step
    # As after a rollback to an earlier checkpoint on disk.
    run.memory.start(None, 0)
    run.fail()
    between(come_back_alone)
    run = start(base)
    found["abandoned"] = run.step
    run.fail()
    return found


def slow_copies(base: Path) -> float:
    """The seconds of a save whose copies are sent at 0.05 MB/s."""
    run = start(base, max_mb_per_second=0.05)
    began = time.monotonic()
    run.train(1)
    run.memory.finish_save()
    seconds = time.monotonic() - began
    run.fail()
    return seconds


SCENARIOS = (without_replicas, process_killed, absent_node, slow_copies)


def run_scenarios(base: Path) -> dict[str, Any]:
    found = {}
    for scenario in SCENARIOS:
        found[scenario.__name__] = scenario(base)

        def reset() -> None:
            for name in ("run", "node-0", "node-1"):
                clear(base / name)

        between(reset)
    return found


@pytest.mark.further
def test_nodes_that_are_lost_absent_or_slow(tmp_path: Path) -> None:
    make_nodes(tmp_path, 2)
    found = ranks.run(run_scenarios, 3, tmp_path, timeout=TIMEOUT)[0]
    # replicas: 0
    assert found["without_replicas"] == [STEPS, 0]
    assert found["process_killed"] == ["epoch_0_step_3"]
    assert found["absent_node"] == {"base": 2, "abandoned": 0}
    # max_mb_per_second: 0.05, and about 30 kB from each node.
    assert found["slow_copies"] > 0.3


def close_while_saving(base: Path) -> list[str]:
    """Close with an asynchronous save in progress. Rank 1 dies, and its node has not sent its part."""
    run = test_node_directories.Run(base, dist.get_rank(), is_async=True)
    with pytest.MonkeyPatch.context() as patch:
        warnings: list[object] = []
        patch.setattr(nodes.log, "warning", lambda *text: warnings.append(text))
        # Without a checkpoint, there is nothing to keep.
        run.checkpointer.transfers.finish()
    assert not warnings
    if dist.get_rank() == 1:
        directories = run.checkpointer._directories
        assert directories is not None
        directories.nodes.contribute = lambda *_: time.sleep(60)  # type: ignore[method-assign]
    run.checkpointer.save(run.state, step=1, epoch=0, before_publishing=lambda: time.sleep(1.5))
    if dist.get_rank() == 1:
        os._exit(0)
    run.checkpointer.close()
    return test_node_directories.names_in(run)


def test_a_save_in_progress_is_abandoned_if_a_node_ends_without_its_part(tmp_path: Path) -> None:
    make_nodes(tmp_path, 2)
    first, _ = ranks.outcomes(close_while_saving, 2, tmp_path)
    assert first.value == []
