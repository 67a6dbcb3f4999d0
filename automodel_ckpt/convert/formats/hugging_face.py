"""Hugging Face files: whole tensors in safetensors files, as an export or a download consists of; PEFT adapters."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.base.other_weights import MLX_ADAPTER, weights_of_another_program
from automodel_ckpt.base.units import some_of
from automodel_ckpt.checkpoint.export.export_manifest import ExportManifest, find_export_manifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import model_file
from automodel_ckpt.checkpoint.files.safetensors_header import read_header
from automodel_ckpt.checkpoint.files.type_aliases import Strings, TextDict
from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.checkpoint.parts.slices import TensorDict, TensorMap, whole_tensor
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.files import (
    BIN_FILE,
    BIN_INDEX,
    faults_of,
    first_bytes,
    names_in,
    renamed,
    tensors_by_file,
)
from automodel_ckpt.convert.formats.format import Format
from automodel_ckpt.convert.formats.nested_state import names_without_wrappers
from automodel_ckpt.errors import CheckpointUnusable, unusable

SHARDING_INFO = "DCP_SHARDING_INFO"
"""The key in the header of a shard that PyTorch's DCP wrote."""
# How transformers numbers the files of a model.
_NUMBERED = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.safetensors", re.ASCII)
SINGLE_FILE = "model.safetensors"
_MLX_NAME = re.compile(r"\.switch_mlp\.|\.self_attn\.unembed_out\.weight$", re.ASCII)
_MAX_NAMED = 5
_MODELS = frozenset({layout.HF_INDEX, "model.safetensors", BIN_FILE, BIN_INDEX})


class HuggingFaceFiles(Format):
    """A directory with an index, or with safetensors files with headers that do not describe shards."""

    name = "Hugging Face files"

    def detect(self, path: Path) -> bool:
        has_index = (path / layout.HF_INDEX).is_file()
        names = safetensors_in(path)
        if not names:
            return has_index
        try:
            header = read_header(os.path.realpath(model_file(path, names[0])))
        except CheckpointUnusable:
            return has_index
        # A link to another place, which only opening the directory follows.
        except OSError:
            return has_index or (path / names[0]).is_symlink()
        # PyTorch's HuggingFaceStorageWriter can write an index next to its shards.
        return SHARDING_INFO not in header.metadata

    def open(self, path: Path) -> Source:
        """Describe the model. The index and headers of an export are compared with its manifest, and its slices have
        digests, which are compared when the slices are read."""
        found = weights_of_another_program(path)
        if found == MLX_ADAPTER:
            raise unusable(
                f"this format cannot be read: {found[0]}", path, "adapters.safetensors", found[1]
            )
        export = find_export_manifest(path, follow_links=True)
        weight_map = weight_map_of(path, export) or {}
        names = safetensors_in(path)
        omitted: Strings = ()
        if SINGLE_FILE in names and SINGLE_FILE not in weight_map.values():
            # transformers reads this file, and neither the index of an earlier model nor other files: Mistral's
            # consolidated.safetensors has the same weights under other names.
            others = [name for name in names if name != SINGLE_FILE]
            if others:
                omitted = (f"{some_of(others, _MAX_NAMED)} beside {SINGLE_FILE}",)
            weight_map, names = {}, [SINGLE_FILE]
        elif weight_map:
            names = sorted(set(weight_map.values()))
        else:
            _check_numbers(path, names)
        tensors, files = tensors_by_file(
            path, names, lambda name: tensors_in_file(path, name, export)
        )
        _check_not_mlx(path, tensors)
        absent = sorted(weight_map.keys() - files.keys())
        if absent:
            named = some_of([name[:200] for name in absent], 1)
            omitted = (*omitted, f"tensors that the index lists and no file has: {named}")
        # An index may list a tied name that has no tensor, which transformers accepts. Weights that fill a model are
        # compared with the model's names later; other callers compare the index.
        misplaced = [fqn for fqn, name in weight_map.items() if files.get(fqn) != name]
        source = source_of_files(path, names, tensors, export)
        return replace(source, misplaced=tuple(misplaced), omitted=(*source.omitted, *omitted))


def _check_not_mlx(directory: Path, tensors: TensorMap) -> None:
    """Raise :class:`CheckpointUnusable` for weights that only MLX reads: experts or latent attention as it names them,
    and weights that it quantized, which are U32 with scales."""
    for fqn, tensor in tensors.items():
        is_packed = tensor.dtype == "U32" and f"{fqn.removesuffix('.weight')}.scales" in tensors
        if is_packed or _MLX_NAME.search(fqn):
            raise unusable(
                "this format cannot be read: weights of MLX",
                directory,
                fqn,
                "use the original model, from which mlx_lm.convert made this one",
            )


