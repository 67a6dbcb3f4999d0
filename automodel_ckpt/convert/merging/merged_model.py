"""The tensors of a base merged with an adapter, computed when they are requested. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from automodel_ckpt.checkpoint.export.base_identity import files_of_index
from automodel_ckpt.checkpoint.export.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS, main_dtype
from automodel_ckpt.checkpoint.parts.slices import Tensor, nbytes_of
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.tensors.float_cast import Array, cast
from automodel_ckpt.checkpoint.tensors.stored import whole_checked
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.formats.hugging_face import tensors_in_file
from automodel_ckpt.convert.imports.base_copies import difference
from automodel_ckpt.convert.merging.merge_rules import (
    Change,
    ExpertRange,
    Naming,
    changes_by,
    expert_changes,
    merged,
    merged_experts,
)
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.state.quantized_tensors import QuantizedFiles

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class QuantizedBase:
    """The dequantized tensors of a base: *tensors* without data in files, and *parts*, the stored tensors they replace.

    Their dtype is the one that the base's config states, or bfloat16.
    """

    def __init__(self, source: Tensors, files: QuantizedFiles, dtype: str) -> None:
        self._source = source
        self._files = files
        self.parts = files.parts
        self.tensors: dict[str, Tensor] = {}
        for name, quantized in files.tensors.items():
            self.tensors[name] = Tensor(name, dtype, quantized.shape, ())

    def stored_name(self, name: str) -> str:
        """The stored tensor with the values of the tensor *name*."""
        return self._files.tensors[name].values

    def value(self, name: str) -> Array:
        """Return the values of the tensor *name*, rounded to its dtype, as float32.

        Raises :class:`CheckpointUnusable` for damaged files.
        """
        import torch

        from automodel_ckpt.checkpoint.formats.planning import DTYPES
        from automodel_ckpt.checkpoint.state.quantized_tensors import dequantized_rows

        quantized = self._files.tensors[name]
        # Rounded as the base is when an adapter is trained on it.
        values = torch.empty(quantized.shape, dtype=DTYPES[self.tensors[name].dtype], device="cpu")
        num_rows = quantized.shape[0]
        for start, block in dequantized_rows(self._source, quantized, 0, num_rows):
            values[start : start + len(block)] = block
        array: Array = values.float().numpy()
        return array


def quantized_base(
    directory: Path, root: Path, tensors: Mapping[str, Tensor]
) -> QuantizedBase | None:
    """Describe the quantized ones of the *tensors* of the base in *directory*, whose files are relative to *root*.

    Returns None if its config.json states no quantization, or one that is not supported here.
    """
    config: dict[str, Any] = read_json(directory, "config.json") or {}
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    # torch is imported only for a quantized base.
    from automodel_ckpt.checkpoint.state.quantized_tensors import (
        UnsupportedQuantization,
        find_quantized,
    )

    try:
        files = find_quantized(tensors, settings)
    except UnsupportedQuantization:
        return None
    stated = str(config.get("dtype") or config.get("torch_dtype"))
    # A copy: the caller replaces the quantized ones among its tensors.
    source = Tensors(root, dict(tensors))
    return QuantizedBase(source, files, _DTYPES.get(stated, "BF16"))


_SINGLE = "model.safetensors"
_KEPT_FACTORS = 4
"""Factors of adapters that are kept in memory: the two of both parameters of a layer with experts."""
# Tensors of the base and the adapter have absolute paths: their files can be links into the Hub's cache.
_ROOT = Path("/")


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as peft's files in *directory*: its tensors, and the content of its configuration."""

    directory: Path
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]

    @property
    def where(self) -> str:
        return str(self.directory / layout.ADAPTER_MODEL)

    @property
    def model_config(self) -> Path | None:
        """The config of the model, if that of the base has another head; None: the base's."""
        path = self.directory / layout.ADAPTER_MODEL_CONFIG
        return path if path.is_file() else None


