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
from typing import Any, NoReturn

import numpy as np

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.digests import digest_of
from automodel_ckpt.checkpoint.dtypes import ORDINARY_FLOATS
from automodel_ckpt.checkpoint.export.adapter_record import find_base, read_peft_record
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
from automodel_ckpt.checkpoint.export.publish import check_target, staged
from automodel_ckpt.checkpoint.export_leftovers import Log
from automodel_ckpt.checkpoint.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.sources.model_files import base_files, is_tokenizer_file
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.checkpoint.tensors.float_cast import Array, cast
from automodel_ckpt.checkpoint.tensors.stored import whole_checked
from automodel_ckpt.checkpoint.verify import verify
from automodel_ckpt.convert.merge_rules import Change, Naming, changes_by, merged
from automodel_ckpt.convert.sources.files import read_json
from automodel_ckpt.convert.sources.hugging_face import tensors_in_file
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

_SINGLE = "model.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as peft's files in *directory*: its tensors, and the content of its configuration."""

    directory: Path
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]

    @property
    def where(self) -> str:
        return str(self.directory / layout.ADAPTER_MODEL)


def merge(
    source: Path,
    output: str | os.PathLike[str] | None = None,
    *,
    base: str | None,
    directory_of: Callable[[str], Path | None],
    naming_of: Callable[[Path], Naming],
    cast_dtype: str | None = None,
    cache: Path | None = None,
    log: Log,
) -> ConsolidationReport:
    """Write base and adapter of the checkpoint *source* (or its ``model/``) as a full model to *output*, by default
    ``merged`` in the model's directory.

    *base* is where the base is now (None: where the checkpoint says). *directory_of* finds the files of a base's name,
    *naming_of* says what they are called in memory; digests of the base are kept in *cache*.

    Raises :class:`CheckpointUnusable` where the checkpoint is damaged or holds no adapter, for another base than the
    adapter's, and for what cannot be merged; :class:`SaveFailed` where the output cannot be written;
    :class:`RecipeError` for a wrong argument. In each case nothing was written.
    """
    started = time.monotonic()
    cast_code = parse_cast_dtype(cast_dtype)
    checkpoint, name = (
        (source, "model")
        if os.path.lexists(source / layout.MANIFEST)
        else (source.parent, source.name)
    )
    target = Path(
        os.path.realpath(output if output is not None else checkpoint / name / layout.MERGED)
    )
    check_target(target)
    manifest = Manifest.read(checkpoint)
    base_dir = _base(checkpoint, name, base, directory_of, cache)
    with _adapter(checkpoint, name, manifest) as adapter:
        model = MergedModel(adapter, base_dir, naming_of(base_dir))
        plan = make_plan(model.tensors, {}, model.maps, cast_dtype=cast_code, where=str(base_dir))
        beside, warnings = _side_files(adapter, base_dir, model, plan)
        for text in [*(f"warning: {text}" for text in warnings), *model.notes, *cast_lines(plan)]:
            log(text)
        with staged(target, log) as staging:
            parts = [part for file in plan.files for part in _write(file, model, staging)]
            write_side_files(beside, staging)
            write_manifest(
                plan, Source(checkpoint, checkpoint / name, {}, manifest=manifest), staging, parts
            )
    return ConsolidationReport(
        target,
        len(plan.files),
        len(model.tensors),
        plan.nbytes,
        time.monotonic() - started,
        True,
        plan.casts,
        tuple(warnings),
    )


def _base(
    checkpoint: Path,
    name: str,
    given: str | None,
    directory_of: Callable[[str], Path | None],
    cache: Path | None,
) -> Path:
    """Where the base's files are; they are those that the adapter was trained on."""
    record = read_peft_record(checkpoint, name)
    called = given if given is not None else find_base(record, checkpoint.parent)
    directory = directory_of(called)
    if directory is None:
        hint = "load it once while there is a network, or name its place with --base"
        raise RecipeError(
            "the base model is not on this machine", where="--base", value=called, hint=hint
        )
    identity = identify_base(called, directory, run=checkpoint.parent, cache=cache)
    if identity.digest != record["base"].get("digest"):
        raise CheckpointUnusable(
            "this is not the base that the adapter was trained on",
            where=str(directory),
            value=f"digest {identity.digest}, not {record['base'].get('digest')}",
            hint=f"name the place of {record['base'].get('name')} as it was then with --base",
        )
    return directory


