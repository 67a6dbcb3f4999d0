"""A Llama or Mistral as a checkpoint of TensorRT-LLM: a directory or ``.qnemo`` file with a file for each rank.

The tensors are the same as NVIDIA's exporter writes (``names/tensorrt_llm.py``). Memory: one block of a tensor. Imports
no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from automodel_ckpt.checkpoint.export.files import write_side_files
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS, main_dtype
from automodel_ckpt.checkpoint.files.safetensors_header import build_header
from automodel_ckpt.checkpoint.parts.slices import Box, Tensor, nbytes_of
from automodel_ckpt.checkpoint.sources.source import unusable
from automodel_ckpt.convert.formats.nemo.tar_files import TarWriter
from automodel_ckpt.convert.names.dimensions import Dimensions, dimensions_of_config
from automodel_ckpt.convert.names.tensorrt_llm import divided_tensors, rows_of_rank
from automodel_ckpt.convert.targets.flow import Export, ExportReport
from automodel_ckpt.convert.targets.tensor_blocks import tensor_blocks
from automodel_ckpt.convert.type_aliases import FileDict, Files, Shape, ValueDict, Values
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

_DTYPES = {"F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class _RankTensor:
    """A tensor of one rank: boxes of stored tensors, one below the other, and then zeros."""

    name: str
    shape: Shape
    parts: Sequence[tuple[Tensor, Box]]


def write(export: Export, *, num_ranks: int = 1, compress: str = "true") -> ExportReport:
    """Write the model for TensorRT-LLM.

    *num_ranks* is the size of tensor parallelism. With *compress* ``true``, the result is one ``.qnemo`` file, an
    (uncompressed) tar archive. Otherwise, it is a directory. All tensors are cast to fp16 or bf16. The default is
    bfloat16 if most of the model is, else float16.
    """
    opened = export.source
    is_file = compress == "true"
    if export.cast_code not in (None, *_DTYPES):
        raise _wrong("--cast-dtype", export.cast_code, "TensorRT-LLM computes in fp16 or bf16")
    if is_file:
        export.file(".qnemo")
    else:
        export.directory("-tensorrt-llm")
    export.check()
    # As NVIDIA's exporter.
    sizes = [(tensor.dtype, tensor.nbytes) for tensor in opened.tensors.values()]
    dtype = export.cast_code or ("BF16" if main_dtype(sizes) == "BF16" else "F16")
    files = export.config_and_tokenizer(dtype)
    hugging_face, config = _config(files, _DTYPES[dtype], num_ranks, export.where)
    export.check_language_model(hugging_face, "TensorRT-LLM")
    dimensions = dimensions_of_config(hugging_face, export.where)
    # All tensors are described before anything is written.
    if num_ranks < 1:
        raise _wrong("--tensor-parallel", num_ranks, "use a positive number of ranks")
    known = {name for rule in divided_tensors(dimensions) for name in rule.hugging_face}
    for name in sorted(opened.tensors.keys() - known)[:1]:
        raise _unusable("TensorRT-LLM's Llama has no such tensor", name, export.where)
    ranks = [list(_rank_tensors(export, dimensions, rank, num_ranks)) for rank in range(num_ranks)]
    export.log_casts((tensor.dtype, dtype) for tensor in opened.tensors.values())
    # The digests of each stored tensor are compared once, not for every rank.
    write_rank = partial(_write_rank, opened.root, dtype, set())
    contents = _small_files(config, files)
    if is_file:
        with export.published("the .qnemo file") as file:
            writer = TarWriter(file)
            for name, content in contents.items():
                writer.add_bytes(name, content)
            for rank, tensors in enumerate(ranks):
                writer.add_streamed(f"rank{rank}.safetensors", partial(write_rank, tensors))
            writer.finish()
    else:
        with export.published_directory("the checkpoint of TensorRT-LLM") as staging:
            write_side_files(contents, staging)
            for rank, tensors in enumerate(ranks):
                with open(staging / f"rank{rank}.safetensors", "xb") as file:
                    write_rank(tensors, file)
    return export.report(len(opened.tensors))


def _rank_tensors(
    export: Export, dimensions: Dimensions, rank: int, num_ranks: int
) -> Iterator[_RankTensor]:
    """Yield the tensors of a rank. Raises :class:`CheckpointUnusable` if the source does not match *dimensions*."""
    heads = rows_of_rank(dimensions, rank, num_ranks)
    if heads is None:
        text = f"{dimensions.num_heads} heads, {dimensions.num_query_groups} groups"
        raise _wrong("--tensor-parallel", num_ranks, f"use a size that divides the {text}")
    for rule in divided_tensors(dimensions):
        sources = [_stored(export, name) for name in rule.hugging_face]
        first = sources[0]
        if rule.division == "equal":
            yield _RankTensor(rule.name, first.shape, [(first, first.box)])
            continue
        if any(len(tensor.shape) != 2 for tensor in sources):
            raise _unusable("a tensor is not a matrix", first.fqn, export.where)
        height, width = first.shape
        rows, columns = [range(height)], range(width)
        if rule.division == "columns":
            columns = _share(first.fqn, width, rank, num_ranks)
        elif rule.division == "rows":
            rows = [_share(first.fqn, height, rank, num_ranks)]
        elif rule.division == "vocabulary":
            # The last ranks have rows of zeros, if the ranks do not divide the vocabulary.
            size = -(-height // num_ranks)
            rows = [range(height)[rank * size : (rank + 1) * size]]
        else:
            rows = [heads[0], heads[1], heads[1]]
            numbers = (dimensions.num_heads, *[dimensions.num_query_groups] * 2)
            for tensor, number in zip(sources, numbers, strict=True):
                if tensor.shape != (number * dimensions.head_size, width):
                    what = "a tensor does not match the heads of config.json"
                    raise _unusable(what, f"{tensor.fqn} {list(tensor.shape)}", export.where)
        parts: list[tuple[Tensor, Box]] = []
        for tensor, own in zip(sources, rows, strict=True):
            parts.append((tensor, Box((own.start, columns.start), (len(own), len(columns)))))
        num_rows = size if rule.division == "vocabulary" else sum(map(len, rows))
        yield _RankTensor(rule.name, (num_rows, len(columns)), parts)


def _stored(export: Export, name: str) -> Tensor:
    tensors, tied = export.source.tensors, export.source.tied
    # Tied embeddings are written twice, as NVIDIA's exporter does.
    stored = tensors.get(name) or tensors.get(tied.get(name, ""))
    if stored is None and name == "lm_head.weight":
        stored = tensors.get("model.embed_tokens.weight")
    if stored is None:
        raise _unusable("a tensor of the model is missing", name, export.where)
    if stored.dtype not in ORDINARY_FLOATS:
        what = "a tensor is not of a floating-point dtype"
        raise _unusable(what, f"{name}: {stored.dtype}", export.where)
    return stored


def _share(fqn: str, num_features: int, rank: int, num_ranks: int) -> range:
    """Return a rank's part of the features of a tensor. Raises :class:`RecipeError` if there is a rest."""
    size, rest = divmod(num_features, num_ranks)
    if rest:
        hint = f"use a size that divides {num_features} features of {fqn}"
        raise _wrong("--tensor-parallel", num_ranks, hint)
    return range(rank * size, (rank + 1) * size)


