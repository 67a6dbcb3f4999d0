"""Rename the tensors of an import by the user's file: ``ckpt import --names FILE``. Imports no torch.

The file is YAML or JSON, a mapping from names in the source to names in the checkpoint. ``{...}`` in a name, as in
``encoder/layer_{i}/kernel: encoder.layer.{i}.weight``, is any decimal number, which is the same on both sides. A tensor
whose new name is empty or null is left out. Names that no line matches are kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.convert.formats.nemo.plain_yaml import parse_yaml
from automodel_ckpt.convert.type_aliases import TensorDict
from automodel_ckpt.errors import RecipeError

_MAX_BYTES = 4 << 20
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)
# What BaseLoader returns for a line without a value, and for JSON's null.
_LEFT_OUT = ("", "null", "~")


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
    patterns = {text: _pattern(path, text, new) for text, new in lines.items()}
    # Exact names are not compared with each tensor: a model of many experts can have a hundred thousand.
    general = [text for text in lines if _PLACEHOLDER.search(text)]
    unused = dict.fromkeys(lines)
    renamed: TensorDict = {}
    for fqn, tensor in module.tensors.items():
        name = fqn
        is_exact = fqn in lines and fqn not in general
        for text in [fqn] if is_exact else general:
            match = patterns[text].fullmatch(fqn)
            if match is not None:
                unused.pop(text, None)
                name = _filled(lines[text], match)
                break
        if name in renamed:
            raise _wrong(path, f"two tensors get the name {name!r}")
        if name not in _LEFT_OUT:
            renamed[name] = tensor.renamed(name)
    if unused:
        raise _wrong(path, f"no tensor has the name {next(iter(unused))!r}")
    if not renamed:
        raise _wrong(path, "all tensors are left out")
    tied = {alias: stored for alias, stored in module.tied.items() if stored in renamed}
    left_out: tuple[str, ...] = ()
    if num_left_out := len(module.tensors) - len(renamed):
        left_out = (f"{counted(num_left_out, 'tensor')} that {path.name} leaves out",)
    return Renaming(module, Tensors(module.root, renamed, tied), left_out)


def without_prefix(module: Tensors, prefix: str) -> Renaming:
    """Return the tensors of *module* whose names begin with *prefix* without it."""
    tensors: TensorDict = {}
    others: list[str] = []
    for name, tensor in module.tensors.items():
        if name.startswith(prefix):
            tensors[name.removeprefix(prefix)] = tensor.renamed(name.removeprefix(prefix))
        else:
            others.append(name)
    tied: dict[str, str] = {}
    for alias, stored in module.tied.items():
        if alias.startswith(prefix) and stored.startswith(prefix):
            tied[alias.removeprefix(prefix)] = stored.removeprefix(prefix)
    left_out: tuple[str, ...] = ()
    if others:
        other = f"{counted(len(others), 'tensor')} without the prefix of the model"
        left_out = (f"{other}, such as {others[0][:200]}",)
    return Renaming(module, Tensors(module.root, tensors, tied), left_out)


def _filled(replacement: str, numbers: re.Match[str]) -> str:
    return _PLACEHOLDER.sub(lambda match: numbers[match[1]], replacement)


def _read(path: Path) -> dict[str, str]:
    try:
        real = path.resolve()
        value = parse_yaml(read_safely(real.parent, real.name, limit=_MAX_BYTES).decode())
    except (OSError, ValueError) as error:
        raise _wrong(path, str(error)[:300]) from error
    if not isinstance(value, dict):
        raise _wrong(path, "it is not a mapping of names to names")
    for text, replacement in value.items():
        if not isinstance(text, str) or not isinstance(replacement, str):
            raise _wrong(path, f"the new name of {text!r:.200} is not text")
    return value


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
        where=f"ckpt import --names {path}",
        value=value,
        hint="one line for each name: NAME IN THE SOURCE: NEW NAME; `ckpt show --tensors` lists the names",
    )
