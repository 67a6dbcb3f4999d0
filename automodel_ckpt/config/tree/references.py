"""References to environment variables: ``${oc.env:NAME}`` and ``${oc.env:NAME,default}``.

References to keys (``key_references.py``) are replaced before, and no other interpolations exist. The grammar is a part
of omegaconf's. It is parsed here alone, so that all code agrees on which variables a text reads.

Resolved values go into the typed configuration alone; whatever is printed or saved shows the reference, and so do the
messages of errors that come up later (``errors.without_hidden``).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import hide

ALLOWED = "write ${section.key}, ${oc.env:NAME} or ${oc.env:NAME,default}; \\${ is a literal ${"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
"""Pattern of the name of an environment variable. Names are written into shell scripts and manifests."""
SECRET_NAME = re.compile(
    r"TOKEN(?!I[SZ])|SECRET|PASS|KEY|CRED|AUTH|COOKIE|PRIVATE|JWT|CONNECTION_STRING", re.IGNORECASE
)
"""What the name of a variable contains if its value is a secret. A TOKENIZER is none."""
KEY_REFERENCE = re.compile(
    r"(?<!\\)(?P<slashes>(?:\\\\)*)\$\{(?P<key>[A-Za-z_][\w-]*(?:\.[\w-]+)*)\}"
)
"""A reference to another key, with the escaped backslashes before it."""
_OPENING = re.compile(r"(?P<slashes>\\*)\$\{")
# No backslashes in defaults: omegaconf reads them in another way than at the top. Possessive quantifiers: otherwise
# spaces without a closing brace take cubic time.
_REFERENCE = re.compile(
    rf"""oc\.env:[ \t]*+(?P<name>{VARIABLE})[ \t]*+(?:,[ \t]*+(?:
    '(?P<single>(?:[^\\$']|\$(?!\{{))*+)'|"(?P<double>(?:[^\\$"]|\$(?!\{{))*+)"|
    (?P<plain>(?:[^\\${{}},'"]|\$(?!\{{))*+))[ \t]*+)?\}}""",
    re.ASCII | re.VERBOSE,
)
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


@dataclass(frozen=True, slots=True)
class _Reference:
    """A variable and its default; None: it has no default."""

    name: str
    default: str | None


def referenced_variables(text: str) -> dict[str, bool]:
    """Map the names of the environment variables that *text* refers to, to whether one of them has no default."""
    names: dict[str, bool] = {}
    for part in _parts(text):
        if isinstance(part, _Reference):
            names[part.name] = names.get(part.name, False) or part.default is None
    return names


def variables_in(tree: Node) -> dict[str, bool]:
    """Return :func:`referenced_variables` of all values in a recipe's tree, sorted by name."""
    names: dict[str, bool] = {}
    for _, node in tree.walk():
        found = referenced_variables(node.value) if isinstance(node.value, str) else {}
        names |= {name: names.get(name, False) or found[name] for name in found}
    return dict(sorted(names.items()))


def is_reference(text: str) -> bool:
    """Whether *text* has a ``${`` that is not escaped. As in omegaconf, an odd number of backslashes makes it text."""
    return any(len(match["slashes"]) % 2 == 0 for match in _OPENING.finditer(text))


def resolve(text: str) -> str | None:
    """Replace the references in *text*. Returns None for a reference whose default is null."""
    return resolve_with_names(text)[0]


def resolve_with_names(text: str) -> tuple[str | None, list[str]]:
    """Replace the references in *text*, and return with it the names of the variables with a value in the result.

    Returns None as the text of a reference whose default is null.

    Raises:
        ReferenceFailed: for other interpolations, and for a variable that is not set and has no default.
    """
    if "${" not in text:
        return text, []
    parts = _parts(text)
    used: list[str] = []
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part.name in os.environ:
            used.append(part.name)
            texts.append(os.environ[part.name])
        elif part.default is not None:
            texts.append(part.default)
        else:
            raise ReferenceFailed(
                f"environment variable {part.name} is not set",
                f"set it, or write ${{oc.env:{part.name},default}}",
            )
    value = "".join(texts)
    for name in used:
        hide(os.environ[name], f"${{oc.env:{name}}}")
    if used:
        hide(value, text)
    is_null = not used and isinstance(parts[0], _Reference) and len(parts) == 1
    return (None if is_null and value.lower() == "null" else value), used


def _parts(text: str) -> list[str | _Reference]:
    """Divide *text* into literal text and references. Raises :class:`ReferenceFailed`."""
    parts: list[str | _Reference] = []
    position = 0
    while match := _OPENING.search(text, position):
        slashes = match["slashes"]
        parts.append(text[position : match.start()] + "\\" * (len(slashes) // 2))
        position = match.end()
        if len(slashes) % 2:
            parts.append("${")
            continue
        found = _REFERENCE.match(text, position)
        if found is None:
            raise ReferenceFailed("unsupported interpolation", ALLOWED)
        name, *defaults = found.groups()
        default = next((each for each in defaults if each is not None), None)
        if found["plain"] is not None:
            default = found["plain"].strip(" \t")
        parts.append(_Reference(name, default))
        position = found.end()
    parts.append(text[position:])
    return [part for part in parts if part != ""]