def _write_rank(
    root: Path, dtype: str, checked: set[str], tensors: Sequence[_RankTensor], file: BinaryIO
) -> None:
    """Write the safetensors file of a rank. Raises :class:`CheckpointUnusable` for a damaged tensor."""
    header, _ = build_header([(each.name, dtype, each.shape) for each in tensors], {"format": "pt"})
    file.write(header)
    for tensor in tensors:
        # Only a tensor with one part has zeros.
        num_zeros = nbytes_of(dtype, tensor.shape)
        num_zeros -= sum(nbytes_of(dtype, box.sizes) for _, box in tensor.parts)
        for stored, box in tensor.parts:
            is_checked = stored.fqn in checked
            file.writelines(
                tensor_blocks(root, stored, dtype, box, is_checked=is_checked, num_zeros=num_zeros)
            )
            checked.add(stored.fqn)


# ---------------------------------------------------------------- files


def _small_files(config: bytes, files: Files) -> FileDict:
    """Return the files next to the weights: the config, and the tokenizer where NeMo's exporter puts it."""
    if "tokenizer.model" in files:
        settings = {"library": "sentencepiece", "type": None, "model": "nemo:tokenizer.model"}
        return {
            "config.json": config,
            "tokenizer.model": files["tokenizer.model"],
            "tokenizer_config.yaml": yaml.safe_dump(settings, sort_keys=False).encode(),
        }
    names = sorted(files.keys() - {"config.json"})
    return {"config.json": config} | {
        f"huggingface_tokenizer/{name}": files[name] for name in names
    }


