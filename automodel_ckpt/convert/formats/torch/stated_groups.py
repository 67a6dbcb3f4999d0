"""The groups of an optimizer as the user states them: ``ckpt import --group GLOBS``, once for each. Imports no torch.

GLOBS are globs over the names of parameters, divided by commas: a parameter that one of them matches, and none of those
after an exclamation mark, may be in the group. ``!*norm*,!*.bias`` is every parameter except norms and biases. The
shapes decide where several groups may have a parameter; ``parameter_orders.py`` rejects what they leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from automodel_ckpt.convert.formats.torch.training_state import ModelParameter, Parameters
from automodel_ckpt.errors import RecipeError

OPTION = "--group"
_EXCLUDED = "!"


@dataclass(frozen=True, slots=True)
class StatedGroup:
    """One group: *text* as the user wrote it, and the *positions* in the model of the parameters that may be in it."""

    text: str
    positions: frozenset[int]


@dataclass(frozen=True, slots=True)
class StatedParameters:
    """The *parameters* of a model, and the groups that the user states, in the order of the optimizer's groups.

    A format gets it as its ``Parameters``. The reader of numbered optimizers asks for the groups.
    """

    parameters: Parameters
    texts: tuple[str, ...]

    def __call__(self) -> Sequence[ModelParameter]:
        """Return the parameters."""
        return self.parameters()

    def groups(self, model: Sequence[ModelParameter]) -> tuple[StatedGroup, ...]:
        """Return the groups in *model*. Raises :class:`RecipeError` for a glob that matches nothing."""
        names = [parameter.name for parameter in model]
        return tuple(_group(text, names) for text in self.texts)


def groups_of(parameters: Parameters, model: Sequence[ModelParameter]) -> tuple[StatedGroup, ...]:
    """Return the groups that the user states; none if *parameters* have none."""
    return parameters.groups(model) if isinstance(parameters, StatedParameters) else ()


def _group(text: str, names: Sequence[str]) -> StatedGroup:
    globs = [glob.strip() for glob in text.split(",")]
    wanted: set[int] = set()
    excluded: set[int] = set()
    for glob in globs:
        pattern = glob.removeprefix(_EXCLUDED)
        found = [at for at, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not found:
            raise RecipeError(
                "no parameter of the model has a name that the glob matches",
                where=f"ckpt import {OPTION} {text!r:.200}",
                value=f"{pattern!r:.200}; the model has {len(names)} parameters, from {names[0]} to {names[-1]}"
                if names
                else "the model has no parameters",
                hint="write the names as model.named_parameters() has them; * is any text, and a comma divides globs",
            )
        (excluded if glob.startswith(_EXCLUDED) else wanted).update(found)
    if all(glob.startswith(_EXCLUDED) for glob in globs):
        wanted = set(range(len(names)))
    positions = frozenset(wanted - excluded)
    if not positions:
        raise RecipeError(
            "a group excludes all parameters that it has",
            where=f"ckpt import {OPTION} {text!r:.200}",
            value="no parameter is left",
            hint="remove the glob after the exclamation mark that excludes too much",
        )
    return StatedGroup(text, positions)
