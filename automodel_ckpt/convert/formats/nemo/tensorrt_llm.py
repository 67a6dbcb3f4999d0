"""Checkpoints of TensorRT-LLM: a directory, or a ``.qnemo`` file of NeMo, which is a tar archive of it. No torch.

Layout (source: nvidia-modelopt 0.47, modelopt.torch.export): ``config.json`` with ``producer``, ``architecture``,
``mapping`` and ``quantization``, and a file ``rank{i}.safetensors`` for each rank. ``.qnemo`` files add a tokenizer.

The weights of models of one rank that are not quantized are read: those of Llama and Mistral as Hugging Face tensors,
those of other architectures under their own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safetensors_header import read_header_at
from automodel_ckpt.checkpoint.parts.slices import Tensor, whole_tensor
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
from automodel_ckpt.convert.formats.files import names_in, read_json
from automodel_ckpt.convert.formats.format import Format
from automodel_ckpt.convert.formats.nemo.packed_files import (
    PackedFiles,
    files_in_archive,
    files_in_directory,
    has_member,
)
from automodel_ckpt.convert.names.dimensions import dimensions_of_config
from automodel_ckpt.convert.names.slicing import RowRange, join_rows
from automodel_ckpt.convert.names.tensorrt_llm import rules
from automodel_ckpt.errors import CheckpointUnusable

CONFIG = "config.json"
FIRST_RANK = "rank0.safetensors"
LLAMA_DECODER = "llama"
_MAX_CONFIG_BYTES = 16 << 20
_MAX_RANKS = 4096
_UNCHECKED = "the weights are unchecked: a checkpoint of TensorRT-LLM has no digests"


class QnemoFile(Format):
    """A ``.qnemo`` file."""

    name = "a .qnemo file of TensorRT-LLM"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        return has_member(path, FIRST_RANK)

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        """Describe the model. Symbolic links to the file are followed: the user chose it."""
        return _source(files_in_archive(path), path.parent)

    def stored_tensors(self, path: Path) -> StoredTensors:
        return _stored(files_in_archive(path))

    def details(self, path: Path) -> Mapping[str, tuple[str, ...]]:
        return _details(files_in_archive(path))


class TensorRtLlmDirectory(Format):
    """A directory with ``rank0.safetensors`` and the config of TensorRT-LLM."""

    name = "a checkpoint of TensorRT-LLM"
    has_own_config = True

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        names = names_in(path)
        if FIRST_RANK not in names or CONFIG not in names:
            return False
        try:
            config = read_json(path, CONFIG)
        except CheckpointUnusable:
            return False
        return config is not None and isinstance(config.get("mapping"), dict)

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        """Describe the model. Symbolic links are never followed."""
        return _source(files_in_directory(path), path)

    def stored_tensors(self, path: Path) -> StoredTensors:
        return _stored(files_in_directory(path))

    def details(self, path: Path) -> Mapping[str, tuple[str, ...]]:
        return _details(files_in_directory(path))


def _details(packed: PackedFiles) -> Mapping[str, tuple[str, ...]]:
    content = packed.read(CONFIG, _MAX_CONFIG_BYTES)
    return {CONFIG: tuple(content.decode(errors="replace").splitlines())}


# ---------------------------------------------------------------- files


def _config(packed: PackedFiles) -> dict[str, Any]:
    path = packed.path / CONFIG
    try:
        value = parse_json(packed.read(CONFIG, _MAX_CONFIG_BYTES))
    except ValueError as error:
        what = "the config of this checkpoint cannot be read"
        raise unusable(what, path, repr(error)[:300]) from error
    if not isinstance(value, dict):
        what = "the config of this checkpoint is not a mapping"
        raise unusable(what, path, type(value).__name__)
    return value


def _num_ranks(config: Mapping[str, Any], packed: PackedFiles) -> int:
    """Return the tensor-parallel size. Raises :class:`CheckpointUnusable` for pipeline parallelism."""
    path = packed.path / CONFIG
    mapping = config.get("mapping")
    if not isinstance(mapping, dict):
        raise unusable("the config has no mapping of ranks", path, "mapping")
    sizes: dict[str, int] = {}
    for key in ("world_size", "tp_size", "pp_size"):
        size = mapping.get(key, 1)
        # Not isinstance: True is an int, too.
        if type(size) is not int or not 0 < size <= _MAX_RANKS:
            raise unusable(f"the config's mapping.{key} is no number of ranks", path, str(size))
        sizes[key] = size
    if sizes["world_size"] != sizes["tp_size"]:
        raise CheckpointUnusable(
            "a checkpoint of TensorRT-LLM with another than tensor parallelism is not read",
            where=str(path),
            value=str(mapping)[:200],
            hint="export it again with pipeline parallel size 1",
        )
    return sizes["tp_size"]


def _rank_tensors(packed: PackedFiles, rank: int) -> dict[str, Tensor]:
    name = f"rank{rank}.safetensors"
    stored = packed.files.get(name)
    if stored is None:
        raise unusable("the weights of a rank are missing", packed.path, name)
    path = packed.root / stored.file
    header = read_header_at(path, stored.start, stored.nbytes)
    tensors: dict[str, Tensor] = {}
    for fqn, entry in header.tensors.items():
        start = stored.start + entry.start
        tensors[fqn] = whole_tensor(fqn, entry.dtype, entry.shape, stored.file, start)
    return tensors


def _stored(packed: PackedFiles) -> StoredTensors:
    """Return the tensors as they are stored: with several ranks, the name of each begins with its rank."""
    num_ranks = _num_ranks(_config(packed), packed)
    if num_ranks == 1:
        return StoredTensors(packed.root, _rank_tensors(packed, 0))
    tensors: dict[str, Tensor] = {}
    for rank in range(num_ranks):
        for fqn, tensor in _rank_tensors(packed, rank).items():
            name = f"rank{rank}.{fqn}"
            tensors[name] = tensor.renamed(name)
    return StoredTensors(packed.root, tensors)


# ---------------------------------------------------------------- the model


def _source(packed: PackedFiles, directory: Path) -> Source:
    config = _config(packed)
    _check_not_quantized(config, packed)
    where = packed.path / CONFIG
    num_ranks = _num_ranks(config, packed)
    if num_ranks > 1:
        raise CheckpointUnusable(
            "the ranks of a checkpoint of TensorRT-LLM are not merged",
            where=str(where),
            value=f"tp_size {num_ranks}",
            hint="use the model that it was made from, or export it again with tensor parallel size 1",
        )
    tensors = _rank_tensors(packed, 0)
    if config.get("decoder") == LLAMA_DECODER:
        tensors = _hugging_face(tensors, config, where)
    return Source(packed.root, directory, tensors, notes=(_UNCHECKED,))


def _check_not_quantized(config: Mapping[str, Any], packed: PackedFiles) -> None:
    quantization = config.get("quantization")
    if not isinstance(quantization, dict):
        return
    algorithm = quantization.get("quant_algo")
    if algorithm is not None:
        raise CheckpointUnusable(
            "the weights of this checkpoint of TensorRT-LLM are quantized",
            where=str(packed.path / CONFIG),
            value=str(algorithm)[:100],
            hint="use the checkpoint that it was quantized from; `ckpt show` lists the tensors",
        )


def _hugging_face(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: Path
) -> dict[str, Tensor]:
    """Return the tensors of a Llama of one rank under Hugging Face names.

    Raises :class:`CheckpointUnusable` if they contradict the config, which is the file *where*.
    """
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    translated = {key: config.get(key) for key in (*keys, "vocab_size")}
    translated["head_dim"] = config.get("head_size")
    dimensions = dimensions_of_config(translated, str(where))
    if dimensions.num_layers > len(tensors):
        raise unusable("there are fewer tensors than layers", where, dimensions.num_layers)
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for rule in rules(dimensions.num_layers):
        stored = tensors.get(rule.name)
        if stored is None:
            # The output layer of a model with a shared embedding table.
            if rule.name == "lm_head.weight":
                continue
            raise unusable("a tensor of the model is missing", where, rule.name)
        used.add(rule.name)
        if rule.division != "qkv":
            (name,) = rule.hugging_face
            found[name] = stored.renamed(name)
            continue
        num_groups = dimensions.num_query_groups
        first = 0
        for name, num_heads in zip(
            rule.hugging_face, (dimensions.num_heads, num_groups, num_groups), strict=True
        ):
            rows = RowRange(0, first, num_heads * dimensions.head_size)
            found[name] = join_rows(name, [stored], [rows])
            first += rows.num_rows
        if stored.shape[:1] != (first,):
            what = "a tensor does not have the rows of the model's heads"
            raise unusable(what, where, f"{rule.name} {list(stored.shape)}")
    unknown = sorted(tensors.keys() - used)
    if unknown:
        raise unusable("the checkpoint has an unknown tensor", where, unknown[0])
    return found
