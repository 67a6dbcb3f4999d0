"""Exchange between the ranks what they have of each tree, so that each can compute which rank writes what.

Every rank sends a digest of its description and the first ranks of its meshes. Usually all digests of a tree are equal,
and nothing else is sent. Otherwise (stages of a pipeline), one rank of each digest sends its description.

What each rank has as a whole is stored by one of them. Another digest shows whether the ranks have the same; if not, a
warning names what differs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.files.digests import digest_of
from automodel_ckpt.checkpoint.files.layout import BUFFERS
from automodel_ckpt.checkpoint.formats.assignment import Share
from automodel_ckpt.checkpoint.formats.description import Mesh, TreeDescription
from automodel_ckpt.checkpoint.formats.planning import TreePlan
from automodel_ckpt.checkpoint.state.storable import check_safe
from automodel_ckpt.parallel.ranks import agree

log = logging.getLogger("automodel_ckpt")

_MAX_NAMED = 5


@dataclass(frozen=True)
class TreeSummary:
    """What each rank sends about a tree: the digest of its description, and the first rank of each mesh."""

    digest: str
    origins: Mapping[Mesh, int]


def digest_of_all(digests: Mapping[str, str]) -> str:
    """Return one digest of the :func:`replicated_digests` of a tree."""
    return digest_of(repr(sorted(digests.items())).encode())


def replicated_digests(plan: TreePlan, *, compares_buffers: bool) -> dict[str, str]:
    """Return the digests of what this rank has as a whole, and only one rank stores, by name.

    That is what is not a tensor, the options of parameter groups and, with *compares_buffers*, buffers. Parameters and
    their optimizer state are not compared: they are the same wherever a strategy does not shard them.
    """
    options = f"{plan.name}.param_groups."
    found: dict[str, str] = {}
    for name, value in plan.flat().items():
        is_tensor = isinstance(value, torch.Tensor)
        is_buffer = compares_buffers and plan.kinds.get(name) == BUFFERS
        if is_tensor and not is_buffer and not name.startswith(options):
            continue
        if (whole := _whole(value)) is not None:
            found[name] = check_safe(plan.name, {name: whole})
    return found


def _whole(value: Any) -> Any:
    """Return *value*; of a tensor on a mesh the copy of this rank, None where it has only a part."""
    if not isinstance(value, DTensor):
        return value
    is_whole = all(placement.is_replicate() for placement in value.placements)
    return value.to_local() if is_whole else None


class ReplicaWarnings:
    """Warns where ranks have different values of what only one of them stores: once for each value.

    *is_reporter*: whether this rank prints the warnings.
    """

    def __init__(self, *, is_reporter: bool) -> None:
        self._is_reporter = is_reporter
        self._reported: set[tuple[str, str]] = set()

    def compare(
        self,
        group: ProcessGroup | None,
        mine: Mapping[str, Mapping[str, str]],
        digests: Sequence[Mapping[str, str]],
    ) -> None:
        """Compare the values of all ranks. Collective.

        *mine* has the :func:`replicated_digests` of this rank by tree, *digests* are the :func:`digest_of_all` of all
        ranks by tree.
        """
        differing = {}
        for tree, values in mine.items():
            if len({of_rank[tree] for of_rank in digests}) > 1:
                differing[tree] = values
        # The digests are the same on all ranks, so that all of them enter this collective, or none does.
        if not differing:
            return
        all_digests = agree.gather_objects(group, differing)
        if not self._is_reporter:
            return
        for tree in sorted(differing):
            ranks_of = _differing([of_rank[tree] for of_rank in all_digests])
            new = [name for name in ranks_of if (tree, name) not in self._reported]
            self._reported.update((tree, name) for name in new)
            for name in new[:_MAX_NAMED]:
                stored, *others = ranks_of[name]
                more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
                listed = ", ".join(map(str, others[:_MAX_NAMED])) + more
                log.warning(
                    f"{tree}: {name} differs between ranks. The checkpoint has the value of rank {stored}, and a "
                    f"resume gives it to all ranks. Others have: rank {listed}"
                )
            if len(new) > _MAX_NAMED:
                log.warning("%s: %d more values differ", tree, len(new) - _MAX_NAMED)


def _differing(digests: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """Return, for each name with several digests, the first rank that has it, then the ranks with another digest."""
    ranks: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(digests):
        for name, digest in of_rank.items():
            known = ranks.setdefault(name, [rank])
            if digests[known[0]][name] != digest:
                known.append(rank)
    return {name: of_name for name, of_name in ranks.items() if len(of_name) > 1}


def shares_of_all(
    group: ProcessGroup | None,
    mine: TreeDescription,
    summaries: Sequence[TreeSummary],
) -> list[Share]:
    """Return what all ranks have of a tree; the same on all ranks. Collective.

    *mine* is the description of this rank, *summaries* come from all ranks, in order.
    """
    ranks_of: dict[str, list[int]] = {}
    for number, summary in enumerate(summaries):
        ranks_of.setdefault(summary.digest, []).append(number)
    shares: list[Share] = []
    for ranks in ranks_of.values():
        description = mine
        if len(ranks_of) > 1:
            description = agree.broadcast_object(group, mine, source=ranks[0])
        shares.append(Share(description, ranks, [summaries[each].origins for each in ranks]))
    return shares
