"""The repository holds sources, not what the program writes when it runs."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAX_FILE_BYTES = 300_000
NO_GIT = "a source archive without its git history"


def tracked(*arguments: str) -> list[Path]:
    """Paths that `git ls-files` prints, relative to the repository; skips where there is no repository."""
    if not (ROOT / ".git").exists():
        pytest.skip(NO_GIT)
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in done.stdout.split("\0") if name]


def test_no_tracked_file_matches_gitignore() -> None:
    assert tracked("--cached", "--ignored", "--exclude-standard") == []


def test_no_tracked_file_is_a_model() -> None:
    files = [path for path in tracked() if (ROOT / path).is_file()]
    assert len(files) > 100
    assert [path for path in files if (ROOT / path).stat().st_size > MAX_FILE_BYTES] == []