def _check_numbers(directory: Path, names: Collection[str]) -> None:
    """Raise :class:`CheckpointUnusable` if files are missing, by the numbers in the *names* of the others."""
    present = set(names)
    for stem, total in {each.group(1, 3) for each in map(_NUMBERED.fullmatch, names) if each}:
        for number in range(1, int(total) + 1):
            missing = f"{stem}-{number:05d}-of-{total}.safetensors"
            if missing not in present:
                raise unusable("a file of weights is missing", directory / missing, "no such file")


def source_of_files(
    directory: Path,
    names: Iterable[str],
    tensors: TensorMap,
    export: ExportManifest | None,
) -> Source:
    """Return the source of a model with the *tensors* of the files *names* of *directory*.

    Names that wrappers added are removed, except in an *export* of this program, which has the model's own names:
    accelerate's ``save_state`` of a compiled model writes ``_orig_mod.``.
    """
    if export is None:
        tensors = renamed(tensors, names_without_wrappers(tensors))
    return Source(
        # Behind a link, a file can be anywhere: in the Hub's cache, in another directory than its siblings.
        Path("/"),
        directory,
        tensors,
        finished=True,
        export=export,
        files=frozenset(names),
    )


def weight_map_of(directory: Path, export: ExportManifest | None) -> TextDict | None:
    """Return {tensor name: file name} from the index in *directory*, or None when there is no index.

    The index is compared with the manifest of the *export* that it belongs to. Raises :class:`CheckpointUnusable`.
    """
    check_bytes = None if export is None else export.check_bytes
    return read_weight_map(directory / layout.HF_INDEX, follow_links=True, check_bytes=check_bytes)


def safetensors_in(directory: Path) -> list[str]:
    """Return the sorted names of the safetensors files in *directory*."""
    return [name for name in names_in(directory) if name.endswith(".safetensors")]


def tensors_in_file(directory: Path, name: str, export: ExportManifest | None = None) -> TensorDict:
    """Return the tensors of the safetensors file *name* in *directory*, each in one slice.

    The slice's file is the absolute path of the file without links and without the first slash. Slices of an *export*
    have its digests. Raises :class:`CheckpointUnusable` if the file is missing, damaged, or a shard.
    """
    path = directory / name
    real = os.path.realpath(path)
    with faults_of(path, "a file of weights is missing, or cannot be read"):
        if export is not None:
            export.check_header(name)
        header = read_header(real)
    if SHARDING_INFO in header.metadata:
        raise unusable("a shard is stored among whole files", path, SHARDING_INFO)
    tensors = {}
    for fqn, entry in header.tensors.items():
        tensor = whole_tensor(fqn, entry.dtype, entry.shape, real.lstrip("/"), entry.start)
        tensors[fqn] = tensor if export is None else export.with_digests(name, tensor)
    return tensors


# ---------------------------------------------------------------- one file, and adapters


class SafetensorsFile(Format):
    """A file that ends in .safetensors, or begins like one: eight bytes of length, then JSON."""

    name = "a safetensors file"

    def detect(self, path: Path) -> bool:
        return path.suffix == ".safetensors" or first_bytes(path, 9)[8:] == b"{"

    def open(self, path: Path) -> Source:
        """Describe the model. Raises :class:`CheckpointUnusable` for a file with only a part of a model."""
        directory = path.parent.resolve()
        export = find_export_manifest(directory, follow_links=True)
        num_files = len(set((weight_map_of(directory, export) or {}).values()))
        for is_part, what in (
            (num_files > 1, "this file is a part of a model"),
            (SHARDING_INFO in read_header(path).metadata, "this file is a rank's shard of a model"),
            (path.name == layout.ADAPTER_MODEL, "this file is an adapter, not a model"),
        ):
            if is_part:
                raise unusable(what, path, path.name, "name its directory")
        tensors = tensors_in_file(directory, path.name, export)
        return source_of_files(directory, [path.name], tensors, export)


class PeftAdapter(Format):
    """A directory with the file of an adapter. Its tensors have PEFT's names. Other weights in it are not read."""

    name = "PEFT adapter"

    def detect(self, path: Path) -> bool:
        return has_adapter(path)

    def open(self, path: Path) -> Source:
        export = find_export_manifest(path, follow_links=True)
        tensors = tensors_in_file(path, layout.ADAPTER_MODEL, export)
        source = source_of_files(path, [layout.ADAPTER_MODEL], tensors, export)
        models = sorted(set(names_in(path)) & _MODELS)
        if not models:
            return source
        # torchtune saves the merged model in the same directory.
        text = f"the model in {' and '.join(models)}: to use it, move {layout.ADAPTER_MODEL} to another directory"
        return replace(source, omitted=(text,))


def has_adapter(path: Path) -> bool:
    """Return whether the directory *path* has the weights of an adapter."""
    return os.path.lexists(path / layout.ADAPTER_MODEL)
