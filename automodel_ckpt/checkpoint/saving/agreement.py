"""Exchange between the ranks what they have of each tree, so that each can compute which rank writes what.

Every rank sends a digest of its description and the first ranks of its meshes. Usually all digests of a tree are equal,
and nothing else is sent. Otherwise (stages of a pipeline), one rank of each digest sends its description. Only slices
whose sharding is no formula are listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.formats.assignment import Share
from automodel_ckpt.checkpoint.formats.description import Mesh, TreeDescription
from automodel_ckpt.checkpoint.formats.planning import TreePlan
from automodel_ckpt.distributed import agree


@dataclass(frozen=True, slots=True)
class TreeSummary:
    """What each rank sends about a tree: the digest of its description, and the first rank of each mesh."""

    digest: str
    origins: Mapping[Mesh, int]


def summarize(description: TreeDescription) -> TreeSummary:
    """Return what this rank sends first."""
    return TreeSummary(description.digest(), description.origins)


def shares_of_all(
    group: ProcessGroup | None,
    plan: TreePlan,
    mine: TreeDescription,
    summaries: Sequence[TreeSummary],
) -> list[Share]:
    """Return what all ranks have of a tree; the same on all ranks. Collective.

    *mine* is the description of this rank, *summaries* are those of all ranks, in order.
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
    names = sorted({name for share in shares for name in share.description.irregular})
    if not names:
        return shares
    # A formula on one rank may be none on another: all list their slices then.
    slices = agree.gather_objects(group, plan.irregular(names))
    return [
        replace(share, irregular={rank: slices[rank] for rank in share.ranks}) for share in shares
    ]
