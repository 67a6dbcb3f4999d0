"""Asynchronous saves on one process: the state of the call, bounded resources, and what happens when one fails."""

import copy
import errno
import gc
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint import Manifest, SaveReport, discover
from automodel_ckpt.errors import ExportFailed, SaveFailed
from tests.support import ranks
from tests.support.checkpoints import is_intact
from tests.support.models import tiny
from tests.support.models.shards import AdapterFiles

NUM_SAVES = int(os.environ.get("ASYNC_SAVES", "10"))
"""`make crash` asks for 200."""


class Saver:
    """A recipe-like object and a checkpointer that saves it in the background."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.made = tiny.recipe(1)
        tiny.train(self.made, 1)
        self.checkpointer = tiny.checkpointer(root, **{"is_async": True} | options)
        self.reports: list[SaveReport] = []

    def save(self, step: int, *, validated: bool = False) -> SaveReport:
        return self.checkpointer.save(
            discover(self.made),
            step=step,
            epoch=0,
            losses={"step": step},
            validated=validated,
            on_saved=self.reports.append,
        )

    @property
    def writer(self) -> int:
        assert self.checkpointer._async is not None
        return self.checkpointer._async.background.writer_pid

    @property
    def is_writing(self) -> bool:
        assert self.checkpointer._async is not None
        return self.checkpointer._async.background.is_writing

    def pause(self) -> None:
        """Hold the writer, so that what is saved next stays under way."""
        self.checkpointer.prepare(discover(self.made))
        os.kill(self.writer, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.writer, signal.SIGCONT)


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    made = Saver(tmp_path / "run")
    yield made
    made.checkpointer.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def latest(root: Path) -> str | None:
    return os.readlink(root / "LATEST") if (root / "LATEST").is_symlink() else None


def stored(path: Path) -> dict[str, bytes]:
    """The raw bytes of every tensor of a checkpoint."""
    found = {}
    for name, tree in Manifest.read(path).trees.items():
        for tensor in tree.tensors.values():
            (piece,) = tensor.slices
            with open(path / piece.file, "rb") as file:
                found[f"{name}.{tensor.fqn}"] = os.pread(file.fileno(), piece.nbytes, piece.start)
    return found


def resident_bytes(pid: int | str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return sum(
        int(line.split()[1]) * 1024
        for line in text.splitlines()
        if line.startswith(("VmRSS", "RssShmem"))
    )


def resources(saver: Saver) -> tuple[int, int, int, int]:
    """Open files and threads of this process, open files of the writer, resident bytes of both."""
    # Otherwise the files of objects that earlier tests have lost may be closed between two calls.
    gc.collect()
    pids = ["self", saver.writer]
    files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    return files[0], threading.active_count(), files[1], sum(map(resident_bytes, pids))


FORMATS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "torch_save": {"model_save_format": "torch_save"},
    "hf": {"model_layout": "hf"},
    "adapter": {"model_layout": "adapter", "assets": {"model": AdapterFiles()}},
}


@pytest.mark.parametrize(
    "form",
    ["safetensors", *(pytest.param(form, marks=pytest.mark.further) for form in list(FORMATS)[1:])],
)
def test_many_saves_under_a_fast_optimizer_hold_the_state_of_their_call_and_take_no_more_memory(
    tmp_path: Path, form: str
) -> None:
    saver = Saver(tmp_path, keep_last=2, **FORMATS[form])
    expected: dict[str, bytes] = {}
    settled = (0, 0, 0, 0)
    for step in range(1, NUM_SAVES + 1):
        tensors = tiny.tensors_of(saver.made)
        saver.save(step)
        tiny.train(saver.made, 3)
        saver.checkpointer.wait_for_save()
        found = stored(tmp_path / "LATEST")
        expected = {
            "model." + name.removeprefix("model."): bytes(
                value.reshape(-1).view(torch.uint8).numpy()
            )
            for name, value in tensors.items()
            if name.startswith("model.") and name != "model.head"
        }
        assert expected.items() <= found.items(), step
        moments = tensors["optimizer.0.exp_avg"].reshape(-1).view(torch.uint8).numpy()
        assert found["optimizer.optimizer.state.model.embed.exp_avg"] == bytes(moments)
        if step == NUM_SAVES // 2:
            saver.checkpointer.wait()
            settled = resources(saver)
    saver.checkpointer.wait()
    now = resources(saver)
    assert now[:3] == settled[:3] and now[3] < settled[3] + (8 << 20), (settled, now)
    assert [report.step for report in saver.reports] == [*range(1, NUM_SAVES + 1)]
    assert is_intact(tmp_path / "LATEST")
    saver.checkpointer.close()


def test_a_save_returns_when_the_state_is_copied_and_the_next_one_waits_for_it(
    saver: Saver,
) -> None:
    saver.pause()
    first = saver.save(1)
    assert not first.published and saver.reports == [] and not first.path.exists()
    # Before the timer: this thread may not continue immediately.
    started = time.monotonic()
    threading.Timer(0.6, saver.go_on).start()
    saver.save(2)
    waited = time.monotonic() - started
    assert waited > 0.4
    assert [report.step for report in saver.reports] == [1] and first.path.is_dir()
    saver.checkpointer.wait_for_save()
    first, second = saver.reports
    assert first.published and first.nbytes
    # The time until go_on() is no stall of either save.
    assert first.total_seconds - first.stall_seconds > 0.4
    assert waited - second.stall_seconds > 0.4


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".run.lock")


def wait_until_it_failed(saver: Saver) -> None:
    wait_until(lambda: saver.checkpointer.upload_failed)


def test_a_writer_that_is_killed_fails_its_save_only(saver: Saver) -> None:
    root = saver.save(1).path.parent
    saver.checkpointer.wait_for_save()
    saver.pause()
    saver.save(2)
    os.kill(saver.writer, signal.SIGKILL)
    wait_until_it_failed(saver)
    with pytest.raises(SaveFailed, match=r"process \d+: signal 9 \(SIGKILL\)") as caught:
        saver.checkpointer.wait_for_save()
    assert caught.value.exit_code == 4 and "epoch_0_step_2" in str(caught.value)
    assert names(root) == ["LATEST", "epoch_0_step_1"]
    assert latest(root) == "epoch_0_step_1" and not saver.checkpointer.upload_failed
    saver.save(3)
    assert saver.checkpointer.wait_for_save() and latest(root) == "epoch_0_step_3"


def test_a_writer_that_stands_still_fails_its_save_when_it_was_waited_for_long_enough(
    tmp_path: Path,
) -> None:
    # More than a new writer needs on a busy machine before it makes progress.
    saver = Saver(tmp_path, timeout_seconds=3.0)
    saver.pause()
    saver.save(1)
    writer = saver.writer
    with pytest.raises(
        SaveFailed,
        match=rf"made no progress[\s\S]*epoch_0_step_1[\s\S]*process {writer}: none for ([3-9]|\d\d) s",
    ) as caught:
        saver.checkpointer.wait_for_save()
    assert caught.value.exit_code == 4 and names(tmp_path) == [] and not is_there(writer)
    saver.save(2)
    assert saver.checkpointer.wait_for_save() and latest(tmp_path) == "epoch_0_step_2"
    saver.checkpointer.close()


def test_a_disk_that_is_full_when_the_writer_comes_to_write_is_reported_with_path_and_errno(
    tmp_path: Path,
) -> None:
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    saver = Saver(mount / "run")
    try:
        saver.save(1)
        saver.checkpointer.wait_for_save()
        saver.pause()
        saver.save(2)
        (mount / "filler").write_bytes(bytes(os.statvfs(mount).f_bavail * 4096))
        saver.go_on()
        wait_until_it_failed(saver)
        with pytest.raises(SaveFailed, match=r"epoch_0_step_2[\s\S]*ENOSPC"):
            saver.save(3)
        os.unlink(mount / "filler")
        assert names(mount / "run") == ["LATEST", "epoch_0_step_1"]
        assert latest(mount / "run") == "epoch_0_step_1"
    finally:
        saver.checkpointer.close()
        subprocess.run(["umount", "-l", mount], check=True)


def test_a_publication_that_fails_in_the_background_is_reported(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def fails(source: Path, target: Path) -> None:
        if Path(target).name == "epoch_0_step_1":
            raise OSError(errno.EIO, os.strerror(errno.EIO), "the directory")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    saver.save(1)
    wait_until_it_failed(saver)
    with pytest.raises(
        SaveFailed, match=r"saving epoch_0_step_1 failed[\s\S]*the directory[\s\S]*EIO"
    ):
        saver.checkpointer.wait_for_save()


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def shared_memory() -> set[str]:
    """What lies in /dev/shm, but for what the crash campaigns keep there while they run."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("pair-", "crash-"))}


