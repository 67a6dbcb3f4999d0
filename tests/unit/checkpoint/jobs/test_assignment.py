"""Which rank writes which slice: the same for all ranks, balanced, and an error where the ranks do not match."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from automodel_ckpt.checkpoint.formats.assignment import Share, assign
from automodel_ckpt.checkpoint.formats.description import Described, Mesh, TreeDescription
from automodel_ckpt.checkpoint.parts.sharding import RegularSlices
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor
from automodel_ckpt.checkpoint.parts.tiling import tiling_fault
from automodel_ckpt.checkpoint.saving.agreement import TreeSummary
from automodel_ckpt.checkpoint.saving.planner import _require_same_trees
from automodel_ckpt.checkpoint.saving.save import Proposal
from automodel_ckpt.errors import SaveFailed

# Two replicas of four ranks that shard dimension 0.
HYBRID = Mesh((2, 4), (4, 1))
ROWS = ((0, (1,)),)


def description(**tensors: Described) -> TreeDescription:
    return TreeDescription(tensors, (), ("lr",), {}, {}, {})


def share(ranks: range, origin: int, **tensors: Described) -> Share:
    return Share(description(**tensors), ranks, [{HYBRID: origin, STAGE: origin}] * len(ranks))


STAGE = Mesh((4,), (1,))


def sharded(rows: int, mesh: Mesh = HYBRID) -> Described:
    return Described("F32", (rows, 2), mesh, ROWS if mesh is HYBRID else ((0, (0,)),))


def regular(tensor: Tensor) -> RegularSlices:
    assert isinstance(tensor.slices, RegularSlices)
    return tensor.slices


def test_replicas_write_about_the_same_number_of_bytes() -> None:
    tensors = {f"w{number}": sharded(4 * (1 + number % 7)) for number in range(40)}
    plain = {f"b{number}": Described("F32", (3,), None, ()) for number in range(16)}
    assigned = assign("model", [share(range(8), 0, **tensors, **plain)])
    nbytes: Counter[int] = Counter()
    for name, tensor in assigned.tensors.items():
        boxes = [piece.box for piece in tensor.slices]
        assert tiling_fault(boxes, tensor.shape) is None
        assert regular(tensor).first in ((0, 4) if name in tensors else range(8))
        for rank in range(8):
            piece = regular(tensor).of_rank(rank)
            nbytes[rank] += piece.nbytes if piece is not None else 0
    assert max(nbytes.values()) <= 1.1 * min(nbytes.values())
    assert assigned.values == {"lr": 0} and assigned.values_of(1) == []


def test_stages_have_tensors_of_their_own_and_share_those_that_both_have() -> None:
    tied = sharded(8, STAGE)
    first = share(range(4), 0, embed=tied, a=sharded(8, STAGE))
    second = share(range(4, 8), 4, head=sharded(8, STAGE), embed=tied)
    assigned = assign("model", [first, second])
    firsts = {name: regular(tensor).first for name, tensor in assigned.tensors.items()}
    assert firsts == {"a": 0, "head": 4, "embed": 0}
    # Its other copy is sharded in another way: not used.
    other = share(range(4, 8), 4, embed=Described("F32", (8, 2), None, ()))
    assert regular(assign("model", [first, other]).tensors["embed"]).first == 0


def test_ranks_that_do_not_match_fail_the_save() -> None:
    first = share(range(4), 0, w=sharded(8, STAGE))
    with pytest.raises(SaveFailed, match="another shape or dtype on another rank"):
        assign("model", [first, share(range(4, 8), 4, w=sharded(9, STAGE))])
    with pytest.raises(SaveFailed, match="do not have a tensor that the others have"):
        assign("model", [share(range(3), 0, w=sharded(8, STAGE)), share(range(3, 4), 0)])


def test_slices_without_a_formula_are_written_once_by_one_of_the_ranks_that_have_them() -> None:
    def piece(offset: int, size: int) -> Tensor:
        stored = Slice("w", "F32", (offset,), (size,), "", 0, 4 * size)
        return Tensor("w", "F32", (5,), (stored,))

    listed = replace(description(), irregular=("w",))
    slices = {0: [piece(0, 3)], 1: [piece(0, 3)], 2: [piece(3, 2)], 3: [piece(5, 0)]}
    origins: list[dict[Mesh, int]] = [{}] * 4
    assigned = assign("model", [Share(listed, range(4), origins, slices)])
    assert not assigned.tensors
    assert tiling_fault([each.box for each in assigned.irregular["w"].slices], (5,)) is None
    written = {rank: len(assigned.irregular_of(rank)) for rank in range(4)}
    assert written == {0: 1, 1: 0, 2: 1, 3: 0}


def test_irregular_slices_and_values_that_do_not_match_fail_the_save() -> None:
    def piece(dtype: str, shape: int, size: int) -> Tensor:
        stored = Slice("w", dtype, (0,), (size,), "", 0, 4 * size)
        return Tensor("w", dtype, (shape,), (stored,))

    listed = replace(description(), irregular=("w",))
    origins: list[dict[Mesh, int]] = [{}] * 2
    # The last one has an empty slice.
    for other in (piece("BF16", 5, 3), piece("F32", 6, 3), piece("F32", 6, 0)):
        slices = {0: [piece("F32", 5, 3)], 1: [other]}
        with pytest.raises(SaveFailed, match=r"another shape or dtype[\s\S]*model: w"):
            assign("model", [Share(listed, range(2), origins, slices)])
    for one in (
        replace(description(lr=sharded(8, STAGE)), values=()),
        replace(listed, irregular=("lr",), values=()),
    ):
        tensors = Share(one, range(4), [{STAGE: 0}] * 4)
        with pytest.raises(
            SaveFailed, match=r"model: lr\n.*a tensor on rank 0, another value on rank 4"
        ):
            assign("model", [tensors, share(range(4, 8), 4)])


def test_ranks_with_other_trees_are_an_error_before_they_exchange_them() -> None:
    summary = TreeSummary("", {})
    proposals = [
        Proposal(dict.fromkeys(names, summary), {}, rank)
        for rank, names in enumerate((("model", "optimizer"), ("optimizer", "model"), ("model",)))
    ]
    _require_same_trees(proposals[:2])
    with pytest.raises(SaveFailed, match=r"ranks 0 and 2 differ"):
        _require_same_trees(proposals)
