"""``hub:ORG/NAME@REVISION``: how commands name a repository of the Hub."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_ckpt.base.hub_access import is_repo_name, is_revision_name
from automodel_ckpt.errors import RecipeError

PREFIX = "hub:"
MAIN = "main"


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A repository ``ORG/NAME``, and a branch, tag or commit of it; None: not given."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}" + (f"@{self.revision}" if self.revision else "")

    @property
    def branch(self) -> str:
        """The revision, by default the main branch."""
        return self.revision or MAIN

    @classmethod
    def parse(cls, text: str, where: str) -> HubAddress:
        """Parse ``hub:ORG/NAME`` or ``hub:ORG/NAME@REVISION``. Raises :class:`RecipeError` for anything else."""
        repo, at, revision = text.removeprefix(PREFIX).removeprefix("//").partition("@")
        check_repo(repo, where)
        if at:
            check_revision(revision, where)
        return cls(repo, revision or None)


def is_hub(text: str) -> bool:
    """Whether *text* names a repository of the Hub rather than the URL of a store or a path."""
    return text.startswith(PREFIX)


def check_repo(repo: str, where: str) -> None:
    """Raise :class:`RecipeError` unless *repo* is ``ORG/NAME``, as the Hub accepts it."""
    if not is_repo_name(repo):
        raise RecipeError(
            "this is not the name of a repository",
            where=where,
            value=repo,
            hint="use ORG/NAME (letters, digits, -, _ and .), such as hub:my-org/my-model",
        )


def check_revision(revision: str, where: str) -> None:
    """Raise :class:`RecipeError` unless *revision* can be the name of a branch, tag or commit."""
    if not is_revision_name(revision):
        raise RecipeError(
            "this is not the name of a branch, tag or commit",
            where=where,
            value=revision,
            hint="use letters, digits, -, _, . and /",
        )
