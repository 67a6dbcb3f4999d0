"""huggingface_hub's client, and its exceptions as errors that state what to do.

The token is read by the library from its usual places (``HF_TOKEN``, ``hf auth login``), never from a recipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from automodel_ckpt.base.hub_access import chain_of, explain
from automodel_ckpt.errors import AutomodelError, SaveFailed
from automodel_ckpt.hub.address import HubAddress


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


def missing_token(where: str) -> HubError:
    """The error if there is no token."""
    return HubError(
        "there is no token of the Hugging Face Hub",
        where=where,
        value="",
        hint="`hf auth login`, or set HF_TOKEN to a token with write access",
    )


def web_page(address: HubAddress) -> str:
    """The address of a repository for a browser."""
    from huggingface_hub import constants

    tree = f"/tree/{address.revision}" if address.revision else ""
    return f"{constants.ENDPOINT}/{address.repo}{tree}"


@contextlib.contextmanager
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
                where=str(address),
                value=f"{type(cause).__name__}: {text[:300]}",
                hint="try again: files that were transferred are not transferred again",
            ) from error
        found = HubError(
            f"{doing} failed: {problem.cause or problem.what}",
            where=str(address),
            value="",
            hint=problem.hint if not problem.cause else "check the network, and try again",
        )
        found.is_temporary = problem.is_temporary
        raise found from error
