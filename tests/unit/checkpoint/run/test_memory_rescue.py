"""What the launchers of two nodes copy to disk of the parts in their memory, when no restart follows a failure."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import nn

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.memory.directory import GENERATION, MemoryRecord
from automodel_ckpt.checkpoint.memory.rescue import copy_to_disk
from automodel_ckpt.checkpoint.memory.save_files import files_below, mark_save, set_aside
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models import tiny

NAME = "epoch_0_step_5"


class Memory:
    """The memory of two nodes, each with every second file of step 5; the first one has the manifest."""

    def __init__(self, base: Path) -> None:
        self.run = base / "run"
        self.run.mkdir()
        self.record = MemoryRecord.create().next("")
        self.record.write(self.run)
        self.nodes = [base / "first", base / "second"]
        self.save(5)
        whole = self.nodes[0] / NAME
        shutil.copytree(whole, self.nodes[1] / NAME)
        digest = Manifest.read(whole).digest
        files = sorted(file for file in files_below(whole) if file != layout.MANIFEST)
        assert len(files) >= 3
        for number, node in enumerate(self.nodes):
            mark_save(node / NAME, digest)
            for file in files[1 - number :: 2]:
                (node / NAME / file).unlink()
        (self.nodes[1] / NAME / layout.MANIFEST).unlink()

    def save(self, step: int) -> None:
        """Save *step* on the first node, completely."""
        checkpointer = tiny.checkpointer(self.nodes[0])
        checkpointer.notes[GENERATION] = self.record.generation
        checkpointer.save({"model": nn.Linear(2, 2)}, step=step, epoch=0)
        checkpointer.close()

    def copy(self, node: int, wait_seconds: float = 30.0) -> Path | None:
        return copy_to_disk(self.nodes[node], self.run, wait_seconds)

    @property
    def published(self) -> list[str]:
        return [str(name) for name in checkpoint_names(self.run)]


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path)


def assert_whole(memory: Memory) -> None:
    copy = memory.run / NAME
    assert verify(copy, Manifest.read(copy)) == []
    assert os.readlink(memory.run / layout.LATEST) == NAME
    assert sorted(os.listdir(memory.run)) == [layout.MEMORY, layout.LATEST, NAME]


def test_parts_of_two_nodes_become_one_checkpoint(memory: Memory) -> None:
    with ThreadPoolExecutor(2) as pool:
        copies = list(pool.map(memory.copy, (0, 1)))
    assert copies == [memory.run / NAME] * 2
    assert_whole(memory)
    assert memory.copy(0) is None


def test_parts_that_a_failed_start_has_set_aside_are_copied(memory: Memory) -> None:
    """A node was absent. The end of the start frees the memory once all is copied."""
    for node in memory.nodes:
        set_aside(node / NAME)
    with pytest.raises(CheckpointUnusable, match="nodes that did not copy them"):
        memory.copy(1, wait_seconds=0.0)
    memory.copy(0)
    assert_whole(memory)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_part_alone_is_not_published_and_a_later_copy_of_the_other_part_completes_it(
    memory: Memory, alone: int
) -> None:
    with pytest.raises(CheckpointUnusable, match="nodes that did not copy them") as raised:
        memory.copy(alone, wait_seconds=0.1)
    assert NAME in str(raised.value.problems[0].value)
    assert memory.published == []
    assert memory.copy(1 - alone) == memory.run / NAME
    assert_whole(memory)


def test_parts_of_different_saves_of_a_step_are_not_mixed(memory: Memory) -> None:
    # The second node was absent when the run went back and saved the step again.
    mark_save(memory.nodes[1] / NAME, "xxh3:" + "0" * 32)
    for node in (0, 1):
        with pytest.raises(CheckpointUnusable):
            memory.copy(node, wait_seconds=0.1)
    assert memory.published == []


def test_an_older_whole_checkpoint_is_published_if_the_newest_is_incomplete(memory: Memory) -> None:
    memory.save(4)
    assert memory.copy(0, wait_seconds=0.1) == memory.run / "epoch_0_step_4"
    assert sorted(os.listdir(memory.run)) == [layout.MEMORY, layout.LATEST, "epoch_0_step_4"]
