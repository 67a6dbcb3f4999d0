"""The commit protocol's single steps on a real file system."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import xxhash

from automodel_ckpt.checkpoint.export import files
from automodel_ckpt.checkpoint.files import durable_file
from automodel_ckpt.checkpoint.files.durable_file import FileRecord
from automodel_ckpt.checkpoint.parts import commit


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The persisting system calls, in order, each with the name of what it touches."""
    seen: list[tuple[str, str]] = []

    def name_of(argument: Any) -> str:
        path = (
            os.readlink(f"/proc/self/fd/{argument}")
            if isinstance(argument, int)
            else os.fspath(argument)
        )
        return Path(path).name.split(".staging-")[0].split(".trash-")[0]

    def recording(call: str, real: Any) -> Any:
        def record(*arguments: Any, **more: Any) -> Any:
            seen.append(
                (call, name_of(arguments[1] if call in ("rename", "symlink") else arguments[0]))
            )
            return real(*arguments, **more)

        return record

    for call in ("fsync", "rename", "mkdir", "symlink"):
        monkeypatch.setattr(os, call, recording(call, getattr(os, call)))
    return seen


@pytest.mark.parametrize("size", [8 << 20, (8 << 20) - 1, (12 << 20) + 4095, 3])
@pytest.mark.parametrize("hint", [0, 8 << 20])
def test_a_file_of_any_size_holds_what_was_written_whichever_way_it_took(
    tmp_path: Path, size: int, hint: int
) -> None:
    data = os.urandom(size)
    with durable_file.DurableFile(tmp_path / "file", nbytes=hint) as file:
        at, pieces = 0, [1, 100, 4095, 4097, 5_000_000]
        while at < size:
            at += file.write(memoryview(data)[at : at + pieces[at % 5]])
    assert (tmp_path / "file").read_bytes() == data
    assert file.close() == FileRecord(size, "xxh3_128:" + xxhash.xxh3_128_hexdigest(data))


def test_a_file_system_that_takes_o_direct_and_refuses_the_write_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.pwrite, []

    def picky(descriptor: int, data: Any, position: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(position)
            raise OSError(22, os.strerror(22))
        return real(descriptor, data[: max(1, len(data) // 3)], position)

    monkeypatch.setattr(os, "pwrite", picky)
    data = os.urandom((8 << 20) + 77)
    with durable_file.DurableFile(tmp_path / "file", nbytes=len(data)) as file:
        file.write(data)
    assert refused == [0] and (tmp_path / "file").read_bytes() == data


def test_a_file_that_exists_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError):
        durable_file.DurableFile(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_the_steps_of_a_publication_come_in_the_order_that_survives_a_power_cut(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    staging = commit.reserve(tmp_path, "epoch_0_step_20")
    (staging / "model").mkdir()
    commit.write_file(staging / "model" / "shard", b"weights")
    commit.finalize(staging, b"{}")
    commit.publish(staging, "epoch_0_step_20")
    commit.point(tmp_path, "LATEST", "epoch_0_step_20")
    steps = [call for call in calls if call[0] != "mkdir"]
    manifest = next(name for _, name in steps if name.startswith(".MANIFEST.json."))
    assert steps == [
        ("fsync", "shard"),
        ("fsync", "model"),
        ("fsync", ".epoch_0_step_20"),
        ("fsync", manifest),
        ("rename", "MANIFEST.json"),
        ("fsync", ".epoch_0_step_20"),
        ("rename", "epoch_0_step_20"),
        ("fsync", tmp_path.name),
        ("symlink", steps[-3][1]),
        ("rename", "LATEST"),
        ("fsync", tmp_path.name),
    ]


def test_a_checkpoint_with_a_name_that_is_not_durable_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = commit.reserve(tmp_path, "epoch_0_step_20")
    commit.finalize(staging, b"{}")
    fails_once = itertools.chain([OSError(errno.EIO, "")], itertools.repeat(None))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=fails_once))
    with pytest.raises(OSError, match=str(errno.EIO)):
        commit.publish(staging, "epoch_0_step_20")
    assert os.listdir(tmp_path) == []


def test_a_new_export_is_durable_before_the_old_one_is_deleted_without_a_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, str]]
) -> None:
    for name in ("new", "consolidated"):
        (tmp_path / name).mkdir()
    real_rmtree = shutil.rmtree

    def remove(path: Any, **options: Any) -> None:
        calls.append(("rmtree", Path(path).name.split("-")[0]))
        real_rmtree(path, **options)

    monkeypatch.setattr(commit, "exchange", lambda a, b: False)
    monkeypatch.setattr(shutil, "rmtree", remove)
    calls.clear()
    files._publish(tmp_path / "new", tmp_path / "consolidated", lambda text: None)
    deleted = calls.index(("rmtree", ".consolidated.previous"))
    renamed = calls.index(("rename", "consolidated"))
    assert ("fsync", tmp_path.name) in calls[renamed:deleted]


