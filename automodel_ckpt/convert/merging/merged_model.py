"""The tensors of a base merged with an adapter, computed when they are requested. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from automodel_ckpt.checkpoint.export.base_identity import files_of_index
from automodel_ckpt.checkpoint.export.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.export.plan import main_dtype
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Values
from automodel_ckpt.checkpoint.parts.slices import Tensor, TensorDict, TensorMap, nbytes_of
from automodel_ckpt.checkpoint.sources.source import BaseMaps, Tensors
from automodel_ckpt.checkpoint.tensors.box_reader import whole_checked
from automodel_ckpt.checkpoint.tensors.float_cast import Array, cast
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.formats.hugging_face import tensors_in_file
from automodel_ckpt.convert.merging.merge_rules import (
    MERGE_WITH_PEFT,
    Change,
    ExpertRange,
    Naming,
    changes_by,
    expert_changes,
    merged,
    unusable,
)
from automodel_ckpt.convert.targets.tensor_blocks import is_copy
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.state.quantized_tensors import QuantizedTensor

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_SINGLE = "model.safetensors"
_LACKING = "the adapter changes a tensor that the base lacks"
# Tensors of the base and the adapter have absolute paths: their files can be links into the Hub's cache.
_ROOT = Path("/")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter as peft's files in *directory*: its tensors, and the content of its configuration."""

    directory: Path
    tensors: TensorMap
    config: Values

    @property
    def where(self) -> str:
        return str(self.directory / layout.ADAPTER_MODEL)

    @property
    def model_config(self) -> Path | None:
        """The config of the model if the base's config has another head. None: use the base's config."""
        path = self.directory / layout.ADAPTER_MODEL_CONFIG
        return path if path.is_file() else None


def base_tensors(directory: Path) -> tuple[TensorDict, dict[str, int]]:
    """Return the base's tensors, and {tensor name: number of its file (from 1)}."""
    names = files_of_index(directory / layout.HF_INDEX) or [_SINGLE]
    if names == [_SINGLE] and not (directory / _SINGLE).is_file():
        raise RecipeError(
            "the base is not in safetensors files",
            "--base",
            str(directory),
            MERGE_WITH_PEFT,
        )
    export = find_export_manifest(directory, follow_links=True)
    tensors: TensorDict = {}
    numbers: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        found = tensors_in_file(directory, name, export)
        tensors |= found
        numbers |= dict.fromkeys(found, number)
    return tensors, numbers


