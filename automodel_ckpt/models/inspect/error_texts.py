"""Texts of error messages: the first lines of an exception, and names that are similar to an unknown one."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from automodel_ckpt.errors import AutomodelError, RecipeError

# Colors and other control sequences of terminals (ECMA-48).
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def first_line(error: BaseException, num_lines: int = 1) -> str:
    """The first lines of an exception's message without control sequences, at most 400 characters; its class if the
    message is empty."""
    text = _CONTROL.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = textwrap.shorten(" ".join(lines[:num_lines]), 400, placeholder=" ...")
    return text or type(error).__name__


@contextmanager
def naming_files(
    what: str, files: str, *, hint: str = "", kind: type[AutomodelError] = RecipeError
) -> Iterator[None]:
    """Raise *kind* with the text *what* for any error of a library that uses the *files* of a model.

    A value in such a file that the library does not expect can make it raise anything. Errors of this program and
    exceeded memory keep their type.
    """
    try:
        yield
    except (AutomodelError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        hint = hint or "correct the value in the file, or download the model again"
        value = f"{type(error).__name__}: {first_line(error, 5)}"
        raise kind(what, where=files, value=value, hint=hint) from error


def did_you_mean(name: str, known: set[str]) -> str:
    """A hint with the known names that are similar to *name*, or else with a few known names."""
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"there are, for example, {', '.join(sorted(known)[:5])}"
