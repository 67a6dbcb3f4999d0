"""Apply the rules of a converter to described tensors, in either direction. Nothing is read."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.convert.names.dimensions import Dimensions
from automodel_ckpt.convert.names.rules import Rule
from automodel_ckpt.convert.names.slicing import RowRange, join_rows
from automodel_ckpt.errors import CheckpointUnusable

_MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class ExternalTensors:
    """Tensors under the names of the other program, one for each layer and expert.

    *zero_rows* maps the name of a padded tensor to the number of rows of zeros that follow its described rows: its
    slices, and its shape, are without them.
    """

    tensors: Mapping[str, Tensor]
    zero_rows: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Converter:
    """The rules for the models of *model_types*, the values of ``model_type`` in their config.json.

    They convert between the names of Hugging Face and those of another program, Megatron or torchtitan.
    """

    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]

    def to_hugging_face(
        self, tensors: Mapping[str, Tensor], dimensions: Dimensions, where: str
    ) -> dict[str, Tensor]:
        """Return the Hugging Face tensors that consist of the other program's *tensors*, found in *where*.

        The names are per layer and per expert; for Megatron, see :func:`~.megatron_names.plain_names`. Raises
        :class:`CheckpointUnusable` if a tensor is missing, unknown, or does not have the rows that *dimensions* imply.
        """
        found: dict[str, Tensor] = {}
        used: set[str] = set()
        for rule in self.rules:
            for name, targets in rule.expanded(dimensions):
                tensor = tensors.get(name)
                if tensor is None and rule.optional:
                    continue
                if tensor is None:
                    raise _unusable("a tensor of the model is missing", name, where)
                used.add(name)
                for part in split_tensor(rule, tensor, targets, dimensions, where):
                    found[part.fqn] = part
        _check_all_used(tensors, used, where)
        return found

    def from_hugging_face(
        self,
        tensors: Mapping[str, Tensor],
        dimensions: Dimensions,
        where: str,
        *,
        vocabulary_multiple: int = 1,
    ) -> ExternalTensors:
        """Return the other program's tensors that consist of the Hugging Face *tensors*, found in *where*.

        Rows of zeros make the number of rows of the vocabulary a multiple of *vocabulary_multiple*. Raises
        :class:`CheckpointUnusable` if a tensor is missing, unknown, or does not have the rows that *dimensions* imply.
        """
        found: dict[str, Tensor] = {}
        zero_rows: dict[str, int] = {}
        used: set[str] = set()
        for rule in self.rules:
            for name, sources in rule.expanded(dimensions):
                present = [source for source in sources if source in tensors]
                if rule.optional and not present:
                    continue
                if len(present) != len(sources):
                    missing = next(source for source in sources if source not in tensors)
                    raise _unusable("a tensor of the model is missing", missing, where)
                used.update(sources)
                parts = [tensors[source] for source in sources]
                found[name] = _joined(rule, name, parts, dimensions, where)
                padding = -found[name].shape[0] % vocabulary_multiple if rule.padded else 0
                if padding:
                    zero_rows[name] = padding
        _check_all_used(tensors, used, where)
        return ExternalTensors(found, zero_rows)


def split_tensor(
    rule: Rule, tensor: Tensor, targets: tuple[str, ...], dimensions: Dimensions, where: str
) -> list[Tensor]:
    """Return the Hugging Face tensors *targets* in one of the other program.

    Raises :class:`CheckpointUnusable` if it does not have the rows that *dimensions* imply.
    """
    if rule.padded:
        return [_without_padding(tensor, targets[0], dimensions, where)]
    if len(targets) == 1 and not tensor.shape:
        return [tensor.renamed(targets[0])]
    ranges = rule.rows(dimensions, tensor.shape[0], len(targets))
    if sum(wanted.num_rows for wanted in ranges) != tensor.shape[0]:
        raise _wrong_rows(tensor, where)
    if len(ranges) == 1:
        return [tensor.renamed(targets[0])]
    # The inverse: each range of a part is located in the fused tensor, in the order of the part's rows.
    located: list[list[tuple[int, RowRange]]] = [[] for _ in targets]
    first = 0
    for wanted in ranges:
        located[wanted.part].append((wanted.first, RowRange(0, first, wanted.num_rows)))
        first += wanted.num_rows
    parts: list[Tensor] = []
    for target, own in zip(targets, located, strict=True):
        rows = [each for _, each in sorted(own, key=operator.itemgetter(0))]
        parts.append(join_rows(target, [tensor], rows, strided=rule.permuted))
    return parts


def _joined(
    rule: Rule, name: str, parts: list[Tensor], dimensions: Dimensions, where: str
) -> Tensor:
    """Return the tensor of the other program that consists of *parts*."""
    kinds = {(part.dtype, part.shape[1:]) for part in parts}
    if len(kinds) > 1:
        raise _unusable(
            "these tensors are fused and do not match",
            ", ".join(f"{part.fqn} {part.dtype} {list(part.shape)}" for part in parts),
            where,
        )
    is_scalar = len(parts) == 1 and not parts[0].shape
    if rule.padded or is_scalar:
        return parts[0].renamed(name)
    num_rows = sum(part.shape[0] for part in parts)
    ranges = rule.rows(dimensions, num_rows, len(parts))
    for number, part in enumerate(parts):
        wanted = sum(own.num_rows for own in ranges if own.part == number)
        if wanted != part.shape[0]:
            raise _wrong_rows(part, where)
    if len(ranges) == 1:
        return parts[0].renamed(name)
    return join_rows(name, parts, ranges, strided=rule.permuted)


def _without_padding(tensor: Tensor, target: str, dimensions: Dimensions, where: str) -> Tensor:
    vocab_size = dimensions.vocab_size
    if vocab_size is None or tensor.shape[:1] == (vocab_size,):
        return tensor.renamed(target)
    if not tensor.shape or tensor.shape[0] < vocab_size:
        raise _wrong_rows(tensor, where)
    return join_rows(target, [tensor], [RowRange(0, 0, vocab_size)])


def _check_all_used(tensors: Mapping[str, Tensor], used: set[str], where: str) -> None:
    unknown = sorted(tensors.keys() - used)
    if unknown:
        more = len(unknown) - _MAX_LISTED
        raise _unusable(
            "the converter has no rule for tensors of the model",
            ", ".join(unknown[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else ""),
            where,
        )


def _wrong_rows(tensor: Tensor, where: str) -> CheckpointUnusable:
    text = f"{tensor.fqn} of shape {list(tensor.shape)}"
    return _unusable("a tensor does not have the rows that the model's config implies", text, where)


def _unusable(what: str, value: str, where: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        what,
        where=where,
        value=value[:500],
        hint="use the config.json of the same model, and the converter of its model type",
    )