class MergedModel:
    """The tensors of the merged model by their names in files. Their values are computed when they are requested.

    Tensors of a transformers model have a name in memory and a name in files, which can differ. *is_dequantized* is
    whether the base's files are quantized, and the merged model's files are not. *untied* are the names of
    tensors that config.json ties and that differ, and *notes* sentences for the user.
    """

    def __init__(self, adapter: Adapter, base_dir: Path, naming: Naming) -> None:
        self._adapter = adapter
        self._naming = naming
        self._base, self._numbers = base_tensors(base_dir)
        self._stored = Tensors(_ROOT, dict(self._base))
        self._quantized: Mapping[str, QuantizedTensor] = {}
        self.is_dequantized = self._dequantize(read_json(base_dir, "config.json") or {})
        if adapter.model_config is not None:
            # Tensors of the base that the model with the adapter's head does not have.
            self._remove(naming.others & self._base.keys())
        exported = naming.exported
        self._base = {exported.get(name, name): each for name, each in self._base.items()}
        self._numbers = {exported.get(name, name): each for name, each in self._numbers.items()}
        # A layer with experts has two parameters. Many tensors in files share their factors.
        self._factor = functools.lru_cache(maxsize=4)(
            lambda key, dtype: self._read(adapter.tensors[key], dtype)
        )
        self.notes: list[str] = []
        self._in_memory: TextDict = {}
        self._changes: dict[str, Change] = {}
        self._assign_changes(self._with_prefix(changes_by(adapter.tensors, adapter.where)))
        self.untied = self._untie()
        names = {*self._base, *self._changes, *self.untied}
        self.tensors = {name: self._described(name) for name in names}

    @property
    def maps(self) -> BaseMaps:
        """The number of each tensor's file: as in the base. New tensors are in the last file."""
        last = max(self._numbers.values(), default=1)
        return BaseMaps({name: self._numbers.get(name, last) for name in self.tensors})

    @property
    def rows(self) -> set[tuple[int, int]]:
        """The numbers of rows (before, after) of the tensors with another number of rows than the base's tensor."""
        changed = self._base.keys() & self._changes.keys()
        pairs = [(self._base[name].shape, self.tensors[name].shape) for name in changed]
        return {(before[0], after[0]) for before, after in pairs if before[:1] != after[:1]}

    def value(self, name: str, dtype: str) -> Array:
        """Return the value of the tensor *name* (in files) as *dtype*. Raises :class:`CheckpointUnusable`."""
        stored = self._of_base(name)
        change = self._changes.get(name, Change())
        start = self._adapter.tensors[change.whole] if change.whole else stored
        if not change.factors:
            return self._read(start, dtype)
        name_in_memory = self._in_memory[name]
        if start.dtype not in ORDINARY_FLOATS:
            raise self._not_mergeable(
                f"a layer of the base is stored as {start.dtype}, which nothing can be added to",
                name_in_memory,
            )
        # Computed in float32 or float64, and rounded once, when the file is written.
        wide = "F64" if start.dtype == "F64" else "F32"
        weight = self._read(start, wide)
        factors = {role: self._factor(key, wide) for role, key in change.factors.items()}
        module = name_in_memory.rpartition(".")[0]
        transposed = module in self._naming.transposed
        try:
            result = merged(
                weight,
                factors,
                self._adapter.config,
                name=module if change.experts is None else name_in_memory,
                transposed=transposed,
                experts=change.experts,
            )
        except ValueError as error:
            fitting = "layer" if change.experts is None else "experts"
            raise self._not_mergeable(
                f"an adapter does not fit its {fitting}: {error}", name_in_memory
            ) from error
        return cast(result, wide, dtype)

    # ---------------------------------------------------------------- the base

    def _dequantize(self, config: Values) -> bool:
        """Describe the dequantized tensors of a quantized base in the place of those in its files.

        Their dtype is the one that the base's config states, or bfloat16. Returns whether the *config* states a
        quantization that is supported here.
        """
        settings = config.get("quantization_config")
        if not isinstance(settings, dict):
            return False
        # torch is imported only for a quantized base.
        from automodel_ckpt.checkpoint.state.quantized_tensors import (
            UnsupportedQuantization,
            find_quantized,
        )

        try:
            files = find_quantized(self._base, settings)
        except UnsupportedQuantization:
            return False
        dtype = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "BF16")
        for name, quantized in files.tensors.items():
            self._numbers[name] = self._numbers[quantized.values]
            self._base[name] = Tensor(name, dtype, quantized.shape, ())
        self._remove(files.parts)
        self._quantized = files.tensors
        return True

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            del self._base[name]
            del self._numbers[name]

    def _file_name(self, name: str) -> str:
        """Return the name in the merged model's files of the tensor *name* in memory."""
        name = self._naming.files.get(name, name)
        return self._naming.exported.get(name, name)

    def _found(self, name: str) -> Tensor | None:
        """Return the base's tensor with the *name* (in memory), or one that is tied to it."""
        tied = self._naming.tied
        group = [name, tied.get(name, name)]
        group += [alias for alias, first in tied.items() if first == name]
        stored = (self._base.get(self._file_name(member)) for member in group)
        return next(filter(None, stored), None)

    def _of_base(self, name: str) -> Tensor:
        """Return the base's tensor of the *name* in files, or the one that it is tied to.

        A tensor of the adapter's head, which the base lacks, is described in the dtype that most of the base has.
        """
        stored = self._base.get(name) or self._found(self._in_memory[name])
        if stored is not None:
            return stored
        trained = self._adapter.tensors[self._changes[name].whole or ""]
        sizes = [(each.dtype, nbytes_of(each.dtype, each.shape)) for each in self._base.values()]
        return dataclasses.replace(trained, dtype=main_dtype(sizes) or trained.dtype)

    def _described(self, name: str) -> Tensor:
        stored = self._of_base(name)
        whole = self._changes[name].whole if name in self._changes else None
        shape = self._adapter.tensors[whole].shape if whole else stored.shape
        return Tensor(name, stored.dtype, shape, ())

    def _read(self, stored: Tensor, dtype: str) -> Array:
        """Return the values of a tensor of the base or of the adapter. Raises :class:`CheckpointUnusable`."""
        quantized = self._quantized.get(stored.fqn)
        if quantized is None:
            return cast(whole_checked(_ROOT, stored), stored.dtype, dtype)
        import torch

        from automodel_ckpt.checkpoint.state.quantized_tensors import dequantized_rows
        from automodel_ckpt.checkpoint.state.storable import DTYPES

        # Rounded as the base is when an adapter is trained on it.
        values = torch.empty(quantized.shape, dtype=DTYPES[stored.dtype], device="cpu")
        for start, block in dequantized_rows(self._stored, quantized, 0, quantized.shape[0]):
            values[start : start + len(block)] = block
        return cast(values.float().numpy(), "F32", dtype)

    # ---------------------------------------------------------------- the changes

    def _with_prefix(self, changes: dict[str, Change]) -> dict[str, Change]:
        """Return *changes* by the names in memory of the base's model, which has a head.

        An adapter of embeddings was trained on the model without its head. The names in it lack the backbone's prefix.
        """
        names = {*self._base, *self._naming.files}
        is_headless = self._adapter.config.get("task_type") == "FEATURE_EXTRACTION"
        if not is_headless or names & changes.keys():
            return changes
        prefixes = {
            each.removesuffix(name)
            for name in changes
            for each in names
            if each.endswith(f".{name}")
        }
        prefix = prefixes.pop() if len(prefixes) == 1 else ""
        return {f"{prefix}{name}": change for name, change in changes.items()}

    def _assign_changes(self, changes: dict[str, Change]) -> None:
        """Assign the *changes*, by name in memory, to tensors in files."""
        self._assign_expert_changes(changes)
        for name, change in changes.items():
            is_new = bool(change.whole) and name in self._naming.files
            has_own_head = self._adapter.model_config is not None
            if self._found(name) is None and not (has_own_head and is_new):
                raise self._not_mergeable(_LACKING, name)
            self._changes[self._file_name(name)] = change
            self._in_memory[self._file_name(name)] = name

    def _assign_expert_changes(self, changes: dict[str, Change]) -> None:
        """Move the changes of fused experts out of *changes*, and assign them to tensors in files."""
        for module, experts in self._naming.experts.items():
            try:
                pairs = list(expert_changes(changes, module, experts, self._adapter.config))
            except ValueError as error:
                raise self._not_mergeable(
                    f"an adapter of fused experts cannot be assigned: {error}", module
                ) from error
            for parameter, change in pairs:
                parts: Mapping[str, tuple[Any, ...]] = parameter.parts
                for name, part in (parts or {self._file_name(parameter.name): ()}).items():
                    if name not in self._base:
                        raise self._not_mergeable(_LACKING, name)
                    there = ExpertRange(parameter.num_experts, *part)
                    self._changes[name] = dataclasses.replace(change, experts=there)
                    self._in_memory[name] = parameter.name

    def _untie(self) -> set[str]:
        """Return the names of tensors that config.json ties and that differ. Those that are equal are stored once."""
        untied = set()
        apart = set()
        for names in self._naming.tied.items():
            pair = [self._file_name(name) for name in names]
            for name, file_name in zip(names, pair, strict=True):
                self._in_memory.setdefault(file_name, name)
            num_changed = sum(name in self._changes for name in pair)
            if num_changed == 0:
                # transformers then does not tie them.
                stored = [self._base[name] for name in pair if name in self._base]
                if len(stored) == 2 and not is_copy(_ROOT, stored[0], _ROOT, stored[1]):
                    apart.update(pair)
                continue
            # Up to rounding: a tied head has the factors of the embedding, multiplied in the other order.
            is_equal = False
            if num_changed > 1:
                a, b = (self.value(name, "F32") for name in pair)
                is_equal = a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-6)
            if not is_equal:
                untied.update(pair)
            else:
                for name in pair:
                    if name not in self._base:
                        self._changes.pop(name, None)
        for reason, differing in (
            ("no longer tied, since the adapter changed one of them", untied),
            ("not tied, since they differ in the base", apart),
        ):
            if differing:
                self.notes.append(f"{reason}: {', '.join(sorted(differing))}")
        return untied | apart

    def _not_mergeable(self, what: str, name: str) -> CheckpointUnusable:
        return unusable(what, self._adapter.where, name)