def killed(root: Path, while_writing: bool) -> None:
    saver = Saver(root / "run")
    if while_writing:
        saver.pause()
    saver.save(1)
    (root / "writer").write_text(str(saver.writer))
    if not while_writing:
        saver.checkpointer.wait()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("while_writing", [True, False])
def test_a_trainer_that_is_killed_takes_its_writer_along_and_the_next_start_is_right(
    tmp_path: Path, while_writing: bool
) -> None:
    before = shared_memory()
    (outcome,) = ranks.outcomes(killed, 1, tmp_path, while_writing, init=False)
    assert outcome.exitcode == -signal.SIGKILL
    writer = int((tmp_path / "writer").read_text())
    if while_writing:
        os.kill(writer, signal.SIGCONT)
    wait_until(lambda: not is_there(writer))
    assert shared_memory() - before == set()
    resumed = tiny.load(tmp_path / "run", tiny.recipe())
    assert (resumed.step if resumed else None) == (None if while_writing else 1)
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []


def test_where_memory_does_not_suffice_saves_are_synchronous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read_text = Path.read_text

    def little(path: Path, **options: Any) -> str:
        is_asked = str(path) == "/proc/meminfo"
        return "MemAvailable: 1024 kB\n" if is_asked else read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", little)
    saver = Saver(tmp_path)
    with caplog.at_level("WARNING", "automodel_ckpt"):
        assert saver.save(1).published
    assert "saves will be synchronous" in caplog.text and "are available" in caplog.text
    assert saver.save(2).published and caplog.text.count("will be synchronous") == 1
    saver.checkpointer.close()