def base_tensors(directory: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the base's tensors, and {tensor name: number of its file (from 1)}."""
    index = directory / layout.HF_INDEX
    names = files_of_index(index) or [_SINGLE]
    if names == [_SINGLE] and not (directory / _SINGLE).is_file():
        raise RecipeError(
            "the base is not in safetensors files",
            where="--base",
            value=str(directory),
            hint="merge with peft in your own code (merge_and_unload): its digest is of these files",
        )
    export = find_export_manifest(directory, follow_links=True)
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        found = tensors_in_file(directory, name, export, follow_links=True)
        tensors |= found
        numbers |= dict.fromkeys(found, number)
    return tensors, numbers


class MergedModel:
    """The tensors of the merged model by their names in files. Their values are computed when they are requested.

    Tensors of a transformers model have a name in memory and a name in files, which can differ.
    """

    def __init__(self, adapter: Adapter, base_dir: Path, naming: Naming) -> None:
        self._adapter = adapter
        self._naming = naming
        self._base, self._numbers = base_tensors(base_dir)
        self._quantized = quantized_base(base_dir, _ROOT, self._base)
        if self._quantized is not None:
            self._replace_quantized(self._quantized)
        if adapter.model_config is not None:
            self._remove_other_heads()
        exported = naming.exported
        self._base = {exported.get(name, name): each for name, each in self._base.items()}
        self._numbers = {exported.get(name, name): each for name, each in self._numbers.items()}
        self._factors: dict[tuple[str, str], Array] = {}
        self.notes: list[str] = []
        changes = self._in_base(changes_by(adapter.tensors, adapter.where))
        of_experts = self._expert_changes(changes)
        self.changes = self._by_file_name(changes) | of_experts
        self.untied = self._untie()
        names = {*self._base, *self.changes, *self.untied}
        self.tensors = {name: self._described(name) for name in names}

    @property
    def is_dequantized(self) -> bool:
        """Whether the files of the base are quantized, and those of the merged model are not."""
        return self._quantized is not None

    @property
    def maps(self) -> BaseMaps:
        """The number of each tensor's file: as in the base. New tensors are in the last file."""
        last = max(self._numbers.values(), default=1)
        return BaseMaps({name: self._numbers.get(name, last) for name in self.tensors})

    @property
    def rows(self) -> set[tuple[int, int]]:
        """The numbers of rows (before, after) of the tensors whose number of rows is not that of the base."""
        found: set[tuple[int, int]] = set()
        for name in self.changes:
            if name not in self._base or not self._base[name].shape:
                continue
            before = self._base[name].shape[0]
            after = self.tensors[name].shape[0]
            if before != after:
                found.add((before, after))
        return found

    def value(self, name: str, dtype: str) -> Array:
        """Return the value of the tensor *name* (in files) as *dtype*. Raises :class:`CheckpointUnusable`."""
        stored = self._stored(name)
        if name not in self.changes:
            return self._read_as(stored, dtype)
        name_in_memory, change = self.changes[name]
        value, value_dtype = self._changed(name_in_memory, change, stored)
        return cast(value, value_dtype, dtype)

    def _replace_quantized(self, quantized: QuantizedBase) -> None:
        """Describe the dequantized tensors of the base in the place of those in its files."""
        for name in quantized.tensors:
            self._numbers[name] = self._numbers[quantized.stored_name(name)]
        for name in quantized.parts:
            del self._base[name]
            del self._numbers[name]
        self._base |= quantized.tensors

    def _remove_other_heads(self) -> None:
        """Remove the tensors of the base that the model with the adapter's head does not have."""
        for name in self._naming.others & self._base.keys():
            del self._base[name]
            del self._numbers[name]

    def _is_new(self, name: str, change: Change) -> bool:
        """Whether the tensor *name* (in memory) is one of the adapter's head that the base lacks."""
        has_own_head = self._adapter.model_config is not None
        return has_own_head and bool(change.whole) and name in self._naming.files

    def _whole(self, stored: Tensor) -> tuple[Array, str]:
        """Return the values of a tensor of the base or of the adapter, and their dtype."""
        quantized = self._quantized
        if quantized is not None and quantized.tensors.get(stored.fqn) is stored:
            return quantized.value(stored.fqn), "F32"
        return whole_checked(_ROOT, stored), stored.dtype

    def _read_as(self, stored: Tensor, dtype: str) -> Array:
        value, value_dtype = self._whole(stored)
        return cast(value, value_dtype, dtype)

    def _file_name(self, name: str) -> str:
        """Return the name in the merged model's files of the tensor *name* in memory."""
        name = self._naming.files.get(name, name)
        return self._naming.exported.get(name, name)

    def _in_base(self, changes: Mapping[str, Change]) -> dict[str, Change]:
        """Return *changes* by the names in memory of the base's model, which has a head.

        An adapter of embeddings was trained on the model without its head, whose names lack the prefix of the backbone.
        """
        if self._adapter.config.get("task_type") != "FEATURE_EXTRACTION":
            return dict(changes)
        names = {*self._base, *self._naming.files}
        prefixes: set[str] = set()
        for name in changes:
            if name in names:
                return dict(changes)
            prefixes |= {each.removesuffix(name) for each in names if each.endswith(f".{name}")}
        prefix = prefixes.pop() if len(prefixes) == 1 else ""
        return {f"{prefix}{name}": change for name, change in changes.items()}

    def _by_file_name(self, changes: Mapping[str, Change]) -> dict[str, tuple[str, Change]]:
        """Return {name in files: (name in memory, change)}."""
        found: dict[str, tuple[str, Change]] = {}
        for name, change in changes.items():
            file_name = self._file_name(name)
            is_in_base = file_name in self._base or self._stored_name(name) in self._base
            if not is_in_base and self._changes_nothing(change):
                self.notes.append(f"not in the base, and its adapter learned nothing: {name}")
                continue
            if not is_in_base and not self._is_new(name, change):
                raise self._not_mergeable("the adapter changes a tensor that the base lacks", name)
            found[file_name] = (name, change)
        return found

    def _changes_nothing(self, change: Change) -> bool:
        """Whether the adapter adds zero: its layer, such as the pooler of an encoder, took no part in training."""
        factor = change.factors.get("b")
        if factor is None or change.whole:
            return False
        return not self._read_as(self._adapter.tensors[factor], "F32").any()

    def _expert_changes(self, changes: dict[str, Change]) -> dict[str, tuple[str, Change]]:
        """Move the changes of fused experts out of *changes*: {name in files: (name in memory, change)}."""
        found: dict[str, tuple[str, Change]] = {}
        for module, experts in self._naming.experts.items():
            try:
                pairs = list(expert_changes(changes, module, experts, self._adapter.config))
            except ValueError as error:
                what = f"an adapter of fused experts cannot be assigned: {error}"
                raise self._not_mergeable(what, module) from error
            for parameter, change in pairs:
                ranges = {self._file_name(parameter.name): ExpertRange(parameter.num_experts)}
                if parameter.parts:
                    ranges = {
                        name: ExpertRange(parameter.num_experts, *part)
                        for name, part in parameter.parts.items()
                    }
                for name, experts_there in ranges.items():
                    if name not in self._base:
                        what = "the adapter changes a tensor that the base lacks"
                        raise self._not_mergeable(what, name)
                    changed = dataclasses.replace(change, experts=experts_there)
                    found[name] = (parameter.name, changed)
        return found

    def _stored_name(self, name: str) -> str:
        """Return the name in files under which the base stores the tensor *name* (in memory), or one tied to it."""
        tied = self._naming.tied
        group = [name, tied.get(name, name)]
        group += [alias for alias, first in tied.items() if first == name]
        names = [self._file_name(member) for member in group]
        for file_name in names:
            if file_name in self._base:
                return file_name
        return names[0]

    def _stored(self, file_name: str) -> Tensor:
        """Return the base's tensor of that name, or the one that it is tied to."""
        if file_name in self._base:
            return self._base[file_name]
        if file_name in self.changes:
            name, change = self.changes[file_name]
            if change.whole and self._stored_name(name) not in self._base:
                return self._new_tensor(self._adapter.tensors[change.whole])
        for name in self._naming.files:
            if self._file_name(name) == file_name:
                return self._base[self._stored_name(name)]
        return self._base[self._stored_name(file_name)]

    def _new_tensor(self, trained: Tensor) -> Tensor:
        """Describe a tensor of the adapter's head in the dtype that most of the base has."""
        sizes = [
            (tensor.dtype, nbytes_of(tensor.dtype, tensor.shape)) for tensor in self._base.values()
        ]
        return dataclasses.replace(trained, dtype=main_dtype(sizes) or trained.dtype)

    def _untie(self) -> set[str]:
        """Return the names of tensors that config.json ties and that differ. Those that are equal are stored once."""
        untied: set[str] = set()
        apart: set[str] = set()
        for alias, first in self._naming.tied.items():
            pair = (self._file_name(alias), self._file_name(first))
            changed = [name for name in pair if name in self.changes]
            if not changed:
                if self._differ_in_base(*pair):
                    apart.update(pair)
                continue
            if len(changed) == 1 or not self._are_equal(*pair):
                untied.update(pair)
                continue
            for name in pair:
                if name not in self._base:
                    self.changes.pop(name, None)
        if untied:
            names = ", ".join(sorted(untied))
            self.notes.append(f"no longer tied, since the adapter changed one of them: {names}")
        if apart:
            names = ", ".join(sorted(apart))
            self.notes.append(f"not tied, since they differ in the base: {names}")
        return untied | apart

    def _differ_in_base(self, one: str, other: str) -> bool:
        """Whether the base has both tensors, with different values: transformers then does not tie them."""
        if one not in self._base or other not in self._base:
            return False
        return bool(difference(_ROOT, self._base[one], Tensors(_ROOT, self._base), [other]))

    def _are_equal(self, one: str, other: str) -> bool:
        """Whether two changed tensors have equal values, up to rounding.

        The factors of a tied head are those of the embedding, multiplied in the other order.
        """
        a = self.value(one, "F32")
        b = self.value(other, "F32")
        return a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-6)

    def _described(self, name: str) -> Tensor:
        stored = self._stored(name)
        shape = stored.shape
        if name in self.changes:
            _, change = self.changes[name]
            if change.whole:
                shape = self._adapter.tensors[change.whole].shape
        return Tensor(name, stored.dtype, shape, ())

    def _changed(self, name: str, change: Change, stored: Tensor) -> tuple[Array, str]:
        """Return the new value of the tensor *name* (in memory), and its dtype."""
        start = self._adapter.tensors[change.whole] if change.whole else stored
        if not change.factors:
            return self._whole(start)
        if start.dtype not in ORDINARY_FLOATS:
            what = f"a layer of the base is stored as {start.dtype}, which nothing can be added to"
            raise self._not_mergeable(what, name)
        # Computed in float32 or float64, and rounded once, when the file is written.
        dtype = "F64" if start.dtype == "F64" else "F32"
        weight = self._read_as(start, dtype)
        factors = self._read_factors(change, dtype)
        if change.experts is not None:
            return self._changed_experts(name, change.experts, weight, factors), dtype
        module = name.removesuffix(".weight")
        transposed = module in self._naming.transposed
        config = self._adapter.config
        try:
            return merged(weight, factors, config, module=module, transposed=transposed), dtype
        except ValueError as error:
            what = f"an adapter does not fit its layer: {error}"
            raise self._not_mergeable(what, name) from error

    def _changed_experts(
        self, name: str, experts: ExpertRange, weight: Array, factors: Mapping[str, Array]
    ) -> Array:
        """Return the new value of a tensor in files with experts of the parameter *name* (in memory)."""
        transposed = name.rpartition(".")[0] in self._naming.transposed
        config = self._adapter.config
        try:
            return merged_experts(
                weight, factors, config, experts, name=name, transposed=transposed
            )
        except ValueError as error:
            what = f"an adapter does not fit its experts: {error}"
            raise self._not_mergeable(what, name) from error

    def _read_factors(self, change: Change, dtype: str) -> dict[str, Array]:
        """Return the factors of *change* by role. The last ones are kept, because experts share them."""
        factors: dict[str, Array] = {}
        for role, key in change.factors.items():
            known = self._factors.get((key, dtype))
            if known is None:
                known = self._read_as(self._adapter.tensors[key], dtype)
                while len(self._factors) >= _KEPT_FACTORS:
                    del self._factors[next(iter(self._factors))]
                self._factors[key, dtype] = known
            factors[role] = known
        return factors

    def _not_mergeable(self, what: str, name: str) -> CheckpointUnusable:
        hint = "load base and adapter with peft in your own code, and call merge_and_unload"
        return CheckpointUnusable(what, where=self._adapter.where, value=name, hint=hint)
