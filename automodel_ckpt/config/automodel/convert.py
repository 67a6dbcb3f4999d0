"""The text of ``ckpt-train --convert-recipe``: a recipe of NeMo AutoModel as one of this program, with comments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from automodel_ckpt.config.automodel.notices import Notice, report_lines
from automodel_ckpt.config.automodel.rows import AUTOMODEL_DEFAULT
from automodel_ckpt.config.schema_keys import join
from automodel_ckpt.config.tree.yaml_tree import Node, lines

_WIDTH = 60


def converted_text(path: str, translated: Node, bound: Node, notices: Sequence[Notice]) -> str:
    """Return the converted recipe as YAML: the keys of *translated*, with the values of the validated tree *bound*.

    A comment beside each renamed key has AutoModel's name; comments at the top list the keys that were dropped or
    degraded. The text loads to the same configuration as the recipe at *path*.
    """
    rows = [f"# Converted from the NeMo AutoModel recipe {path} by ckpt-train --convert-recipe"]
    for line in report_lines(notices):
        rows.append(f"# {line}")
    comments = _comments(notices)
    rows += _lines(translated, bound, comments, "")
    return "".join(f"{row}\n" for row in rows)


def _comments(notices: Sequence[Notice]) -> dict[str, str]:
    """Map our dotted keys to the comment beside them."""
    comments = {}
    for notice in notices:
        if notice.kind == "renamed":
            comments[notice.to] = f"was {notice.key}"
        elif notice.kind == "default":
            comments[notice.to] = AUTOMODEL_DEFAULT
    return comments


def _lines(
    node: Node, bound: Node, comments: dict[str, str], key: str, indent: int = 0
) -> Iterator[str]:
    """Yield the lines of a mapping: sections as blocks, lists and plain values on one line."""
    for name, child in node.children():
        full = join(key, name)
        value = bound.at(full) or child
        comment = comments.get(full, "")
        if isinstance(child.value, dict) and child.value:
            yield _commented(f"{' ' * indent}{name}:", comment)
            yield from _lines(child, bound, comments, full, indent + 2)
            continue
        # An empty section is a section with all defaults in the validated tree.
        if isinstance(value.value, dict):
            value = child
        ((row, _),) = lines(Node({name: value}, ""), indent)
        yield _commented(row, comment)


def _commented(row: str, comment: str) -> str:
    if not comment:
        return row
    return f"{row:{_WIDTH}}  # {comment}"
