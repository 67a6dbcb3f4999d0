import logging
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from automodel_ckpt.base.store_url import cache_directory
from automodel_ckpt.data.samples.samples import cached
from automodel_ckpt.errors import RecipeError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMODEL_CKPT_CACHE", str(tmp_path / "cache"))


def write(directory: Path) -> None:
    (directory / "data").write_text("complete")


def test_it_is_built_once_per_key() -> None:
    built: list[Path] = []

    def build(directory: Path) -> None:
        built.append(directory)
        write(directory)

    paths = [cached("samples", ("key", number), build) for number in (1, 1, 2)]
    assert paths[0] == paths[1] != paths[2]
    assert len(built) == 2
    assert (paths[0] / "data").read_text() == "complete"


def test_a_failed_or_killed_build_leaves_nothing_that_is_taken_for_complete() -> None:
    def fail(directory: Path) -> None:
        write(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached("samples", (), fail)
    assert [
        path.name for path in cache_directory().iterdir() if not path.name.endswith(".lock")
    ] == []
    lock = next(cache_directory().iterdir())
    (cache_directory() / lock.name.replace(".lock", ".partial")).mkdir()
    assert (cached("samples", (), write) / "data").read_text() == "complete"


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_variable() -> None:
    cache_directory().parent.mkdir(exist_ok=True)
    cache_directory().write_text("a file")
    with pytest.raises(RecipeError, match="AUTOMODEL_CKPT_CACHE"):
        cached("samples", (), write)


def test_a_process_that_waits_for_another_one_reports_for_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    is_building = threading.Event()

    def build_until_reported(directory: Path) -> None:
        is_building.set()
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        write(directory)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cached, "samples", (), build_until_reported)
        assert is_building.wait(60)
        second = cached("samples", (), lambda directory: pytest.fail("it was built twice"))
        assert first.result() == second
    [message] = caplog.messages
    assert "waiting until another process has prepared the same data" in message
    assert str(cache_directory()) in message


def test_without_a_home_that_can_be_written_it_is_this_users_in_the_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.delenv("AUTOMODEL_CKPT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    built = cached("samples", (), write)
    assert built.parent == tmp_path / f"automodel_ckpt-{os.getuid()}"
    assert built.parent.stat().st_mode & 0o077 == 0
    stranger = os.getuid() + 1
    built.parent.rename(tmp_path / f"automodel_ckpt-{stranger}")
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    with pytest.raises(RecipeError, match="another user"):
        cached("samples", (), write)