@contextlib.contextmanager
def _adapter(checkpoint: Path, name: str, manifest: Manifest) -> Iterator[Adapter]:
    """The adapter, checked; where it is in shards, put together in a directory that is removed again."""
    with contextlib.ExitStack() as stack:
        directory = checkpoint / name
        if f"{name}/{layout.ADAPTER_MODEL}" in manifest.files:
            files = {
                path: record
                for path, record in manifest.files.items()
                if path.startswith(f"{name}/")
            }
            if problems := verify(checkpoint, dataclasses.replace(manifest, files=files), "digest"):
                raise CheckpointUnusable.all_of(problems)
        else:
            directory = (
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="automodel_ckpt-")))
                / "adapter"
            )
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
    """The base's tensors, and for each the number of its file (from 1)."""
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
    """The tensors of the merged model by their names in files, and their values, made when they are asked for."""

    def __init__(self, adapter: Adapter, base_dir: Path, naming: Naming) -> None:
        self._adapter, self._naming = adapter, naming
        self._base, self._numbers = _base_tensors(base_dir)
        self.changes = self._by_file(changes_by(adapter.tensors, adapter.where))
        self.notes: list[str] = []
        self.untied = self._untie()
        self.tensors = {
            name: self._described(name) for name in {*self._base, *self.changes, *self.untied}
        }

    @property
    def maps(self) -> BaseMaps:
        """The files of the base; what is new stands in the last."""
        last = max(self._numbers.values(), default=1)
        return BaseMaps({name: self._numbers.get(name, last) for name in self.tensors})

    @property
    def rows(self) -> set[tuple[int, int]]:
        """The numbers of rows (before, after) of the tensors that have others than in the base."""
        changed = [name for name in self.changes if name in self._base and self._base[name].shape]
        pairs = {(self._base[name].shape[0], self.tensors[name].shape[0]) for name in changed}
        return {(before, after) for before, after in pairs if before != after}

    def value(self, name: str, dtype: str) -> Array:
        """The tensor *name* in files, as *dtype*."""
        change, stored = self.changes.get(name), self._stored(name)
        if change is None:
            return cast(whole_checked(Path("/"), stored), stored.dtype, dtype)
        value, held = self._changed(name, change)
        return cast(value, held, dtype)

    def _by_file(self, changes: Mapping[str, Change]) -> dict[str, tuple[str, Change]]:
        """{name in files: (name in memory, change)}."""
        found = {
            self._naming.files.get(name, name): (name, change) for name, change in changes.items()
        }
        for file_name, (name, _) in found.items():
            if file_name not in self._base and self._holder(name) not in self._base:
                self._refuse("the adapter changes a tensor that the base lacks", name)
        return found

    def _holder(self, name: str) -> str:
        """The name in files of the tensor that *name* (in memory) is, or is tied to."""
        group = [
            name,
            self._naming.tied.get(name, name),
            *(a for a, k in self._naming.tied.items() if k == name),
        ]
        names = [self._naming.files.get(each, each) for each in group]
        return next((each for each in names if each in self._base), names[0])

    def _stored(self, file_name: str) -> Tensor:
        """The base's tensor of that name, or the one that it is tied to there."""
        if file_name in self._base:
            return self._base[file_name]
        name = next(
            (name for name, each in self._naming.files.items() if each == file_name), file_name
        )
        return self._base[self._holder(name)]

    def _untie(self) -> set[str]:
        """The tensors that were tied and differ now; what still agrees stands once, as in the base."""
        untied: set[str] = set()
        for alias, kept in self._naming.tied.items():
            pair = [self._naming.files.get(name, name) for name in (alias, kept)]
            changed = [name for name in pair if name in self.changes]
            if len(changed) == 1 or (changed and not self._agree(*pair)):
                untied.update(pair)
            elif changed:
                self.changes = {
                    n: c for n, c in self.changes.items() if n in self._base or n not in pair
                }
        if untied:
            self.notes.append(
                f"no longer tied, since the adapter changed one of them: {', '.join(sorted(untied))}"
            )
        return untied

    def _agree(self, one: str, other: str) -> bool:
        """Whether two changed tensors are one: factors of a tied head are the embedding's, multiplied the other way."""
        a, b = self.value(one, "F32"), self.value(other, "F32")
        return a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-6)

    def _described(self, name: str) -> Tensor:
        stored = self._stored(name)
        change = self.changes[name][1] if name in self.changes else None
        shape = (
            self._adapter.tensors[change.whole].shape
            if change is not None and change.whole
            else stored.shape
        )
        return Tensor(name, stored.dtype, shape, ())

    def _changed(self, file_name: str, entry: tuple[str, Change]) -> tuple[Array, str]:
        """The new value, and its dtype."""
        (name, change), stored = entry, self._stored(file_name)
        start = self._adapter.tensors[change.whole] if change.whole else stored
        if not change.factors:
            return whole_checked(Path("/"), start), start.dtype
        if start.dtype not in ORDINARY_FLOATS:
            self._refuse(
                f"a layer of the base is stored as {start.dtype}, which nothing can be added to",
                name,
            )
        width = "F64" if start.dtype == "F64" else "F32"
        factors = {
            place: self._wide(self._adapter.tensors[key], width)
            for place, key in change.factors.items()
        }
        transposed = name.removesuffix(".weight") in self._naming.transposed
        try:
            return merged(
                self._wide(start, width), factors, self._adapter.config, transposed=transposed
            ), width
        except ValueError as error:
            self._refuse(f"an adapter does not fit its layer: {error}", name)

    @staticmethod
    def _wide(tensor: Tensor, width: str) -> Array:
        return cast(whole_checked(Path("/"), tensor), tensor.dtype, width)

    def _refuse(self, what: str, name: str) -> NoReturn:
        hint = "load base and adapter with peft in your own code, and call merge_and_unload"
        raise CheckpointUnusable(what, where=self._adapter.where, value=name, hint=hint)


