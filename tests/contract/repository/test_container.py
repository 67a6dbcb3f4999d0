"""The image has what an installation needs, and checkpoints that would go with a container are warned of."""

import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from automodel_ckpt.cli.train import main
from tests.support import ranks
from tests.support.models import tiny
from tests.support.runs.training import RECIPE

ROOT = Path(__file__).parents[3]
NEW_MOUNTS, PRIVATE = 0x20000, (1 << 18) | (1 << 14)


def docker_problem() -> str | None:
    if shutil.which("docker") is None:
        return "there is no docker command"
    try:
        done = subprocess.run(
            ["docker", "info"], capture_output=True, text=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        return "no docker daemon answers within 20 s"
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@pytest.mark.timeout(3600)
def test_the_image_builds_and_its_command_answers() -> None:
    if problem := docker_problem():
        pytest.skip(problem)
    index = "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    subprocess.run(
        ["docker", "build", "-t", "automodel_ckpt:test", "--build-arg", index, ROOT], check=True
    )
    done = subprocess.run(
        ["docker", "run", "--rm", "automodel_ckpt:test", "--list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "tiny_llama_python_docs" in done.stdout


def test_what_the_image_copies_is_there_and_is_all_that_a_wheel_is_made_of() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = {
        name
        for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE)
        for name in line.split()[:-1]
    }
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied == kept and all((ROOT / name).exists() for name in copied)
    links = {
        os.readlink(path).removeprefix("../")
        for path in (ROOT / "automodel_ckpt").iterdir()
        if path.is_symlink()
    }
    project = (ROOT / "pyproject.toml").read_text()
    named = set(re.findall(r'^(?:readme = |license-files = \[)"([^"]+)"', project, re.MULTILINE))
    assert copied == {"pyproject.toml", "constraints.txt", "automodel_ckpt"} | links | named


def on_an_overlay(base: Path) -> int | str:
    """In this process alone *merged* becomes an overlay; what a run does there, or why there is none."""
    merged = base / "merged with a space"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS) or libc.mount(b"none", b"/", None, PRIVATE, None):
        return os.strerror(ctypes.get_errno())
    options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, merged]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip()
    logging.basicConfig(level="WARNING", stream=sys.stdout, force=True)
    checkpointer = tiny.checkpointer(merged / "run")
    checkpointer.open()
    checkpointer.close()
    return main(
        ["--dry-run", str(base / "recipe.yaml"), "--checkpoint.checkpoint_dir", str(merged / "dry")]
    )


def test_checkpoints_on_an_overlay_file_system_are_warned_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("lower", "upper", "work", "merged with a space"):
        (tmp_path / name).mkdir()
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (ended,) = ranks.run(partial(on_an_overlay, tmp_path), 1, init=False)
    if isinstance(ended, str):
        pytest.skip(f"no overlay can be mounted here: {ended}")
    assert ended == 0
    said = "".join(capfd.readouterr())
    assert f"WARNING:automodel_ckpt:{tmp_path}/merged with a space/run is on an overlay" in said
    assert re.search(r"warning: +\S.*merged with a space/dry is on an overlay", said)
