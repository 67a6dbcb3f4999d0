"""Rename the tensors of an import by the user's file: ``ckpt import --names FILE``. Imports no torch.

The file is YAML or JSON, a mapping from names in the source to names in the checkpoint. ``{...}`` in a name, as in
``encoder/layer_{i}/kernel: encoder.layer.{i}.weight``, is any decimal number, which is the same on both sides. A tensor
whose new name is empty or null is left out. Names that no line matches are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.convert.formats.nemo.plain_yaml import parse_yaml
from automodel_ckpt.errors import RecipeError

_MAX_BYTES = 4 << 20
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)
# What BaseLoader returns for a line without a value, and for JSON's null.
_LEFT_OUT = ("", "null", "~")


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    pattern: re.Pattern[str]
    replacement: str


@dataclass(frozen=True, slots=True)
class Renaming:
    """Weights under other names: *before* are those of the source. *left_out* states in words what is left out."""

    before: Tensors
    after: Tensors
    left_out: tuple[str, ...]


def rename(module: Tensors, path: Path) -> Renaming:
    """Rename the tensors of *module* by the file *path*.

    Raises :class:`RecipeError` if a line matches no tensor, or two tensors get one name.
    """
    lines = _read(path)
    # Exact names are not compared with each tensor: a model of many experts can have a hundred thousand.
    exact = {line.text: [line] for line in lines if not _PLACEHOLDER.search(line.text)}
    patterns = [line for line in lines if line.text not in exact]
    unused = dict.fromkeys(line.text for line in lines)
    renamed: dict[str, Tensor] = {}
    num_left_out = 0
    for fqn, tensor in module.tensors.items():
        name = fqn
        for line in exact.get(fqn, patterns):
            match = line.pattern.fullmatch(fqn)
            if match is not None:
                unused.pop(line.text, None)
                name = _filled(line.replacement, match.groupdict())
                break
        if name in _LEFT_OUT:
            num_left_out += 1
            continue
        if name in renamed:
            raise _wrong(path, f"two tensors get the name {name!r}")
        renamed[name] = tensor.renamed(name)
    if unused:
        raise _wrong(path, f"no tensor has the name {next(iter(unused))!r}")
    if not renamed:
        raise _wrong(path, "all tensors are left out")
    tied = {alias: stored for alias, stored in module.tied.items() if stored in renamed}
    left_out: tuple[str, ...] = ()
    if num_left_out:
        left_out = (f"{counted(num_left_out, 'tensor')} that {path.name} leaves out",)
    return Renaming(module, Tensors(module.root, renamed, tied), left_out)


def without_prefix(module: Tensors, prefix: str) -> Renaming:
    """Return the tensors of *module* whose names begin with *prefix* without it."""

    def stripped(name: str) -> str:
        return name.removeprefix(prefix)

    tensors = {
        stripped(name): tensor.renamed(stripped(name))
        for name, tensor in module.tensors.items()
        if name.startswith(prefix)
    }
    tied = {
        stripped(alias): stripped(stored)
        for alias, stored in module.tied.items()
        if alias.startswith(prefix) and stored.startswith(prefix)
    }
    others = [name for name in module.tensors if not name.startswith(prefix)]
    left_out: tuple[str, ...] = ()
    if others:
        other = f"{counted(len(others), 'tensor')} without the prefix of the model"
        left_out = (f"{other}, such as {others[0][:200]}",)
    return Renaming(module, Tensors(module.root, tensors, tied), left_out)


def _filled(replacement: str, numbers: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: numbers[match[1]], replacement)


def _read(path: Path) -> list[_Line]:
    try:
        real = path.resolve()
        value = parse_yaml(read_safely(real.parent, real.name, limit=_MAX_BYTES).decode())
    except (OSError, ValueError) as error:
        raise _wrong(path, str(error)[:300]) from error
    if not isinstance(value, dict):
        raise _wrong(path, "it is not a mapping of names to names")
    lines: list[_Line] = []
    for text, replacement in value.items():
        if not isinstance(text, str) or not isinstance(replacement, str):
            raise _wrong(path, f"the new name of {text!r:.200} is not text")
        lines.append(_line(path, text, replacement))
    return lines


def _line(path: Path, text: str, replacement: str) -> _Line:
    # split() with a group returns the text and the placeholders' names alternately.
    parts = _PLACEHOLDER.split(text)
    pattern = ""
    names: set[str] = set()
    for number, part in enumerate(parts):
        if number % 2 == 0:
            pattern += re.escape(part)
        elif part in names:
            pattern += f"(?P={part})"
        else:
            names.add(part)
            pattern += f"(?P<{part}>[0-9]+)"
    unknown = sorted(set(_PLACEHOLDER.findall(replacement)) - names)
    if unknown:
        raise _wrong(path, f"{{{unknown[0]}}} is only in the new name of {text!r:.200}")
    return _Line(text, re.compile(pattern, re.ASCII), replacement)


def _wrong(path: Path, value: str) -> RecipeError:
    return RecipeError(
        "the file of names cannot be used",
        where=f"ckpt import --names {path}",
        value=value,
        hint="one line for each name: NAME IN THE SOURCE: NEW NAME; `ckpt show --tensors` lists the names",
    )
