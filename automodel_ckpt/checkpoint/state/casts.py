"""Tensors of a module that are saved in another floating-point type than they have here, and may be."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.formats.description import DTYPE_CODES
from automodel_ckpt.checkpoint.formats.reading import cast_names
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Tree
from automodel_ckpt.checkpoint.state.module_tensors import (
    adapter_keys,
    frozen_names,
    model_state_dict,
    stored_layout,
    unwrap,
)
from automodel_ckpt.checkpoint.state.optimizer_state import saved_entries

log = logging.getLogger("automodel_ckpt")

_IS, _WAS = ("is", "are"), ("was", "were")


class Cast(NamedTuple):
    """A tensor that is cast when it is read: why, as the verbs of a sentence, and whether the new type can represent
    all values of the saved one."""

    verbs: tuple[str, str]
    is_exact: bool


def casts_of(
    manifest: Manifest, item: Item, tree: Tree, state: Mapping[str, Any]
) -> dict[str, Cast]:
    """The tensors of the module *item* that are saved in another type than in its *state*, which is no difference.

    A tensor that does not train may have any type: a base in 16 bits can be in float32 on another device. One that the
    saved run did not train, and that trains now, may have more bits now. *tree* is the module in the checkpoint with
    this *manifest*.
    """
    found: dict[str, Cast] = {}
    differing = cast_names(tree, state)
    if not differing:
        return found
    frozen, formerly = frozen_names(item.value), _formerly_frozen(manifest, item, tree)
    for name, is_contained in differing.items():
        if name in frozen:
            found[name] = Cast(_IS, is_exact=is_contained)
        elif is_contained and name in formerly:
            found[name] = Cast(_WAS, is_exact=True)
    return found


def log_casts(casts: Mapping[str, Cast], tree: Tree, state: Mapping[str, Any]) -> None:
    """Log how many tensors are cast, and from which types to which."""
    for verbs in (_IS, _WAS):
        names = [name for name, each in casts.items() if each.verbs == verbs]
        if names:
            saved = {tree.tensors[name].dtype for name in names}
            here = {DTYPE_CODES[state[name].dtype] for name in names}
            log.info(
                "%s that %s not trained: saved as %s, cast to %s",
                counted(len(names), "tensor"),
                verbs[0] if len(names) == 1 else verbs[1],
                " and ".join(sorted(saved)),
                " and ".join(sorted(here)),
            )


def _formerly_frozen(manifest: Manifest, item: Item, tree: Tree) -> set[str]:
    """The names in *tree* for which the saved optimizers have no state, although they have state for others.

    None of adapters: all of them are trained, and have other names in files than in an optimizer.
    """
    if adapter_keys(unwrap(item.value), model_state_dict(item.value)) is not None:
        return set()
    with_state: set[str] = set()
    for name, record in manifest.state.items():
        if record.kind != "optimizer" or name not in manifest.trees:
            continue
        module = f"{item.name.replace('.', '%')}."
        for fqn, _ in saved_entries(name, manifest.trees[name].tensors):
            if fqn.startswith(module):
                with_state.add(fqn.removeprefix(module))
    if not with_state:
        # An optimizer without state, or none: what was trained is not known.
        return set()
    stored = stored_layout(item.value)
    trained: set[str] = set()
    for fqn in with_state:
        trained.update((stored.name_of(fqn), *stored.rows.get(fqn, ())))
    # An optimizer may have a tied tensor under another name than the module.
    trained.update(kept for name, kept in tree.tied.items() if name in trained)
    return tree.tensors.keys() - trained
