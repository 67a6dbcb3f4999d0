"""`make gpu` without a GPU: parts run with tiny models, and their figures become a table."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.runs import plain
from tests.support.servers.command_server import CommandServer
from tools.gpu.session import read_all
from tools.support import ROOT


def test_a_dry_run_of_a_part_has_figures_and_leaves_nothing(
    tmp_path: Path, commands: CommandServer
) -> None:
    """``make gpu-dry-run`` runs all parts."""
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    environment = {**os.environ, "GPU_SCRATCH": str(scratch), "PYTHONPATH": str(ROOT)}
    words = ("-m", "tools.gpu", "--dry-run", "--out", str(out), "head")
    done = commands.run("python", *words, cwd=ROOT, timeout=170, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    ((name, result),) = read_all(out).items()
    assert (name, result["failed"], result["ended"]) == ("head", {}, "done")
    assert result["is_dry_run"] and result["figures"]
    assert list(scratch.iterdir()) == []


@pytest.fixture
def precision() -> Iterator[None]:
    """Restore how float32 matrices are multiplied."""
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.usefixtures("precision")
def test_losses_to_compare_with_are_exact_after_a_recipe_that_uses_tf32(tmp_path: Path) -> None:
    plain.write_small("llama", {}, tmp_path)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    assert plain.losses(tmp_path, "cpu", []) == []
    # torch raises an error here if two of its interfaces were mixed, and a product of a CPU can use TF32, too.
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