def _side_files(
    adapter: Adapter, base_dir: Path, model: MergedModel, plan: Plan
) -> tuple[dict[str, bytes], list[str]]:
    """The base's own, the tokenizer's as the checkpoint has them, and a config that agrees with the weights."""
    names = [
        path.relative_to(adapter.directory).as_posix()
        for path in adapter.directory.rglob("*")
        if path.is_file()
    ]
    tokenizer = {
        name: (adapter.directory / name).read_bytes() for name in names if is_tokenizer_file(name)
    }
    files = {
        name: data
        for name, data in base_files(base_dir).items()
        if not tokenizer or not is_tokenizer_file(name)
    }
    config, warnings = agreeing_config(
        files["config.json"], plan, model.maps, base_dir / "config.json"
    )
    own = {"config.json": _changed_config(config, model), layout.HF_INDEX: plan.index()}
    return files | tokenizer | own, warnings


def _changed_config(raw: bytes, model: MergedModel) -> bytes:
    """config.json of a model whose embeddings are tied no more, or have other rows; else the same bytes."""
    config = json.loads(raw)
    places = [
        config,
        *(
            value
            for key, value in config.items()
            if key.endswith("_config") and isinstance(value, dict)
        ),
    ]
    changed = False
    for place in places:
        if model.untied and (place is config or "tie_word_embeddings" in place):
            place["tie_word_embeddings"], changed = False, True
        for before, after in model.rows:
            if place.get("vocab_size") == before:
                place["vocab_size"], changed = after, True
    return json.dumps(config, indent=2).encode() + b"\n" if changed else raw


def _write(file: OutputFile, model: MergedModel, staging: Path) -> Iterator[Digested]:
    """Write a file, durably; gives the digests of its parts."""
    descriptor, _ = create_output(staging / file.name, file.header, file.nbytes, None)
    output = Output(staging / file.name, clones=False)
    try:
        yield Digested(file.name, 0, len(file.header), digest_of(file.header))
        for tensor, at in file.placed():
            data = _bytes_of(tensor, model)
            output.write(data, at, ())
            yield Digested(file.name, at, len(data), digest_of(data))
        os.fsync(descriptor)
    finally:
        output.close()
        os.close(descriptor)


def _bytes_of(tensor: ExportTensor, model: MergedModel) -> memoryview:
    values = np.ascontiguousarray(model.value(tensor.fqn, tensor.dtype)).reshape(-1)
    return values.view(np.uint8).data
