"""The campaigns of tools/crash find a wrong publication, and what they find on XFS is an error."""

import os
from pathlib import Path

import pytest

from automodel_ckpt.base.durable_io import fsync_directory
from automodel_ckpt.checkpoint.parts import commit
from tests.crash.test_campaigns import needs_calls, scenario
from tools.crash import calls, jobs, power
from tools.crash.subjects import OURS


def test_a_sweep_sees_a_checkpoint_that_got_its_name_before_it_was_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The campaign can fail: a publish that renames first and writes the manifest later is found out."""
    needs_calls()
    jobs.warm_up()

    def reserve_final(root: Path, name: str) -> Path:
        (root / name).mkdir(parents=True)
        (root / name / ".parts").mkdir()
        return root / name

    point = calls.Point(OURS[0], scenario("save"), "both", 45)
    # Both ranks: one that survives for some milliseconds may notice the other's death and remove what it wrote.
    with calls.Sweep(seed=0) as sweep:
        sweep.lay_out(OURS[0], scenario("save"))
        monkeypatch.setattr(commit, "reserve", reserve_final)
        monkeypatch.setattr(commit, "publish", lambda staging, name: staging)
        _, wrong, _ = calls.judge_kill(sweep, point)
    assert any("has its name but no manifest" in text for text in wrong)


@pytest.mark.parametrize("file_system", power.FILE_SYSTEMS)
def test_a_directory_is_not_durable_if_its_file_system_shuts_down_before_the_fsync(
    file_system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync of XFS then reports success, although the directory's last change is discarded."""
    if reason := power.unsupported(file_system):
        pytest.skip(reason)
    fsync = os.fsync

    def fsync_after_cut(descriptor: int) -> None:
        disk.cut()
        fsync(descriptor)

    with power.Disk(file_system) as disk:
        os.mkdir(disk.mount_point / "new")
        monkeypatch.setattr(os, "fsync", fsync_after_cut)
        with pytest.raises(OSError, match="Input/output error"):
            fsync_directory(disk.mount_point)