def replace_data(made: Any) -> None:
    made.model.one_row.data = torch.full((1, 3), 7.0)


def replace_parameter(made: Any) -> None:
    made.model.one_row = torch.nn.Parameter(torch.full((1, 3), 8.0))
    made.optimizer.state.clear()
    made.optimizer.zero_grad()
    made.optimizer.param_groups[0]["params"] = [
        p for p in made.model.parameters() if p.requires_grad
    ]


def transpose_data(made: Any) -> None:
    made.model.brief.data = torch.arange(6).to(torch.bfloat16).reshape(2, 3).t()


def replace_moments(made: Any) -> None:
    entry = made.optimizer.state[made.model.embed]
    entry["exp_avg"] = torch.full_like(entry["exp_avg"], 9.0)


def other_rate(made: Any) -> None:
    made.optimizer.param_groups[0]["lr"] = 0.012345


def train_frozen(made: Any) -> None:
    made.model.frozen.requires_grad_(True)
    made.optimizer.add_param_group({"params": [made.model.frozen], "lr": 0.5})
    made.model.frozen.grad = torch.ones(5, 3)
    made.optimizer.step()


def resize(made: Any) -> None:
    made.model.register_buffer("empty", torch.ones(4, 3))


def other_dtype(made: Any) -> None:
    made.model.steps = made.model.steps.to(torch.int32)


def untie(made: Any) -> None:
    made.model.head = torch.nn.Parameter(torch.full((7, 4), 3.0), requires_grad=False)


def long_value(made: Any) -> None:
    made.optimizer.param_groups[0]["note"] = "long" * made.optimizer.param_groups[0].get(
        "length", 100
    )
    made.optimizer.param_groups[0]["length"] = 200


def shorter_value(made: Any) -> None:
    made.optimizer.param_groups[0]["note"] = "short"


CHANGES = {
    replace_data: True,
    transpose_data: True,
    replace_moments: True,
    other_rate: True,
    replace_parameter: False,
    train_frozen: False,
    resize: False,
    other_dtype: False,
    untie: False,
    long_value: False,
    shorter_value: False,
}
"""Whether the plan of the save before is still good after it."""


