"""The generation of a run whose nodes have separate directories: which checkpoints of a node are abandoned."""

import time
from pathlib import Path

from automodel_ckpt.base.store_url import scratch_directory
from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.run.generation import RunGeneration
from tests.support.models import tiny


def test_the_latest_start_counts_also_if_its_nodes_had_no_record() -> None:
    of_absent_nodes = RunGeneration().next([]).next([]).next([])
    of_new_nodes = RunGeneration().next([])
    assert of_new_nodes.number > of_absent_nodes.number
    # The clock was behind.
    behind = RunGeneration(of_new_nodes.number + 10**12)
    assert behind.next([]).number == behind.number + 1


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
