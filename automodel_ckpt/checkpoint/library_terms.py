"""Messages in the terms of a program that uses the library: it has a state and options, and no recipe or flags.

The code that finds an error serves recipes and programs, and speaks of recipes. :func:`in_library_terms` is for the
methods that a program calls.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from automodel_ckpt.errors import AutomodelError, Problem

_Method = TypeVar("_Method", bound=Callable[..., Any])
_OPTIONS = "CheckpointOptions"
_NAMES = re.compile(r"--checkpoint\.(\w+) '\[([\w., -]+)\]'")
_FLAG = re.compile(r"--checkpoint\.(\w+) true\b")
_KEY = re.compile(r"(?<![\w./-])checkpoint\.([a-z]\w*)(?!\.py)")
_WORDS = (
    ("recipe attributes ", "state "),
    ("recipe attribute ", "state "),
    ("does not match this recipe", "does not match this program"),
    ("do not match this recipe", "do not match this program"),
    ("resume with the recipe that wrote it", "resume with the model and settings that wrote it"),
    ("the checkpoint's config.yaml is the recipe that wrote it", "see the checkpoint's config.yaml"),
    ("that is not part of the recipe's state", "that is not part of the state"),
    ("that is not an attribute of the recipe", "that is not part of the state"),
    ("assign the optimizer to an attribute of the recipe", "add the optimizer to the state"),
    ("assign their module to an attribute of the recipe", "add their module to the state"),
    ("in user code that the recipe names", "in the code of an object of the state"),
    ("an attribute's name cannot be used", "a name in the state cannot be used"),
    ("two attributes would be stored", "two objects would be stored"),
    ("give the recipe the saved groups", "give the optimizer the saved groups"),
    ("checkpoint.checkpoint_dir", "directory"),
    ("logging.level: debug shows", "the logger automodel_ckpt shows, at the level DEBUG,"),
    ("run the same command", "start the program again"),
)  # fmt: skip
_UNTRACKED = re.compile(r"(?:, )?or add '[^']*' to the recipe's `untracked`")
_GROUP_KEYS = re.compile(r": [\w.]+\.no_decay lists [^;]*")


def in_library_terms(method: _Method) -> _Method:
    """Let a method of :class:`Checkpointer` raise errors in terms of the library, unless a recipe gave its options."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        except AutomodelError as error:
            if self.is_library:
                error.problems = tuple(_translated(problem) for problem in error.problems)
            raise

    return call  # type: ignore[return-value]


def _translated(problem: Problem) -> Problem:
    where = "state" if problem.where == "recipe" else _text(problem.where)
    return replace(
        problem,
        what=_text(problem.what),
        where=where,
        hint=_text(problem.hint),
        restart=_text(problem.restart),
    )


def _text(text: str) -> str:
    if not text:
        return text
    for word, replacement in _WORDS:
        text = text.replace(word, replacement)
    text = _GROUP_KEYS.sub("", _UNTRACKED.sub(", or leave it out", text))
    text = _NAMES.sub(_option_of_names, text)
    text = _FLAG.sub(rf"{_OPTIONS}(\1=True)", text)
    return _KEY.sub(rf"{_OPTIONS}.\1", text)


def _option_of_names(match: re.Match[str]) -> str:
    names = [name.strip() for name in match[2].split(",")]
    return f"{_OPTIONS}({match[1]}={names})"