@pytest.mark.parametrize(
    "form",
    [
        next(iter(FORMATS)),
        *(pytest.param(each, marks=pytest.mark.further) for each in list(FORMATS)[1:]),
    ],
)
def test_whatever_changes_between_saves_is_seen_and_the_plan_is_kept_where_it_can_be(
    tmp_path: Path, form: str
) -> None:
    saver = Saver(tmp_path, **FORMATS[form])
    step = 0
    for change, keeps in [(lambda _: None, False), (lambda _: None, True), *CHANGES.items()]:
        change(saver.made)
        kept, step = tiny.kept_plan(saver.checkpointer), step + 1
        expected, rate = tiny.tensors_of(saver.made), saver.made.optimizer.param_groups[0]["lr"]
        saver.save(step)
        assert (tiny.kept_plan(saver.checkpointer) is kept) is keeps, change
        twin = copy.deepcopy(saver.made)  # loading into what is saved would change it
        for value in twin.model.state_dict().values():
            value.zero_()
        twin.optimizer.param_groups[0]["lr"] = 0.0
        tiny.train(saver.made, 1)
        saver.checkpointer.wait_for_save()
        assert is_intact(tmp_path / "LATEST")
        saver.checkpointer.load(discover(twin))
        found = tiny.tensors_of(twin)
        assert found.keys() >= expected.keys() and twin.optimizer.param_groups[0]["lr"] == rate
        assert all(
            torch.equal(found[name], expected[name]) for name in expected if name != "model.scratch"
        ), change
    saver.checkpointer.close()


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Saver]:
    """Its export of the first save stays under way: the writer is held as soon as the checkpoint is published."""
    made = Saver(tmp_path / "run", save_consolidated="every", assets={"model": AdapterFiles()})
    made.reports = _Holding(made)  # type: ignore[assignment]
    yield made
    made.checkpointer.close()


class _Holding(list[SaveReport]):
    def __init__(self, saver: Saver) -> None:
        self.saver = saver

    def append(self, report: SaveReport) -> None:
        # Before the test sees the report: it may then let the writer go on, or replace it.
        if not self:
            os.kill(self.saver.writer, signal.SIGSTOP)
        super().append(report)


def export_of(report: SaveReport) -> Path:
    return report.path / "model/consolidated/adapter_model.safetensors"


def test_an_export_in_the_background_begins_after_the_publication_and_is_waited_for_at_the_end(
    exporter: Saver,
) -> None:
    exporter.save(1)
    wait_until(lambda: bool(exporter.reports))
    (report,) = exporter.reports
    assert latest(report.path.parent) == "epoch_0_step_1" and not export_of(report).exists()
    tiny.train(exporter.made, 1)
    exporter.go_on()
    exporter.checkpointer.close()
    # The log did not state a command for what followed.
    assert export_of(report).is_file() and report.export_command is None


def test_an_export_in_the_background_that_fails_says_that_the_checkpoint_is_safe(
    exporter: Saver,
) -> None:
    exporter.save(1)
    wait_until(lambda: bool(exporter.reports))
    resource.prlimit(exporter.writer, resource.RLIMIT_NOFILE, (1, 1))
    exporter.go_on()
    wait_until_it_failed(exporter)
    with pytest.raises(
        ExportFailed, match=r"the checkpoint itself is safe\)[\s\S]*EMFILE[\s\S]*ulimit -n"
    ):
        exporter.checkpointer.wait_for_save()
    (report,) = exporter.reports
    assert not export_of(report).exists() and latest(report.path.parent)


def test_a_stop_ends_an_export_in_the_background_and_the_next_save_works(exporter: Saver) -> None:
    exporter.save(1)
    # Of the export, not of the checkpoint: a stop before it begins leaves the writer as it is, and the writer is held.
    wait_until(lambda: bool(exporter.reports) and exporter.is_writing)
    leftover = exporter.reports[0].path / f"model/.consolidated.staging-{'0' * 32}"
    leftover.mkdir()
    exporter.checkpointer.disable_exports()
    exporter.save(2)
    assert exporter.checkpointer.wait_for_save() and not leftover.exists()
    assert [report.step for report in exporter.reports] == [1, 2]
    assert [export_of(report).exists() for report in exporter.reports] == [False, False]
