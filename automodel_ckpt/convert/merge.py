"""Base and adapter as one model in Hugging Face files: named, split and described as the base's.

The base is read tensor by tensor, once for its digest and once to be copied; memory is that of the largest tensor, four
times over. Staged and published as every export. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.digests import digest_of
from automodel_ckpt.checkpoint.dtypes import ORDINARY_FLOATS, main_dtype
from automodel_ckpt.checkpoint.export.adapter_record import (
    base_revision,
    find_base,
    read_peft_record,
)
from automodel_ckpt.checkpoint.export.base_identity import files_of_index, identify_base
from automodel_ckpt.checkpoint.export.consolidate import ConsolidationReport, consolidate
from automodel_ckpt.checkpoint.export.copy_engine import Digested
from automodel_ckpt.checkpoint.export.files import (
    agreeing_config,
    cast_lines,
    write_manifest,
    write_side_files,
)
from automodel_ckpt.checkpoint.export.output import Output, create_output
from automodel_ckpt.checkpoint.export.plan import (
    ExportTensor,
    OutputFile,
    Plan,
    make_plan,
    parse_cast_dtype,
)
from automodel_ckpt.checkpoint.export.publish import check_target, resolved_target, staged
from automodel_ckpt.checkpoint.export_leftovers import Log
from automodel_ckpt.checkpoint.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.slices import Tensor, nbytes_of
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.sources.model_files import (
    GENERATION_CONFIG,
    base_files,
    is_embedding_file,
    is_tokenizer_file,
)
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.checkpoint.tensors.float_cast import Array, cast
from automodel_ckpt.checkpoint.tensors.stored import whole_checked
from automodel_ckpt.checkpoint.verify import verify
from automodel_ckpt.convert.merge_rules import (
    Change,
    ExpertRange,
    Naming,
    changes_by,
    expert_changes,
    merged,
    merged_experts,
)
from automodel_ckpt.convert.quantized_base import QuantizedBase, quantized_base
from automodel_ckpt.convert.sources.files import read_json
from automodel_ckpt.convert.sources.hugging_face import tensors_in_file
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

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


def merge(
    source: Path,
    output: str | os.PathLike[str] | None = None,
    *,
    base: str | None,
    directory_of: Callable[[str, str | None], Path | None],
    naming_of: Callable[[Path, Path | None], Naming],
    cast_dtype: str | None = None,
    cache: Path | None = None,
    log: Log,
) -> ConsolidationReport:
    """Write the base and the adapter of the checkpoint *source* (or its ``model/``) as one model to *output*.

    *output* defaults to ``merged`` in the model's directory. *base* is the name or directory of the base; None is the
    one that the checkpoint names. *directory_of* returns the directory of a base's name at a revision of the Hub (None:
    the main one), and *naming_of* the names of its tensors in memory, with the config that its second argument names
    (None: the base's own). Digests of the base are stored in *cache*.

    Raises :class:`CheckpointUnusable` if the checkpoint is damaged or has no adapter, if the base is not the adapter's,
    and for tensors that cannot be merged; :class:`SaveFailed` if the output cannot be written; :class:`RecipeError` for
    a wrong argument. In each case nothing was written.
    """
    started = time.monotonic()
    cast_code = parse_cast_dtype(cast_dtype)
    checkpoint, name = _checkpoint_of(source)
    target = resolved_target(output, checkpoint / name / layout.MERGED)
    check_target(target)
    manifest = Manifest.read(checkpoint)
    record = read_peft_record(checkpoint, name)
    with _adapter(checkpoint, name, manifest) as adapter:
        base_name = base
        if base_name is None:
            base_name = find_base(record, checkpoint.parent)
        directory = directory_of(base_name, _revision(adapter, record, base_name))
        base_dir = _base(record, base_name, directory, checkpoint, cache)
        model = MergedModel(adapter, base_dir, naming_of(base_dir, adapter.model_config))
        plan = make_plan(model.tensors, {}, model.maps, cast_dtype=cast_code, where=str(base_dir))
        files, warnings = _side_files(adapter, base_dir, model, plan)
        for warning in warnings:
            log(f"warning: {warning}")
        for text in [*model.notes, *cast_lines(plan)]:
            log(text)
        with staged(target, log) as staging:
            parts: list[Digested] = []
            for file in plan.files:
                parts.extend(_write(file, model, staging))
            write_side_files(files, staging)
            origin = Source(checkpoint, checkpoint / name, {}, manifest=manifest)
            write_manifest(plan, origin, staging, parts)
    seconds = time.monotonic() - started
    sizes = (len(plan.files), len(model.tensors), plan.nbytes)
    return ConsolidationReport(target, *sizes, seconds, True, plan.casts, tuple(warnings))


def _checkpoint_of(source: Path) -> tuple[Path, str]:
    """Return the checkpoint that *source* is, or is a part of, and the name of the part with the adapter."""
    if os.path.lexists(source / layout.MANIFEST):
        return source, "model"
    return source.parent, source.name


def _revision(adapter: Adapter, record: Mapping[str, Any], base_name: str) -> str | None:
    """Return the revision of the base in the adapter's configuration; None for a base with another name."""
    if base_name != record["base"]["name"]:
        return None
    return base_revision(adapter.config, adapter.directory / layout.ADAPTER_CONFIG)


def _base(
    record: Mapping[str, Any],
    base_name: str,
    directory: Path | None,
    checkpoint: Path,
    cache: Path | None,
) -> Path:
    """Return the *directory* of the base after its digest was compared with the *record* of the adapter.

    Raises :class:`RecipeError` if there is none, and :class:`CheckpointUnusable` if the adapter was trained on another.
    """
    if directory is None:
        raise RecipeError(
            "the base model is not on this machine",
            where="--base",
            value=base_name,
            hint="load it once while there is a network, or give its directory with --base",
        )
    identity = identify_base(base_name, directory, run=checkpoint.parent, cache=cache)
    digest = record["base"].get("digest")
    # Shapes prove nothing: an adapter on another base loads and answers nonsense.
    if identity.digest != digest:
        raise CheckpointUnusable(
            "this is not the base that the adapter was trained on",
            where=str(directory),
            value=f"digest {identity.digest}, not {digest}",
            hint=f"give the directory of the original {record['base'].get('name')} with --base",
        )
    return directory


@contextlib.contextmanager
def _adapter(checkpoint: Path, name: str, manifest: Manifest) -> Iterator[Adapter]:
    """Yield the verified adapter. If it is sharded, it is consolidated into a temporary directory."""
    with contextlib.ExitStack() as stack:
        directory = checkpoint / name
        if f"{name}/{layout.ADAPTER_MODEL}" in manifest.files:
            files = {
                path: record
                for path, record in manifest.files.items()
                if path.startswith(f"{name}/")
            }
            problems = verify(checkpoint, dataclasses.replace(manifest, files=files), "digest")
            if problems:
                raise CheckpointUnusable.all_of(problems)
        else:
            scratch = tempfile.TemporaryDirectory(prefix="automodel_ckpt-")
            directory = Path(stack.enter_context(scratch), "adapter")
            consolidate(checkpoint / name, directory)
        tensors = tensors_in_file(directory, layout.ADAPTER_MODEL, follow_links=True)
        config = read_json(directory, layout.ADAPTER_CONFIG)
        if config is None:
            raise CheckpointUnusable(
                "the description of the adapters is not there",
                where=str(directory),
                value=layout.ADAPTER_CONFIG,
                hint="restore the file from another copy, or use another checkpoint",
            )
        yield Adapter(directory, tensors, config)


def _base_tensors(directory: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the base's tensors, and {tensor name: number of its file (from 1)}."""
    index = directory / layout.HF_INDEX
    names = [_SINGLE]
    if index.is_file():
        names = files_of_index(index)
    elif not (directory / _SINGLE).is_file():
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
        self._base, self._numbers = _base_tensors(base_dir)
        self._quantized = quantized_base(base_dir, _ROOT, self._base)
        if self._quantized is not None:
            self._replace_quantized(self._quantized)
        if adapter.model_config is not None:
            self._remove_other_heads()
        changes = self._in_base(changes_by(adapter.tensors, adapter.where))
        of_experts = self._expert_changes(changes)
        self.changes = self._by_file_name(changes) | of_experts
        self._factors: dict[tuple[str, str], Array] = {}
        self.notes: list[str] = []
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
        here = set(self._naming.files.values())
        for name in set(self._base) - here:
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
        """Return the name in files of the tensor *name* in memory."""
        return self._naming.files.get(name, name)

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
            if not is_in_base and not self._is_new(name, change):
                raise self._not_mergeable("the adapter changes a tensor that the base lacks", name)
            found[file_name] = (name, change)
        return found

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
        for name, other in self._naming.files.items():
            if other == file_name:
                return self._base[self._stored_name(name)]
        return self._base[self._stored_name(file_name)]

    def _new_tensor(self, trained: Tensor) -> Tensor:
        """Describe a tensor of the adapter's head in the dtype that most of the base has."""
        sizes = [
            (tensor.dtype, nbytes_of(tensor.dtype, tensor.shape)) for tensor in self._base.values()
        ]
        return dataclasses.replace(trained, dtype=main_dtype(sizes) or trained.dtype)

    def _untie(self) -> set[str]:
        """Return the names of tensors that were tied and differ now. Those that are still equal are stored once."""
        untied: set[str] = set()
        for alias, first in self._naming.tied.items():
            pair = (self._file_name(alias), self._file_name(first))
            changed = [name for name in pair if name in self.changes]
            if not changed:
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
        return untied

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


def _side_files(
    adapter: Adapter, base_dir: Path, model: MergedModel, plan: Plan
) -> tuple[dict[str, bytes], list[str]]:
    """Return the side files of the merged model, and warnings.

    They are the base's, but the tokenizer's are the checkpoint's if it has them, and so are those that describe how
    embeddings are computed. config.json matches the weights.
    """
    tokenizer: dict[str, bytes] = {}
    of_embeddings: dict[str, bytes] = {}
    for path in adapter.directory.rglob("*"):
        name = path.relative_to(adapter.directory).as_posix()
        if path.is_file() and is_tokenizer_file(name):
            tokenizer[name] = path.read_bytes()
        elif path.is_file() and is_embedding_file(name):
            of_embeddings[name] = path.read_bytes()
    files: dict[str, bytes] = {}
    for name, data in base_files(base_dir).items():
        if tokenizer and is_tokenizer_file(name):
            continue
        if of_embeddings and is_embedding_file(name):
            continue
        files[name] = data
    path = base_dir / "config.json"
    if adapter.model_config is not None:
        path = adapter.model_config
        files["config.json"] = path.read_bytes()
        # Of the base, which generates text.
        files.pop(GENERATION_CONFIG, None)
    config, warnings = agreeing_config(files["config.json"], plan, model.maps, path)
    files |= tokenizer | of_embeddings
    files["config.json"] = _changed_config(config, model)
    files[layout.HF_INDEX] = plan.index()
    return files, warnings


def _changed_config(raw: bytes, model: MergedModel) -> bytes:
    """Return config.json, changed if embeddings are no longer tied or have another number of rows, or if the base was
    quantized."""
    config = parse_json(raw)
    # Models of several modalities have a config for each part, such as text_config.
    sections = [config]
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict):
            sections.append(value)
    is_changed = False
    if model.is_dequantized:
        del config["quantization_config"]
        is_changed = True
    for section in sections:
        if model.untied and (section is config or "tie_word_embeddings" in section):
            section["tie_word_embeddings"] = False
            is_changed = True
        for before, after in model.rows:
            if section.get("vocab_size") == before:
                section["vocab_size"] = after
                is_changed = True
    if not is_changed:
        return raw
    return json.dumps(config, indent=2).encode() + b"\n"


def _write(file: OutputFile, model: MergedModel, staging: Path) -> Iterator[Digested]:
    """Write a file, fsync it, and yield the digests of its parts."""
    descriptor, _ = create_output(staging / file.name, file.header, file.nbytes, None)
    output = Output(staging / file.name, clones=False)
    try:
        yield Digested(file.name, 0, len(file.header), digest_of(file.header))
        for tensor, at in file.placed():
            data = _bytes_of(tensor, model)
            output.write(data, at, ())
            yield Digested(file.name, at, len(data), digest_of(data))
        # Before the rename that publishes: a name must not become durable before its data.
        os.fsync(descriptor)
    finally:
        output.close()
        os.close(descriptor)


def _bytes_of(tensor: ExportTensor, model: MergedModel) -> memoryview:
    # The merged weight of a transposed layer is a view, whose bytes are not in row-major order.
    values = np.ascontiguousarray(model.value(tensor.fqn, tensor.dtype)).reshape(-1)
    return values.view(np.uint8).data
