"""Rename the tensors of an import by the user's file: ``ckpt import --names FILE``. Imports no torch.

The file is YAML or JSON, a mapping from names in the source to names in the checkpoint. ``{...}`` in a name, as in
``encoder/layer_{i}/kernel: encoder.layer.{i}.weight``, is any decimal number, which is the same on both sides. A tensor
with a new name that is empty or null is left out. Names that no line matches are kept.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.files.type_aliases import TextDict
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.convert.formats.nemo.plain_yaml import parse_yaml
from automodel_ckpt.errors import RecipeError

_MAX_BYTES = 4 << 20
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)
# What BaseLoader returns for a line without a value, and for JSON's null.
_LEFT_OUT = ("", "null", "~")


def rename(module: Tensors, path: Path, omitted: list[str]) -> Tensors:
    """Return the tensors of *module* under the names that the file *path* gives them. What it leaves out is *omitted*.

    Raises :class:`RecipeError` if a line matches no tensor, or two tensors get one name.
    """
    lines = _read(path)
    patterns = {text: _pattern(path, text, new) for text, new in lines.items()}
    general = list(filter(_PLACEHOLDER.search, lines))
    unused = dict.fromkeys(lines)

    def new_name(fqn: str) -> str:
        # Exact names are not compared with each tensor: a model of many experts can have a hundred thousand.
        for text in [fqn] if fqn in lines else general:
            match = patterns[text].fullmatch(fqn)
            if match is not None:
                unused.pop(text, None)
                return _filled(lines[text], match)
        return fqn

    names = {fqn: new_name(fqn) for fqn in module.tensors}
    tensors = {name: module.tensors[fqn].renamed(name) for fqn, name in names.items() if name}
    tied = {
        new_name(alias): names[stored]
        for alias, stored in module.tied.items()
        if names[stored] and new_name(alias)
    }
    others = [fqn for fqn, name in names.items() if not name]
    if len(tensors) + len(others) < len(module.tensors):
        (twice, _), *_ = Counter(filter(None, names.values())).most_common(1)
        raise _wrong(path, f"two tensors get the name {twice!r}")
    if unused:
        raise _wrong(path, f"no tensor has the name {next(iter(unused))!r}")
    if not tensors:
        raise _wrong(path, "all tensors are left out")
    if others:
        omitted.append(f"{counted(len(others), 'tensor')} that {path.name} leaves out")
    return Tensors(module.root, tensors, tied)


def _filled(replacement: str, numbers: re.Match[str]) -> str:
    return _PLACEHOLDER.sub(lambda match: numbers[match[1]], replacement)


def _read(path: Path) -> TextDict:
    try:
        real = path.resolve()
        value = parse_yaml(read_safely(real.parent, real.name, limit=_MAX_BYTES).decode())
    except (OSError, ValueError) as error:
        raise _wrong(path, str(error)[:300]) from error
    if not isinstance(value, dict):
        raise _wrong(path, "it is not a mapping of names to names")
    lines = {}
    for text, replacement in value.items():
        if not isinstance(text, str) or not isinstance(replacement, str):
            raise _wrong(path, f"the new name of {text!r:.200} is not text")
        lines[text] = "" if replacement in _LEFT_OUT else replacement
    return lines


def _pattern(path: Path, text: str, replacement: str) -> re.Pattern[str]:
    """Return the pattern of names that the line *text* matches."""
    # split() with a group returns the text and the placeholders' names alternately.
    parts = _PLACEHOLDER.split(text)
    names = dict.fromkeys(parts[1::2])
    pattern = re.escape(parts[0])
    for name, literal in zip(parts[1::2], parts[2::2], strict=True):
        group = f"(?P<{name}>[0-9]+)" if f"(?P<{name}>" not in pattern else f"(?P={name})"
        pattern += group + re.escape(literal)
    unknown = sorted(set(_PLACEHOLDER.findall(replacement)) - names.keys())
    if unknown:
        raise _wrong(path, f"{{{unknown[0]}}} is only in the new name of {text!r:.200}")
    return re.compile(pattern, re.ASCII)


def _wrong(path: Path, value: str) -> RecipeError:
    return RecipeError(
        "the file of names cannot be used",
        f"ckpt import --names {path}",
        value,
        "one line for each name: NAME IN THE SOURCE: NEW NAME; `ckpt show --tensors` lists the names",
    )
