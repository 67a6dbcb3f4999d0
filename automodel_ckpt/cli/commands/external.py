"""What ``ckpt ls`` and ``ckpt show`` print for directories that other programs wrote: marked as such, unchecked."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.cli.commands.render import (
    file_lines,
    pairs,
    section,
    statistics,
    tensor_lines,
    totals,
)
from automodel_ckpt.cli.terminal import age_text, coloured, printable, size_text
from automodel_ckpt.units import values_text

if TYPE_CHECKING:
    from automodel_ckpt.convert.sources.external import ExternalTree

UNCHECKED = "external checkpoint, unverifiable: no MANIFEST.json"
EXPORTED = "export: verify it with `ckpt verify`"


def is_known(path: Path) -> bool:
    """Whether a directory (a link is none) holds what another program wrote in a known form."""
    from automodel_ckpt.convert.sources import external

    return not path.is_symlink() and bool(external.kinds_in(path))


def facts(path: Path) -> dict[str, Any] | None:
    """The values of a row of ``ckpt ls``; None where nothing here is of a known form."""
    from automodel_ckpt.convert.sources import external

    found = external.read_external(path)
    if found is None:
        return None
    losses = {key: found.losses.get(key) for key in ("train_loss", "val_loss")}
    reason = f"external, unverified: {found.kind}"
    return {
        "nbytes": found.nbytes,
        "created": found.written,
        "reason": reason,
        "foreign": True,
        **losses,
    }


def document(path: Path, stats: bool = False) -> dict[str, Any] | None:
    """The content of ``ckpt show --json``; None where nothing here is of a known form. *stats*: read the tensors."""
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.convert.sources import external

    found = external.read_external(path)
    if found is None:
        return None
    name = layout.parse_checkpoint_name(path.name)
    return {
        "path": str(path),
        "foreign": True,
        "kind": found.kind,
        "note": EXPORTED if layout.EXPORT_MANIFEST in found.files else UNCHECKED,
        "step": name.step if name else None,
        "epoch": name.epoch if name else None,
        "created": found.written,
        "nbytes": found.nbytes,
        "losses": dict(found.losses),
        "files": dict(found.files),
        "trees": {
            name: {
                "format": tree.kind,
                "problem": tree.problem,
                "values": tree.num_values,
                "tensors": _tensors(path / name, tree, stats),
            }
            for name, tree in found.trees().items()
        },
    }


def _tensors(directory: Path, tree: ExternalTree, stats: bool) -> dict[str, dict[str, Any]]:
    from automodel_ckpt.convert.sources import external

    shown = {fqn: asdict(tensor) for fqn, tensor in tree.tensors.items()}
    if stats and not tree.problem:
        root, tensors = external.stored_tensors(directory, tree.kind)
        shown = {fqn: entry | statistics(root, tensors[fqn], True) for fqn, entry in shown.items()}
    return shown


def lines(shown: Mapping[str, Any], *, everything: bool) -> Iterator[str]:
    """The document for people: *everything*, or tensors in groups and files by directory."""
    yield coloured(printable(shown["path"]), "bold", sys.stdout)
    yield coloured(shown["note"], "yellow", sys.stdout)
    facts = [size_text(shown["nbytes"]), f"{age_text(shown['created'])} old"]
    if shown["step"] is not None:
        facts = [f"step {shown['step']}", f"epoch {shown['epoch']}", *facts]
    yield f"{printable(shown['kind'])}; {', '.join(facts)}"
    yield from section("losses", pairs(shown["losses"]))
    yield from section(f"files ({len(shown['files'])})", file_lines(shown["files"], everything))
    for name, tree in shown["trees"].items():
        place = "here" if name == "." else name
        title = f"{place} ({tree['format']}): {totals(tree['tensors'])}"
        if tree["values"]:
            title += f", {values_text(tree['values'])}"
        content = (
            [tree["problem"]] if tree["problem"] else tensor_lines(tree["tensors"], everything)
        )
        yield from section(title, content)