def test_a_directory_that_a_copy_left_in_a_pointers_place_makes_way(tmp_path: Path) -> None:
    for attempt in range(2):
        (tmp_path / "LATEST").unlink(missing_ok=True)
        (tmp_path / "LATEST").mkdir()
        (tmp_path / "LATEST" / "losses.json").write_text(str(attempt))
        commit.point(tmp_path, "LATEST", "epoch_0_step_1")
        assert os.readlink(tmp_path / "LATEST") == "epoch_0_step_1"
    kept = [tmp_path / f"LATEST.copied-{number}" / "losses.json" for number in (1, 2)]
    assert [path.read_text() for path in kept] == ["0", "1"]
    (tmp_path / "LOWEST_VAL").mkdir()
    commit.unpoint(tmp_path, "LOWEST_VAL")
    assert not (tmp_path / "LOWEST_VAL").exists() and (tmp_path / "LOWEST_VAL.copied-1").is_dir()


def test_a_pin_that_is_made_while_a_run_starts_and_clears_leftovers_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, cleared = os.symlink, []

    def make_and_clear(target: str, link: Path) -> None:
        real(target, link)
        if not cleared:
            cleared.extend(commit.recover(tmp_path))

    monkeypatch.setattr(os, "symlink", make_and_clear)
    commit.point(tmp_path, "pin-epoch_0_step_20", "epoch_0_step_20")
    assert len(cleared) == 1 and [path.name for path in tmp_path.iterdir()] == [
        "pin-epoch_0_step_20"
    ]


def test_where_links_cannot_be_made_a_text_file_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(os, "symlink", refuse)
    commit.point(tmp_path, "LATEST", "epoch_0_step_20")
    assert (tmp_path / "LATEST.txt").read_text() == "epoch_0_step_20\n"
    assert commit.pointed(tmp_path, "LATEST") == "epoch_0_step_20"
    monkeypatch.undo()
    commit.point(tmp_path, "LATEST", "epoch_0_step_40")
    assert (
        commit.pointed(tmp_path, "LATEST") == "epoch_0_step_40"
        and not (tmp_path / "LATEST.txt").exists()
    )


@pytest.mark.parametrize("target", ["../elsewhere", "/etc", "notes", "epoch_0_step_20/model", ""])
def test_a_pointer_to_anything_but_a_checkpoint_points_nowhere(tmp_path: Path, target: str) -> None:
    (tmp_path / "LATEST.txt").write_text(target)
    assert commit.pointed(tmp_path, "LATEST") is None
    if target:
        (tmp_path / "LATEST").symlink_to(target)
        assert commit.pointed(tmp_path, "LATEST") is None


def test_recovery_removes_its_own_leftovers_and_nothing_else(tmp_path: Path) -> None:
    mine = [".epoch_0_step_20.staging-" + "0" * 32, ".trash-" + "1" * 32, ".LATEST." + "2" * 32]
    mine += [
        f".{name}." + "4" * 32
        for name in (
            *("run.lock", "pin-epoch_0_step_2", ".verified.json", "LATEST.txt", ".remote.json"),
            *(".remote-part.json", ".remote-start.json", ".hub.json"),
            *(".upload-epoch_0_step_2.json", ".upload-epoch_1_step_9.superseded-1.json"),
        )
    ]
    foreign = [
        "epoch_0_step_20",
        ".git",
        ".cache.staging-x",
        ".LATEST.txt",
        "notes",
        ".trash-cans",
        ".env." + "3" * 32,
        "..env.json." + "3" * 32,
        "..upload-mine.json." + "3" * 32,
    ]
    for name in mine[:2] + foreign:
        (tmp_path / name).mkdir()
    for name in mine[2:]:
        (tmp_path / name).symlink_to("epoch_0_step_20")
    assert sorted(commit.recover(tmp_path)) == sorted(mine)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(foreign)


def test_a_link_named_like_a_leftover_is_removed_but_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    run = tmp_path / "run"
    run.mkdir()
    (run / (".trash-" + "0" * 32)).symlink_to(outside)
    commit.recover(run)
    assert (outside / "precious").exists() and list(run.iterdir()) == []


def test_a_withdrawn_checkpoint_has_lost_its_name_durably_before_its_files_are_deleted(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    (tmp_path / "epoch_0_step_20").mkdir()
    calls.clear()
    commit.withdraw(tmp_path / "epoch_0_step_20")
    assert [call for call, _ in calls] == ["rename", "fsync"]
    assert calls[1] == ("fsync", tmp_path.name)


def test_a_superseded_checkpoint_has_its_new_name_durably_before_its_old_name_is_used_again(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    (tmp_path / "epoch_0_step_20").mkdir()
    calls.clear()
    aside = commit.supersede(tmp_path, "epoch_0_step_20")
    assert calls == [("rename", aside), ("fsync", tmp_path.name)]
