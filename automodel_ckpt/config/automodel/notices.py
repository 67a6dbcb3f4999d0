"""What the translation of a recipe did with a key, as one line of text for the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["renamed", "default", "no effect", "degraded", "note"]


@dataclass(frozen=True)
class Notice:
    """One decision of the translation.

    *key* and *origin* are those of the recipe file; *to* is the key of this program, empty if there is none; *text*
    states what happens instead, for the kinds ``degraded`` and ``note``.
    """

    kind: Kind
    key: str
    origin: str
    to: str = ""
    text: str = ""


def report_lines(notices: Iterable[Notice]) -> Iterator[str]:
    """Yield what a user must know before training: one line per degraded key and note, one for keys without effect."""
    notices = list(notices)
    for notice in notices:
        if notice.kind == "degraded":
            yield f"warning: {notice.origin}: {notice.key}: {notice.text}"
    for notice in notices:
        if notice.kind == "note":
            yield f"note: {notice.origin}: {notice.key}: {notice.text}"
    unused = list(dict.fromkeys(each.key for each in notices if each.kind == "no effect"))
    if unused:
        have = f"{len(unused)} keys of NeMo AutoModel have"
        if len(unused) == 1:
            have = "1 key of NeMo AutoModel has"
        yield f"note: {have} no meaning here: {', '.join(unused)}"
