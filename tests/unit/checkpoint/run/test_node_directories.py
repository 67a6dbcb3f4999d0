"""What a start does with checkpoints that its nodes do not have completely: one node, without a process group."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from automodel_ckpt.base.store_url import scratch_directory
from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.memory.save_files import SAVE
from automodel_ckpt.checkpoint.memory.survey import CheckpointOnNodes, _complete
from automodel_ckpt.checkpoint.node_directories import NodeDirectories, RunGeneration
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.errors import AutomodelError
from tests.support.models import tiny
from tests.support.runs.stored_runs import FIRST, SECOND, write_run

FOREIGN = "epoch_0_step_30"


def as_it_is(error: Exception) -> AutomodelError:
    assert isinstance(error, AutomodelError), error
    return error


@contextmanager
def directories(root: Path) -> Iterator[NodeDirectories]:
    found = NodeDirectories(root, None, "digest", as_it_is)
    try:
        yield found
    finally:
        found.nodes.release()


def names_in(root: Path) -> list[str]:
    return [str(name) for name in checkpoint_names(root)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    write_run(root)
    return root


def test_a_checkpoint_of_which_files_are_missing_is_kept_until_training_goes_on(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its other nodes may be absent in one start and there in the next one."""
    file = next(iter(Manifest.read(root / SECOND).files))
    elsewhere = tmp_path / "another node"
    os.rename(root / SECOND / file, elsewhere)
    with directories(root) as found:
        assert [path.name for path in found.on_nodes] == names_in(root) == [FIRST]
    os.rename(elsewhere, root / f".unusable-{SECOND}" / file)
    with directories(root) as found:
        assert {path.name for path in found.on_nodes} == {FIRST, SECOND}
        assert names_in(root) == [SECOND, FIRST]
    os.rename(root / SECOND / file, elsewhere)
    with directories(root) as found:
        assert "removed" not in caplog.text
        found.begin(10)
        assert (
            f"removed from the disks of the nodes (abandoned, or without all files): {SECOND}"
            in (caplog.text)
        )
    assert not list(root.glob(f"*{SECOND}*"))
    assert names_in(root) == [FIRST]


def test_what_the_run_has_abandoned_is_removed_when_training_goes_on(root: Path) -> None:
    with directories(root) as found:
        found.begin(10)
        assert names_in(root) == [SECOND, FIRST]
    with directories(root) as found:
        assert [path.name for path in found.on_nodes] == [FIRST]
        found.begin(10)
    assert not list(root.glob(f"*{SECOND}*"))
    assert names_in(root) == [FIRST]


def lose_a_file(checkpoint: Path) -> None:
    os.remove(checkpoint / next(iter(Manifest.read(checkpoint).files)))


@pytest.mark.parametrize("abandons", [False, True])
def test_what_no_start_can_have_completely_stays_until_the_run_has_gone_on_without_it(
    root: Path, abandons: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The nodes have neither checkpoint; a start continues from a store. Only the newest stays."""
    for name in (FIRST, SECOND):
        lose_a_file(root / name)
    # Twice: another start does not change that.
    for _ in range(2):
        with directories(root) as found:
            found.begin(5, abandons_later=abandons)
            generation = found.generation
        expected = [] if abandons else [f".unusable-{SECOND}"]
        assert [path.name for path in root.glob("*epoch*")] == expected
    text = f"To continue from {SECOND}, start again with all nodes before this run saves"
    assert (text in caplog.text) is not abandons
    with directories(root) as found:
        found.begin(6, of_generation=generation)
    assert not list(root.glob("*epoch*")) and not list(root.glob(".earlier*"))


def test_a_directory_that_no_save_has_written_is_left_alone(root: Path) -> None:
    (root / FOREIGN).mkdir()
    (root / FOREIGN / "notes.txt").write_text("mine")
    with directories(root) as found:
        found.begin(20)
        assert {path.name for path in found.on_nodes} == {FIRST, SECOND}
    assert (root / FOREIGN / "notes.txt").read_text() == "mine"


def test_what_has_the_name_of_a_checkpoint_of_another_node_is_renamed(
    root: Path, tmp_path: Path
) -> None:
    """This node has none of the checkpoint's files, but a directory of its name that no save has written."""
    saved = tmp_path / "another node"
    os.rename(root / SECOND, saved)
    (root / SECOND).mkdir()
    (root / SECOND / "notes.txt").write_text("mine")
    with directories(root) as found:
        data = (saved / layout.MANIFEST).read_bytes()
        manifest = Manifest.read(saved)
        held = CheckpointOnNodes(
            root / SECOND,
            manifest.digest,
            data,
            dict.fromkeys(manifest.files, (0,)),
            found.nodes,
            {},
        )
        _complete(held)
    assert sorted(os.listdir(root / SECOND)) == [SAVE, layout.MANIFEST]
    aside = root / f"{SECOND}.superseded-1"
    assert [path.name for path in aside.iterdir()] == ["notes.txt"]


def test_a_start_on_one_node_keeps_what_it_has_saved_when_it_goes_back(tmp_path: Path) -> None:
    options = CheckpointOptions(scratch_dir=str(tmp_path / "scratch"))
    url = f"file://{tmp_path}/store"
    root = scratch_directory(url, options.scratch_dir)
    root.mkdir(parents=True)
    # Of an earlier start, on nodes with separate directories.
    RunGeneration().next([]).write(root)
    state = discover(tiny.recipe())
    first = Checkpointer(url, options=options)
    first.open()
    assert first.load(state) is None
    for step in (1, 2, 3):
        first.save(state, step=step, epoch=0)
        if step == 2:
            uploaded = tmp_path / "store" / "epoch_0_step_2" / layout.MANIFEST
            while not uploaded.exists():
                time.sleep(0.01)
    first.wait()
    # The disk has what is not uploaded yet, and the newest one. The run goes back to one of the store.
    assert not (root / "epoch_0_step_2").exists()
    went_back = first.roll_back(state, 2)
    assert went_back is not None and went_back.step == 2
    first.close()
    second = Checkpointer(url, options=options)
    second.open()
    resumed = second.load(state)
    second.close()
    assert resumed is not None and resumed.path == root / "epoch_0_step_2"
