"""Apply the rules of a converter to described tensors, in either direction. Nothing is read."""

from __future__ import annotations

import math
import operator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.type_aliases import Counts, Strings
from automodel_ckpt.checkpoint.parts.slices import Tensor, TensorDict, TensorMap
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.files import faults_of
from automodel_ckpt.convert.names.dimensions import Dimensions
from automodel_ckpt.convert.names.rules import RowRange, Rule, join_rows

_MAX_LISTED = 3


@dataclass(frozen=True)
class ExternalTensors:
    """Tensors under the names of the other program, one for each layer and expert.

    *zero_rows* maps the name of a padded tensor to the number of rows of zeros that follow its described rows: its
    slices, and its shape, are without them.
    """

    tensors: TensorMap
    zero_rows: Counts = field(default_factory=dict)


@dataclass(frozen=True)
class Converter:
    """The rules for the models of *model_types*, the values of ``model_type`` in their config.json.

    They convert between the names of Hugging Face and of another program, Megatron or torchtitan.
    """

    model_types: Strings
    rules: tuple[Rule, ...]

    def to_hugging_face(self, tensors: TensorMap, dimensions: Dimensions, where: str) -> TensorDict:
        """Return the Hugging Face tensors that consist of the other program's *tensors*, found in *where*.

        The names are per layer and per expert; for Megatron, see :func:`~.megatron_names.plain_names`. Raises
        :class:`CheckpointUnusable` if a tensor is missing, unknown, or does not have the rows that *dimensions* imply.
        """
        found: TensorDict = {}
        used = set()
        with _mismatches(where):
            for rule in self.rules:
                for name, targets in rule.expanded(dimensions):
                    if name in tensors:
                        used.add(name)
                        parts = _split(rule, tensors[name], targets, dimensions)
                        found |= {part.fqn: part for part in parts}
                    elif not rule.optional:
                        raise Fault(f"a tensor of the model is missing: {name}")
            _check_all_used(tensors, used)
        return found

    def from_hugging_face(
        self,
        tensors: TensorMap,
        dimensions: Dimensions,
        where: str,
        *,
        vocabulary_multiple: int = 1,
    ) -> ExternalTensors:
        """Return the other program's tensors that consist of the Hugging Face *tensors*, found in *where*.

        Rows of zeros make the number of rows of the vocabulary a multiple of *vocabulary_multiple*. Raises
        :class:`CheckpointUnusable` if a tensor is missing, unknown, or does not have the rows that *dimensions* imply.
        """
        found = {}
        zero_rows = {}
        used: set[str] = set()
        with _mismatches(where):
            for rule in self.rules:
                for name, sources in rule.expanded(dimensions):
                    missing = [source for source in sources if source not in tensors]
                    if rule.optional and len(missing) == len(sources):
                        continue
                    if missing:
                        raise Fault(f"a tensor of the model is missing: {missing[0]}")
                    used.update(sources)
                    found[name] = _joined(
                        rule, name, [tensors[each] for each in sources], dimensions
                    )
                    padding = -found[name].shape[0] % vocabulary_multiple if rule.padded else 0
                    if padding:
                        zero_rows[name] = padding
            _check_all_used(tensors, used)
        return ExternalTensors(found, zero_rows)


def _split(rule: Rule, tensor: Tensor, targets: Strings, dimensions: Dimensions) -> list[Tensor]:
    """Return the Hugging Face tensors *targets* in one of the other program."""
    vocab_size = dimensions.vocab_size
    if rule.padded and vocab_size is not None and tensor.shape[:1] != (vocab_size,):
        if not tensor.shape or tensor.shape[0] < vocab_size:
            raise _wrong_rows(tensor)
        return [join_rows(targets[0], [tensor], [RowRange(0, 0, vocab_size)])]
    if rule.is_renaming:
        return [tensor.renamed(targets[0])]
    num_rows = math.prod(tensor.shape[:1])
    # The inverse: each range of a part is located in the fused tensor, in the order of the part's rows.
    located: list[list[tuple[int, RowRange]]] = [[] for _ in targets]
    first = 0
    for wanted in rule.rows(dimensions, num_rows, len(targets)):
        located[wanted.part].append((wanted.first, RowRange(0, first, wanted.num_rows)))
        first += wanted.num_rows
    if first != num_rows or not tensor.shape:
        raise _wrong_rows(tensor)
    parts = []
    for target, own in zip(targets, located, strict=True):
        rows = [each for _, each in sorted(own, key=operator.itemgetter(0))]
        parts.append(join_rows(target, [tensor], rows))
    return parts


def _joined(rule: Rule, name: str, parts: list[Tensor], dimensions: Dimensions) -> Tensor:
    """Return the tensor of the other program that consists of *parts*."""
    if rule.is_renaming:
        return parts[0].renamed(name)
    if len({(part.dtype, part.shape[1:]) for part in parts}) > 1 or not parts[0].shape:
        text = ", ".join(f"{part.fqn} {part.dtype} {list(part.shape)}" for part in parts)
        raise Fault(f"these tensors are fused and do not match: {text}")
    ranges = rule.rows(dimensions, sum(part.shape[0] for part in parts), len(parts))
    for number, part in enumerate(parts):
        if sum(own.num_rows for own in ranges if own.part == number) != part.shape[0]:
            raise _wrong_rows(part)
    return join_rows(name, parts, ranges)


def _check_all_used(tensors: TensorMap, used: set[str]) -> None:
    unknown = sorted(tensors.keys() - used)
    if unknown:
        text = ", ".join(unknown[:_MAX_LISTED])
        raise Fault(f"the converter has no rule for {counted(len(unknown), 'tensor')}: {text}")


def _wrong_rows(tensor: Tensor) -> Fault:
    text = f"{tensor.fqn} of shape {list(tensor.shape)}"
    return Fault(f"a tensor does not have the rows that the model's config implies: {text}")


def _mismatches(where: str) -> AbstractContextManager[None]:
    """Report a fault in the block as one of the tensors in *where*."""
    return faults_of(
        Path(where),
        "the tensors are not the model's",
        "use the config.json of the same model, and the converter of its model type",
    )
