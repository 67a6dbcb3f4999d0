"""Rename the tensors of an import by the user's file: ``ckpt import --names FILE``. Imports no torch.

The file is YAML or JSON, a mapping from names in the source to names in the checkpoint. ``{...}`` in a name, as in
``encoder/layer_{i}/kernel: encoder.layer.{i}.weight``, is any decimal number, which is the same on both sides. A tensor
whose new name is empty or null is left out. Names that no line matches are kept.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.convert.formats.nemo.plain_yaml import parse_yaml
from automodel_ckpt.convert.formats.torch.training_state import (
    OptimizerState,
    ParameterGroup,
    TrainingState,
)
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


class NamesFile:
    """The new names of tensors in the file *path*. Raises :class:`RecipeError` if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = _read(path)
        # Most names are given exactly; only the others are compared with each pattern.
        self._exact = {
            line.text: line for line in self._lines if not _PLACEHOLDER.search(line.text)
        }
        self._patterns = [line for line in self._lines if line.text not in self._exact]

    def tensors(self, module: Tensors) -> tuple[Tensors, int]:
        """Return *module* under the new names, and the number of tensors that the file leaves out.

        Raises :class:`RecipeError` if a line matches no tensor, or two tensors get one name.
        """
        used: set[str] = set()
        renamed: dict[str, Tensor] = {}
        num_left_out = 0
        for fqn, tensor in module.tensors.items():
            line, name = self._new_name(fqn)
            if line is not None:
                used.add(line.text)
            if name is None:
                num_left_out += 1
                continue
            if name in renamed:
                raise _wrong(self._path, f"two tensors get the name {name!r}")
            renamed[name] = tensor.renamed(name)
        for line in self._lines:
            if line.text not in used:
                raise _wrong(self._path, f"no tensor has the name {line.text!r}")
        if not renamed:
            raise _wrong(self._path, "all tensors are left out")
        tied = {alias: stored for alias, stored in module.tied.items() if stored in renamed}
        return Tensors(module.root, renamed, tied), num_left_out

    def optimizer(
        self, state: OptimizerState, before: Container[str], after: Container[str]
    ) -> OptimizerState:
        """Return the *state* of an optimizer under the new names, without that of tensors which are left out.

        *before* has the names of the weights in the source, and *after* those under which they are imported. An
        optimizer that numbers its parameters already has the names of the model in config.json, and they stay. Raises
        :class:`RecipeError` if the names of the optimizer may be either, or belong to no weight.
        """
        present = [name for group in state.groups for name in group.parameters]
        new = {name: self._new_name(name)[1] for name in present}
        has_old_names = all(name in before for name in present)
        if all(name in after for name in present):
            if has_old_names and any(name != changed for name, changed in new.items()):
                what = (
                    "it exchanges names, and those of the optimizer may be the old or the new ones"
                )
                raise _wrong(self._path, what)
            return state
        if not has_old_names:
            unknown = next(name for name in present if name not in before)
            raise _wrong(self._path, f"the optimizer's parameter {unknown!r} is not a weight")
        return _renamed_optimizer(state, new)

    def _new_name(self, name: str) -> tuple[_Line | None, str | None]:
        """Return the line for a *name*, and the new name: None if it is left out, the old one if no line matches."""
        line = self._exact.get(name)
        match = None
        if line is None:
            for candidate in self._patterns:
                match = candidate.pattern.fullmatch(name)
                if match is not None:
                    line = candidate
                    break
        if line is None:
            return None, name
        if line.replacement in _LEFT_OUT:
            return line, None
        return line, _filled(line.replacement, match.groupdict() if match else {})


class _WithoutPrefix(NamesFile):
    """A file of new names for tensors, as if it removed *prefix* and left out tensors without it. There is no file."""

    def __init__(self, prefix: str) -> None:
        self._path = Path(prefix)
        self._lines = []
        self._prefix = prefix

    def _new_name(self, name: str) -> tuple[_Line | None, str | None]:
        return None, name.removeprefix(self._prefix) if name.startswith(self._prefix) else None


@dataclass(frozen=True, slots=True)
class Renaming:
    """Weights under the names of a *file*: those of the source (*before*), and those that are imported (*after*).

    *left_out* states in words what the file leaves out.
    """

    file: NamesFile
    before: Tensors
    after: Tensors
    left_out: tuple[str, ...]

    def training_state(self, state: TrainingState) -> TrainingState:
        """Return *state* with the new names of the optimizer's parameters. Raises :class:`RecipeError`."""
        if state.optimizer is None:
            return state
        before = {*self.before.tensors, *self.before.tied}
        after = {*self.after.tensors, *self.after.tied}
        return replace(state, optimizer=self.file.optimizer(state.optimizer, before, after))


def rename(module: Tensors, path: Path) -> Renaming:
    """Rename the tensors of *module* by the file *path*. Raises :class:`RecipeError`."""
    file = NamesFile(path)
    renamed, num_left_out = file.tensors(module)
    left_out = (
        (f"{counted(num_left_out, 'tensor')} that {path.name} leaves out",) if num_left_out else ()
    )
    return Renaming(file, module, renamed, left_out)


def without_prefix(module: Tensors, prefix: str) -> Renaming:
    """Return the tensors of *module* whose names begin with *prefix* without it."""
    file = _WithoutPrefix(prefix)
    renamed, num_left_out = file.tensors(module)
    tied: dict[str, str] = {}
    for alias, stored in module.tied.items():
        if alias.startswith(prefix) and stored.startswith(prefix):
            tied[alias.removeprefix(prefix)] = stored.removeprefix(prefix)
    left_out: tuple[str, ...] = ()
    if num_left_out:
        first = next(name for name in module.tensors if not name.startswith(prefix))
        other = f"{counted(num_left_out, 'tensor')} without the prefix of the model"
        left_out = (f"{other}, such as {first[:200]}",)
    return Renaming(file, module, replace(renamed, tied=tied), left_out)


def _renamed_optimizer(state: OptimizerState, new: Mapping[str, str | None]) -> OptimizerState:
    """Return *state* with each name replaced by its *new* one; parameters with None are left out."""
    tensors: dict[str, Mapping[str, Tensor]] = {}
    values: dict[str, Mapping[str, int | float | bool]] = {}
    groups: list[ParameterGroup] = []
    for group in state.groups:
        members: list[str] = []
        for old in group.parameters:
            name = new[old]
            if name is None:
                continue
            members.append(name)
            if old in state.tensors:
                tensors[name] = state.tensors[old]
            if old in state.values:
                values[name] = state.values[old]
        groups.append(replace(group, parameters=tuple(members)))
    return replace(state, tensors=tensors, values=values, groups=tuple(groups))


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
