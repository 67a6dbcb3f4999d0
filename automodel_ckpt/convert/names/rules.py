"""Rules, the statements that a converter consists of, and the operations on described tensors that carry them out.

The rows of a tensor are its first dimension. A range of rows of a slice is contiguous in the file, since slices are
row-major, so that every result is again a tensor of slices. Digests of whole slices do not hold for a part of one: the
results have none. Nothing is read, and no torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from automodel_ckpt.checkpoint.files.type_aliases import Strings
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, contiguous_slices, nbytes_of
from automodel_ckpt.convert.names.dimensions import Dimensions


@dataclass(frozen=True)
class RowRange:
    """*num_rows* rows of the tensor number *part*, from row *first*."""

    part: int
    first: int
    num_rows: int


def join_rows(fqn: str, parts: Sequence[Tensor], ranges: Sequence[RowRange]) -> Tensor:
    """Return the tensor *fqn* that consists of *ranges* of rows of *parts*, in that order.

    All parts have the same dtype and the same dimensions after the first.
    """
    slices = []
    num_rows = 0
    for wanted in ranges:
        shift = num_rows - wanted.first
        for stored in _rows_of(parts[wanted.part], wanted.first, wanted.num_rows):
            offsets = (stored.offsets[0] + shift, *stored.offsets[1:])
            slices.append(replace(stored, fqn=fqn, offsets=offsets))
        num_rows += wanted.num_rows
    return Tensor(fqn, parts[0].dtype, (num_rows, *parts[0].shape[1:]), tuple(slices))


def unstack(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that *tensor* stacks along its first dimension, without that dimension. All keep its name."""
    found: list[list[Slice]] = [[] for _ in range(tensor.shape[0])]
    for stored in contiguous_slices(tensor):
        num_stacked = stored.sizes[0]
        if not num_stacked:
            continue
        nbytes = stored.nbytes // num_stacked
        for number in range(num_stacked):
            one = replace(
                stored,
                offsets=stored.offsets[1:],
                sizes=stored.sizes[1:],
                start=stored.start + number * stored.row_bytes,
                nbytes=nbytes,
                strides=None if stored.strides is None else stored.strides[1:],
                digest=None,
            )
            found[stored.offsets[0] + number].append(one)
    return [Tensor(tensor.fqn, tensor.dtype, tensor.shape[1:], tuple(own)) for own in found]


def stack(fqn: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensor *fqn* that stacks *tensors* of one dtype and shape along a new first dimension."""
    slices = []
    for number, tensor in enumerate(tensors):
        for stored in contiguous_slices(tensor):
            strides = None if stored.strides is None else (0, *stored.strides)
            offsets, sizes = (number, *stored.offsets), (1, *stored.sizes)
            slices.append(
                replace(stored, fqn=fqn, offsets=offsets, sizes=sizes, digest=None, strides=strides)
            )
    return Tensor(fqn, tensors[0].dtype, (len(tensors), *tensors[0].shape), tuple(slices))


def _rows_of(tensor: Tensor, first: int, num_rows: int) -> Iterator[Slice]:
    """Yield what the slices of *tensor* have of its rows ``first .. first + num_rows``, at their offsets in it."""
    for stored in contiguous_slices(tensor):
        begin = max(stored.offsets[0], first)
        end = min(stored.offsets[0] + stored.sizes[0], first + num_rows)
        if begin >= end:
            continue
        if end - begin == stored.sizes[0]:
            yield replace(stored, digest=None)
            continue
        row_bytes = nbytes_of(tensor.dtype, stored.sizes[1:])
        yield replace(
            stored,
            offsets=(begin, *stored.offsets[1:]),
            sizes=(end - begin, *stored.sizes[1:]),
            start=stored.start + (begin - stored.offsets[0]) * stored.row_bytes,
            nbytes=(end - begin) * row_bytes,
            digest=None,
        )


Arrangement = Callable[[Dimensions, int, int], Sequence[RowRange]]
"""Takes the dimensions, the number of rows of the external tensor, and the number of Hugging Face tensors.

Returns the ranges of their rows that the external tensor consists of, in order. Each row occurs once. If the number of
rows does not match the dimensions, the ranges have another sum, which the converter reports.
"""


def one_after_another(dimensions: Dimensions, num_rows: int, num_parts: int) -> list[RowRange]:
    """All rows of the first tensor, then all of the second, and so on. All have the same number of rows."""
    share = num_rows // num_parts
    return [RowRange(part, 0, share) for part in range(num_parts)]


def by_query_group(dimensions: Dimensions, num_rows: int, num_parts: int) -> list[RowRange]:
    """Queries, keys and values as Megatron fuses them: for each group its query heads, its key, and its value.

    Source: SelfAttention.get_query_key_value_tensors of megatron-core 0.16.
    """
    head_size = dimensions.head_size
    num_heads = dimensions.num_heads + 2 * dimensions.num_query_groups
    if num_rows != num_heads * head_size:
        # A list for other dimensions could have any length. Without ranges, the caller reports the rows.
        return []
    query_rows = dimensions.num_heads // dimensions.num_query_groups * head_size
    ranges = []
    for group in range(dimensions.num_query_groups):
        ranges.append(RowRange(0, group * query_rows, query_rows))
        ranges.append(RowRange(1, group * head_size, head_size))
        ranges.append(RowRange(2, group * head_size, head_size))
    return ranges


@dataclass(frozen=True)
class Rule:
    """The tensor *external* of Megatron or torchtitan consists of the rows of *hugging_face*, in the order of *rows*.

    Names contain ``{layer}`` and ``{expert}`` where they apply to each. An *optional* tensor is absent from some
    models: then it is absent on both sides. A *padded* tensor has a row for each token of the vocabulary. Megatron may
    have more rows, which are removed, and added as zeros in the other direction.
    """

    external: str
    hugging_face: Strings
    rows: Arrangement = one_after_another
    optional: bool = False
    padded: bool = False

    @property
    def is_renaming(self) -> bool:
        """Whether the tensor is the Hugging Face tensor under another name."""
        return self.rows is one_after_another and len(self.hugging_face) == 1

    def expanded(self, dimensions: Dimensions) -> Iterator[tuple[str, Strings]]:
        """Yield the external name and the Hugging Face names for each layer and each expert."""
        num_layers = dimensions.num_layers if "{layer}" in self.external else 1
        num_experts = dimensions.num_experts if "{expert}" in self.external else 1
        # Not itertools.product(), which makes lists of the ranges: a config can claim any number of layers.
        for layer in range(num_layers):
            for expert in range(num_experts):
                names = [_filled(name, layer, expert) for name in self.hugging_face]
                yield _filled(self.external, layer, expert), tuple(names)


def _filled(name: str, layer: int, expert: int) -> str:
    return name.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def rename(external: str, hugging_face: str, *, optional: bool = False) -> Rule:
    """Return the rule for a tensor that only has another name."""
    return Rule(external, (hugging_face,), optional=optional)


def vocabulary(external: str, hugging_face: str, *, optional: bool = False) -> Rule:
    """Return the rule for a tensor with a row for each token, to which Megatron adds rows of padding."""
    return Rule(external, (hugging_face,), optional=optional, padded=True)


def fuse(
    external: str,
    hugging_face: Strings,
    rows: Arrangement = one_after_another,
    *,
    optional: bool = False,
) -> Rule:
    """Return the rule for a tensor in which the other program joins the rows of several."""
    return Rule(external, hugging_face, rows, optional=optional)
