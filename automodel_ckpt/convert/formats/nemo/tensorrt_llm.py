"""Checkpoints of TensorRT-LLM: a directory, or a ``.qnemo`` file of NeMo, which is a tar archive of it. No torch.

Layout (source: nvidia-modelopt 0.47, modelopt.torch.export): ``config.json`` with ``producer``, ``architecture``,
``mapping`` and ``quantization``, and a file ``rank{i}.safetensors`` for each rank. ``.qnemo`` files add a tokenizer.

Unquantized models of one rank are read. The weights of Llama and Mistral are read as Hugging Face tensors, and the
weights of other architectures under their own names.
"""

from __future__ import annotations

from pathlib import Path

from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.checkpoint.files.safetensors_header import read_header_safely
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.parts.slices import TensorDict, whole_tensor
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
from automodel_ckpt.convert.formats.files import faults_of, names_in, optional_json
from automodel_ckpt.convert.formats.format import Details, Format
from automodel_ckpt.convert.formats.nemo.packed_files import (
    PackedFiles,
    has_member,
    packed_files,
)
from automodel_ckpt.convert.names.dimensions import dimensions_of_config
from automodel_ckpt.convert.names.tensorrt_llm import TENSORRT_LLAMA
from automodel_ckpt.errors import unusable

CONFIG = "config.json"
FIRST_RANK = "rank0.safetensors"
LLAMA_DECODER = "llama"
_MAX_CONFIG_BYTES = 16 << 20
_MAX_RANKS = 4096


class TensorRtLlmDirectory(Format):
    """A directory with ``rank0.safetensors`` and the config of TensorRT-LLM."""

    name = "a checkpoint of TensorRT-LLM"
    has_own_config = True

    def detect(self, path: Path) -> bool:
        names = names_in(path)
        is_complete = FIRST_RANK in names and CONFIG in names
        return is_complete and isinstance(optional_json(path, CONFIG).get("mapping"), dict)

    def open(self, path: Path) -> Source:
        """Describe the model. Symbolic links are followed only to a file, which the user chose."""
        return _source(packed_files(path), path if path.is_dir() else path.parent)

    def stored_tensors(self, path: Path) -> StoredTensors:
        return _stored(packed_files(path))

    def details(self, path: Path) -> Details:
        content = packed_files(path).read(CONFIG, _MAX_CONFIG_BYTES)
        return {CONFIG: tuple(content.decode(errors="replace").splitlines())}


class QnemoFile(TensorRtLlmDirectory):
    """A ``.qnemo`` file."""

    name = "a .qnemo file of TensorRT-LLM"
    has_own_config = False

    def detect(self, path: Path) -> bool:
        return has_member(path, FIRST_RANK)


# ---------------------------------------------------------------- files


def _config(packed: PackedFiles) -> ValueDict:
    with faults_of(packed.path / CONFIG, "the config of this checkpoint cannot be read"):
        value = dict(parse_json(packed.read(CONFIG, _MAX_CONFIG_BYTES)))
        if not isinstance(value.get("mapping"), dict):
            raise Fault("it has no mapping of ranks")
        return value


def _num_ranks(config: Values, packed: PackedFiles) -> int:
    """Return the tensor-parallel size. Raises :class:`CheckpointUnusable` for pipeline parallelism."""
    mapping = config["mapping"]
    num_ranks = mapping.get("tp_size", 1)
    # Not isinstance: True is an int, too.
    is_count = type(num_ranks) is int and 0 < num_ranks <= _MAX_RANKS
    if not is_count or mapping.get("world_size", 1) != num_ranks:
        raise unusable(
            "a checkpoint of TensorRT-LLM with another than tensor parallelism is not read",
            packed.path / CONFIG,
            str(mapping)[:200],
            "export it again with pipeline parallel size 1",
        )
    return int(num_ranks)


def _rank_tensors(packed: PackedFiles, rank: int) -> TensorDict:
    name = f"rank{rank}.safetensors"
    stored = packed.files.get(name)
    if stored is None:
        raise unusable("the weights of a rank are missing", packed.path, name)
    header = read_header_safely(packed.root, stored.file, stored.start, stored.nbytes)
    return {
        fqn: whole_tensor(fqn, entry.dtype, entry.shape, stored.file, stored.start + entry.start)
        for fqn, entry in header.tensors.items()
    }


def _stored(packed: PackedFiles) -> StoredTensors:
    """Return the tensors as they are stored: with several ranks, the name of each begins with its rank."""
    num_ranks = _num_ranks(_config(packed), packed)
    if num_ranks == 1:
        return StoredTensors(packed.root, _rank_tensors(packed, 0))
    tensors = {}
    for rank in range(num_ranks):
        for fqn, tensor in _rank_tensors(packed, rank).items():
            name = f"rank{rank}.{fqn}"
            tensors[name] = tensor.renamed(name)
    return StoredTensors(packed.root, tensors)


# ---------------------------------------------------------------- the model


def _source(packed: PackedFiles, directory: Path) -> Source:
    config = _config(packed)
    where = packed.path / CONFIG
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and quantization.get("quant_algo") is not None:
        raise unusable(
            "the weights of this checkpoint of TensorRT-LLM are quantized",
            where,
            str(quantization["quant_algo"])[:100],
            "use the checkpoint that it was quantized from; `ckpt show` lists the tensors",
        )
    num_ranks = _num_ranks(config, packed)
    if num_ranks > 1:
        raise unusable(
            "the ranks of a checkpoint of TensorRT-LLM are not merged",
            where,
            f"tp_size {num_ranks}",
            "use the model that it was made from, or export it again with tensor parallel size 1",
        )
    tensors = _rank_tensors(packed, 0)
    if config.get("decoder") == LLAMA_DECODER:
        keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
        translated = {key: config.get(key) for key in (*keys, "vocab_size")}
        translated["head_dim"] = config.get("head_size")
        dimensions = dimensions_of_config(translated, str(where))
        tensors = TENSORRT_LLAMA.to_hugging_face(tensors, dimensions, str(where))
    return Source(packed.root, directory, tensors)
