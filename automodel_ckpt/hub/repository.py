"""A repository of the Hugging Face Hub: its address, its files, and the library's client with its exceptions.

Commands name it ``hub:ORG/NAME@REVISION``. The token is read by the library from its usual places (``HF_TOKEN``,
``hf auth login``), never from a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base.hub_access import chain_of, explain, is_repo_name, is_revision_name
from automodel_ckpt.errors import AutomodelError, RecipeError, SaveFailed

PREFIX = "hub:"
TRY_AGAIN = "try again: files that were transferred are not transferred again"
LOGIN_HINT = "`hf auth login`, or set HF_TOKEN to a token with write access"
MAIN = "main"


@dataclass(frozen=True)
class HubAddress:
    """A repository ``ORG/NAME``, and a branch, tag or commit of it. None: not given."""

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
            "this is not the name of a repository, ORG/NAME (letters, digits, -, _ and .)",
            where,
            repo,
            "",
        )


def check_revision(revision: str, where: str) -> None:
    """Raise :class:`RecipeError` unless *revision* can be the name of a branch, tag or commit."""
    if not is_revision_name(revision):
        raise RecipeError(
            "this is not the name of a branch, tag or commit (letters, digits, -, _, . and /)",
            where,
            revision,
            "",
        )


# ---------------------------------------------------------------- the client


class HubError(SaveFailed):
    """The Hub could not be read or written. With *is_temporary*, another attempt may succeed."""

    is_temporary = False


def client() -> Any:
    """Return the library's client."""
    from huggingface_hub import HfApi

    return HfApi()


def has_token() -> bool:
    """Whether the library finds a token in its usual places. Makes no request."""
    from huggingface_hub import get_token

    return get_token() is not None


def web_page(address: HubAddress) -> str:
    """The address of a repository for a browser."""
    from huggingface_hub import constants

    tree = f"/tree/{address.revision}" if address.revision else ""
    return f"{constants.ENDPOINT}/{address.repo}{tree}"


@contextmanager
def reporting(address: HubAddress, doing: str) -> Iterator[None]:
    """Raise :class:`HubError` for what the library raises in the context. *doing* names what fails: "the upload"."""
    try:
        yield
    except AutomodelError:
        raise
    except Exception as error:  # each version of the library has its own exceptions
        problem = explain(error, address.repo)
        if problem is None:
            *_, cause = chain_of(error)
            text = " ".join(str(cause).split())
            raise HubError(
                f"{doing} failed",
                address,
                f"{type(cause).__name__}: {text[:300]}",
                TRY_AGAIN,
            ) from error
        found = HubError(
            f"{doing} failed: {problem.cause or problem.what}",
            address,
            "",
            problem.hint if not problem.cause else "check the network, and try again",
        )
        found.is_temporary = problem.is_temporary
        raise found from error


# ---------------------------------------------------------------- files


Content = Path | bytes
"""A local file, or what is to be its content."""
