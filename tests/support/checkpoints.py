"""Checkpoints as docs/format.md describes them and ``ckpt`` verifies them."""

import contextlib
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from automodel_ckpt import errors
from automodel_ckpt.cli.ckpt import main

_ERRORS: dict[int, type[errors.AutomodelError]] = {
    errors.EXIT_USAGE: errors.RecipeError,
    errors.EXIT_UNUSABLE: errors.CheckpointUnusable,
    errors.EXIT_SAVE_FAILED: errors.SaveFailed,
}


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "MANIFEST.json").read_text())
    return found


def is_intact(checkpoint: Path, *, deep: bool = False) -> bool:
    """Whether ``ckpt verify`` finds nothing wrong, with *deep* also in the digest of each slice."""
    return main(["verify", str(checkpoint), *(["--deep"] if deep else [])]) == 0


def goodput_of(run: Path) -> dict[str, Any]:
    """What ``ckpt goodput --json`` prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(["goodput", str(run), "--json"]) == 0
    found: dict[str, Any] = json.loads(text.getvalue())
    return found


def stored_names(checkpoint: Path, tree: str) -> set[str]:
    """The names of the tensors of a tree, such as ``model``."""
    return set(manifest_of(checkpoint)["trees"][tree]["tensors"])


def stored_bytes(checkpoint: Path, tree: str, name: str) -> bytes:
    """The elements of a tensor in row-major order, put together from the slices that the manifest lists."""
    tensor = manifest_of(checkpoint)["trees"][tree]["tensors"][name]
    shape, slices = tensor["shape"], tensor["slices"]
    size = sum(each["nbytes"] for each in slices) // max(1, math.prod(shape))
    whole = np.zeros([*shape, size], np.uint8)
    for each in slices:
        with (checkpoint / each["file"]).open("rb") as file:
            file.seek(each["start"])
            content = np.frombuffer(file.read(each["nbytes"]), np.uint8)
        place = tuple(
            slice(first, first + number)
            for first, number in zip(each["offsets"], each["sizes"], strict=True)
        )
        whole[place] = content.reshape([*each["sizes"], size])
    return whole.tobytes()


def consolidate(
    source: Path,
    output: Path | None = None,
    *,
    cast_dtype: str | None = None,
    num_procs: int = 1,
    num_threads: int = 5,
) -> SimpleNamespace:
    """Export with ``ckpt consolidate``. Returns what it prints as JSON, and in *said* what it logs.

    Raises the error that its exit code stands for, with what it printed.
    """
    words = ["consolidate", str(source), "--json", "--nproc", str(num_procs)]
    words += ["--num-threads", str(num_threads)]
    words += ["--output", str(output)] if output is not None else []
    words += ["--cast-dtype", cast_dtype] if cast_dtype is not None else []
    printed, logged = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(logged):
        code = main(words)
    if code != 0:
        raise _ERRORS[code](logged.getvalue(), where="", value="", hint="")
    report = SimpleNamespace(**json.loads(printed.getvalue()), said=logged.getvalue())
    report.output = Path(report.output)
    return report
