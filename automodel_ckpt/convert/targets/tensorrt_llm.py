"""A Llama or Mistral as a checkpoint of TensorRT-LLM: a directory or ``.qnemo`` file with a file for each rank.

The tensors are the same as NVIDIA's exporter writes (``names/tensorrt_llm.py``). Memory: one block of a tensor. Imports
no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from automodel_ckpt.checkpoint.export.files import write_side_files
from automodel_ckpt.checkpoint.export.plan import main_dtype
from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS, TORCH_NAMES
from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.checkpoint.files.safetensors_header import build_header
from automodel_ckpt.checkpoint.files.type_aliases import FileDict, Files, ValueDict, Values
from automodel_ckpt.checkpoint.parts.slices import TensorDict, nbytes_of
from automodel_ckpt.convert.formats.nemo.tar_files import TarWriter
from automodel_ckpt.convert.names.dimensions import Dimensions, dimensions_of_config
from automodel_ckpt.convert.names.tensorrt_llm import TENSORRT_LLAMA, RankTensor, tensors_of_rank
from automodel_ckpt.convert.targets.flow import Export, ExportReport
from automodel_ckpt.convert.targets.tensor_blocks import tensor_blocks
from automodel_ckpt.errors import CheckpointUnusable, RecipeError, unusable

_EMBEDDING, _HEAD = "transformer.vocab_embedding.weight", "lm_head.weight"
_DTYPES = ("F16", "BF16")


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
    # Tensors are written in parts of the stored slices, which have no digests.
    export.check(reads_parts=True)
    # As NVIDIA's exporter.
    sizes = [(tensor.dtype, tensor.nbytes) for tensor in opened.tensors.values()]
    dtype = export.cast_code or ("BF16" if main_dtype(sizes) == "BF16" else "F16")
    files = export.config_and_tokenizer(dtype)
    hugging_face, config = _config(files, TORCH_NAMES[dtype], num_ranks, export.where)
    export.check_language_model(hugging_face, "TensorRT-LLM")
    dimensions = dimensions_of_config(hugging_face, export.where)
    if num_ranks < 1:
        raise _wrong("--tensor-parallel", num_ranks, "use a positive number of ranks")
    # All tensors are described before anything is written.
    tensors = _tensors(export, dimensions)
    try:
        ranks = [
            list(tensors_of_rank(tensors, dimensions, rank, num_ranks)) for rank in range(num_ranks)
        ]
    except ValueError as error:
        raise _wrong("--tensor-parallel", num_ranks, str(error)) from error
    export.log_casts((tensor.dtype, dtype) for tensor in opened.tensors.values())
    write_rank = partial(_write_rank, opened.root, dtype)
    contents = _small_files(config, files)
    if is_file:
        with export.published("the .qnemo file") as file:
            writer = TarWriter(file)
            for name, content in contents.items():
                writer.add_bytes(name, content)
            for rank, own in enumerate(ranks):
                writer.add_streamed(f"rank{rank}.safetensors", partial(write_rank, own))
            writer.finish()
    else:
        with export.published_directory() as staging:
            write_side_files(contents, staging)
            for rank, own in enumerate(ranks):
                with open(staging / f"rank{rank}.safetensors", "xb") as file:
                    write_rank(own, file)
    return export.report(len(opened.tensors))


def _tensors(export: Export, dimensions: Dimensions) -> TensorDict:
    """Return the model's tensors under TensorRT-LLM's names. Raises :class:`CheckpointUnusable`."""
    stored = export.source.tensors
    for name, tensor in stored.items():
        if tensor.dtype not in ORDINARY_FLOATS:
            raise _unusable(
                "a tensor is not of a floating-point dtype", f"{name}: {tensor.dtype}", export.where
            )
    tensors = dict(TENSORRT_LLAMA.from_hugging_face(stored, dimensions, export.where).tensors)
    # Tied embeddings are written twice, as NVIDIA's exporter does.
    tensors.setdefault(_HEAD, tensors[_EMBEDDING].renamed(_HEAD))
    return tensors


def _write_rank(root: Path, dtype: str, tensors: Sequence[RankTensor], file: BinaryIO) -> None:
    """Write the safetensors file of a rank."""
    header, _ = build_header([(each.name, dtype, each.shape) for each in tensors], {"format": "pt"})
    file.write(header)
    for each in tensors:
        num_zeros = nbytes_of(dtype, each.shape) - nbytes_of(dtype, each.part.sizes)
        file.writelines(tensor_blocks(root, each.stored, dtype, each.part, num_zeros=num_zeros))


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
        f"ckpt export {option}",
        value,
        hint,
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
        raise _unusable(
            "only Llama and Mistral models are written for TensorRT-LLM",
            config.get("model_type"),
            where,
        )
    for key in ("attention_bias", "mlp_bias", "sliding_window"):
        if config.get(key):
            raise _unusable(
                f"a model with {key} is not written for TensorRT-LLM", config[key], where
            )
    for key in _REQUIRED:
        if type(config.get(key)) is not int:
            raise _unusable(f"the model's config.json has no {key}", config.get(key), where)
    num_heads = config["num_attention_heads"]
    architecture = (config.get("architectures") or ["LlamaForCausalLM"])[0]
    result = {
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
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind in (None, "default"):
        return {"rotary_base": base}
    left_out = ("rope_type", "type", "rope_theta")
    others = {key: value for key, value in parameters.items() if key not in left_out}
    return {"rotary_base": base, "rotary_scaling": {"type": kind, **others}}


def _unusable(what: str, value: object, where: str) -> CheckpointUnusable:
    return unusable(
        what,
        where,
        str(value)[:100],
        "export Hugging Face files (--to hf), and convert them with TensorRT-LLM's own scripts",
    )