def _wrong(option: str, value: Any, hint: str) -> RecipeError:
    return RecipeError(
        "this option cannot be used for TensorRT-LLM",
        where=f"ckpt export {option}",
        value=value,
        hint=hint,
    )


_MODEL_TYPES = ("llama", "mistral")
_DEFAULT_ROTARY_BASE = 10000.0
_REQUIRED = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)


def _config(files: Files, dtype: str, num_ranks: int, where: str) -> tuple[ValueDict, bytes]:
    """Return the Hugging Face config among *files*, and the content of TensorRT-LLM's config.json.

    *dtype* is torch's name of the weights' dtype. Raises :class:`CheckpointUnusable` if the model is not a Llama or
    Mistral, or has a feature that TensorRT-LLM's Llama does not.
    """
    content = files.get("config.json")
    if content is None:
        raise _unusable("TensorRT-LLM needs the model's config.json", "no such file", where)
    config = parse_json(content)
    if config.get("model_type") not in _MODEL_TYPES:
        what = "only Llama and Mistral models are written for TensorRT-LLM"
        raise _unusable(what, config.get("model_type"), where)
    for key in ("attention_bias", "mlp_bias", "sliding_window"):
        if config.get(key):
            what = f"a model with {key} is not written for TensorRT-LLM"
            raise _unusable(what, config[key], where)
    for key in _REQUIRED:
        if type(config.get(key)) is not int:
            raise _unusable(f"the model's config.json has no {key}", config.get(key), where)
    num_heads = config["num_attention_heads"]
    architecture = (config.get("architectures") or ["LlamaForCausalLM"])[0]
    result: ValueDict = {
        "producer": {"name": "automodel_ckpt"},
        "architecture": architecture,
        "dtype": dtype,
        "logits_dtype": "float16",
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": config.get("num_key_value_heads") or num_heads,
        "hidden_size": config["hidden_size"],
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config.get("max_position_embeddings"),
        "hidden_act": config.get("hidden_act", "silu"),
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "head_size": config.get("head_dim") or config["hidden_size"] // num_heads,
        "intermediate_size": config["intermediate_size"],
        "position_embedding_type": "rope_gpt_neox",
        "share_embedding_table": False,
        "residual_mlp": False,
        "bias": False,
        "rotary_pct": 1.0,
        "rank": num_ranks - 1,
        "decoder": "llama",
        "rmsnorm": True,
        "lm_head_bias": False,
        **_rotary(config),
        "mapping": {"world_size": num_ranks, "tp_size": num_ranks, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    return config, json.dumps(result, indent=4).encode()


def _rotary(config: Values) -> ValueDict:
    """Return the base and the scaling of the rotary embedding, from either generation of Hugging Face's keys."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = parameters.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROTARY_BASE
    found: ValueDict = {"rotary_base": base}
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind not in (None, "default"):
        scaling = {"type": kind}
        for key, value in parameters.items():
            if key not in ("rope_type", "type", "rope_theta"):
                scaling[key] = value
        found["rotary_scaling"] = scaling
    return found


def _unusable(what: str, value: object, where: str) -> CheckpointUnusable:
    return unusable(
        what,
        where,
        str(value)[:100],
        "export Hugging Face files (--to hf), and convert them with TensorRT-LLM's own scripts",
    )
