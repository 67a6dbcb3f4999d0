"""References to environment variables: ``${oc.env:NAME}`` and ``${oc.env:NAME,default}``.

References to keys (``key_references.py``) are replaced before, and no other interpolations exist.

Resolved values go into the typed configuration alone; whatever is printed or saved shows the reference, and so do the
messages of errors that come up later (``errors.without_hidden``).
"""

from __future__ import annotations

import os
import re

from automodel_ckpt.errors import hide

ALLOWED = "write ${section.key}, ${oc.env:NAME} or ${oc.env:NAME,default}; \\${ is a literal ${"
# As in omegaconf, an odd number of backslashes before ${ makes it text.
_OPENING = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
KEY_REFERENCE = re.compile(
    r"(?<!\\)(?P<slashes>(?:\\\\)*)\$\{(?P<key>[A-Za-z_][\w-]*(?:\.[\w-]+)*)\}"
)
"""A reference to another key, with the escaped backslashes before it."""
_ENVIRONMENT = re.compile(r"(?<!\\)(?:\\\\)*\$\{oc\.env:")
_VARIABLE = re.compile(r"\$\{oc\.env:([^,${}]*)\}")
_NAME = re.compile(r"\$\{oc\.env:([^,${}]*)")


_SHELL = re.compile(r"(?<!\\)\$(?P<name>[A-Za-z_]\w*)")
_PATH = re.compile(
    r"(.*_)?(path|paths|dir|directory|file|files|folder|root|url|uri|template)|from_pretrained|restore_from|reference|"
    "card|collection|extends"
)
"""The names of keys whose values can be paths."""


def shell_variable(name: str, text: str) -> str | None:
    """The hint for a variable as in a shell, such as $HOME, in the value of a key *name* that is a path.

    Returns None without one, and for templates.
    """
    found = _SHELL.search(text) if _PATH.fullmatch(name) and "{{" not in text else None
    return f"write ${{oc.env:{found['name']}}}" if found else None


class ReferenceFailed(Exception):
    """A reference is malformed or its variable is not set. Neither message nor hint contains a value."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


def referenced_variables(text: str) -> dict[str, bool]:
    """Map the names of the environment variables that *text* refers to, to whether they have no default."""
    required = {name.strip() for name in _VARIABLE.findall(text)}
    return {name: name in required for name in sorted(set(map(str.strip, _NAME.findall(text))))}


def is_reference(text: str) -> bool:
    return _OPENING.search(text) is not None


def resolve(text: str) -> str | None:
    """Replace the references in *text*. Returns None for a reference whose default is null."""
    if "${" not in text:
        return text
    # omegaconf would also resolve references to other keys, and its other resolvers.
    if len(_OPENING.findall(text)) != len(_ENVIRONMENT.findall(text)):
        raise ReferenceFailed("unsupported interpolation", ALLOWED)
    unset = [name for name in _VARIABLE.findall(text) if name not in os.environ]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = OmegaConf.create({"value": text})["value"]
    except OmegaConfBaseException:
        # Not chained: omegaconf's message can contain the value of a nested reference.
        raise _failure(unset) from None
    used = [name for name in map(str.strip, _NAME.findall(text)) if name in os.environ]
    for name in used:
        hide(os.environ[name], f"${{oc.env:{name}}}")
    if used and value is not None:
        hide(str(value), text)
    return None if value is None else str(value)


def _failure(unset: list[str]) -> ReferenceFailed:
    if not unset:
        return ReferenceFailed("invalid interpolation", ALLOWED)
    hint = f"set it, or write ${{oc.env:{unset[0]},default}}"
    return ReferenceFailed(f"environment variable {', '.join(unset)} is not set", hint)
