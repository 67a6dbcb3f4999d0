"""A Llama or Mistral as a checkpoint of TensorRT-LLM: a directory or ``.qnemo`` file with a file for each rank.

The tensors are those that NVIDIA's exporter writes (``names/tensorrt_llm.py``). Memory: one block of a tensor. Imports
no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from automodel_ckpt.checkpoint.export.files import write_side_files
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safetensors_header import build_header
from automodel_ckpt.checkpoint.parts.slices import Box, Tensor, nbytes_of
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.nemo.tar_files import TarWriter
from automodel_ckpt.convert.names.dimensions import dimensions_of_config
from automodel_ckpt.convert.names.tensorrt_llm import (
    DividedTensor,
    divided_tensors,
    rows_of_rank,
)
from automodel_ckpt.convert.targets.flow import LOG, Export, ExportReport, Log
from automodel_ckpt.convert.targets.tensor_blocks import tensor_blocks
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
_ZERO_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _RankTensor:
    """A tensor of one rank: boxes of stored tensors, one below the other, and then *num_zero_rows* rows of zeros."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Tensor, Box], ...]
    num_zero_rows: int = 0


def export_tensorrt_llm(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    num_ranks: int = 1,
    compress: bool = True,
    cast_dtype: str | None = None,
    overwrite: bool = False,
    log: Log = LOG,
) -> ExportReport:
    """Write the model in *source* (anything that ``open_source`` of ``convert/open.py`` accepts) for TensorRT-LLM.

    *num_ranks* is the size of tensor parallelism. With *compress*, the result is one ``.qnemo`` file, an (uncompressed)
    tar archive; otherwise a directory. All tensors are cast to *cast_dtype* (fp16 or bf16); by default to bfloat16 if
    most of the model is, else to float16.

    Raises :class:`CheckpointUnusable` for a damaged source, and for a model other than Llama or Mistral;
    :class:`SaveFailed` if the output cannot be written; :class:`RecipeError` for a wrong argument. In each case nothing
    was written.
    """
    export = Export(source, cast_dtype, log)
    opened = export.source
    if export.cast_code not in (None, *_DTYPES):
        raise _wrong("--cast-dtype", cast_dtype, "TensorRT-LLM computes in fp16 or bf16")
    if compress:
        target = export.file(output, ".qnemo", overwrite=overwrite)
    else:
        target = export.directory(output, "-tensorrt-llm")
    export.check_files()
    dtype = export.cast_code or _dtype_of(opened)
    files = export.config_and_tokenizer(dtype)
    model = _Model(export, files, num_ranks, dtype)
    export.log_casts((tensor.dtype, dtype) for tensor in opened.tensors.values())
    _publish(export, target, model, _small_files(model.config, files), compress)
    return export.report(target, len(opened.tensors))


def _dtype_of(source: Source) -> str:
    """Return the dtype of the export: bfloat16 if most of the model is, else float16, as NVIDIA's exporter."""
    nbytes = {"BF16": 0}
    for tensor in source.tensors.values():
        nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + tensor.nbytes
    most = max(nbytes, key=lambda code: nbytes[code])
    return "BF16" if most == "BF16" else "F16"


class _Model:
    """The tensors of each rank, and the config. Raises :class:`CheckpointUnusable` if they do not match the source."""

    def __init__(
        self, export: Export, files: Mapping[str, bytes], num_ranks: int, dtype: str
    ) -> None:
        source = export.source
        self.root = source.root
        self.dtype = dtype
        self.num_ranks = num_ranks
        self._tensors = source.tensors
        self._tied = source.tied
        self._where = export.where
        hugging_face, self.config = tensorrt_llm_config(
            files, _DTYPES[dtype], num_ranks, self._where
        )
        export.check_language_model(hugging_face, "TensorRT-LLM")
        self._dimensions = dimensions_of_config(hugging_face, self._where)
        if num_ranks < 1 or rows_of_rank(self._dimensions, 0, num_ranks) is None:
            text = f"{self._dimensions.num_heads} heads, {self._dimensions.num_query_groups} groups"
            raise _wrong("--tensor-parallel", num_ranks, f"use a size that divides the {text}")
        self.rules = list(divided_tensors(self._dimensions))
        self._check_names()
        # The digests of each stored tensor are compared once, not for every rank.
        self._checked: set[str] = set()

    def _check_names(self) -> None:
        known: set[str] = set()
        for rule in self.rules:
            known.update(rule.hugging_face)
        unknown = sorted(self._tensors.keys() - known)
        if unknown:
            raise self._unusable("TensorRT-LLM's Llama has no such tensor", unknown[0])

    def rank_tensors(self, rank: int) -> Iterator[_RankTensor]:
        """Yield the tensors of a rank."""
        for rule in self.rules:
            sources = [self._stored(name) for name in rule.hugging_face]
            yield self._rank_tensor(rule, sources, rank)

    def _stored(self, name: str) -> Tensor:
        # Tied embeddings are written twice, as NVIDIA's exporter does.
        stored = self._tensors.get(name) or self._tensors.get(self._tied.get(name, ""))
        if stored is None and name == "lm_head.weight":
            stored = self._tensors.get("model.embed_tokens.weight")
        if stored is None:
            raise self._unusable("a tensor of the model is missing", name)
        if stored.dtype not in ("F64", "F32", "F16", "BF16"):
            text = f"{name}: {stored.dtype}"
            raise self._unusable("a tensor is not of a floating-point dtype", text)
        return stored

    def _rank_tensor(
        self, rule: DividedTensor, sources: Sequence[Tensor], rank: int
    ) -> _RankTensor:
        first = sources[0]
        if rule.division == "equal":
            return _RankTensor(rule.name, first.shape, ((first, first.box),))
        if any(len(tensor.shape) != 2 for tensor in sources):
            raise self._unusable("a tensor is not a matrix", first.fqn)
        num_rows, num_columns = first.shape
        if rule.division == "columns":
            size = self._share(num_columns, first)
            box = Box((0, rank * size), (num_rows, size))
            return _RankTensor(rule.name, box.sizes, ((first, box),))
        if rule.division == "vocabulary":
            size = -(-num_rows // self.num_ranks)
            begin = min(rank * size, num_rows)
            present = min(size, num_rows - begin)
            box = Box((begin, 0), (present, num_columns))
            return _RankTensor(
                rule.name, (size, num_columns), ((first, box),), num_zero_rows=size - present
            )
        if rule.division == "rows":
            size = self._share(num_rows, first)
            box = Box((rank * size, 0), (size, num_columns))
            return _RankTensor(rule.name, box.sizes, ((first, box),))
        return self._fused(rule, sources, rank)

    def _fused(self, rule: DividedTensor, sources: Sequence[Tensor], rank: int) -> _RankTensor:
        """Return a rank's queries, keys and values as one tensor."""
        num_groups = self._dimensions.num_query_groups
        all_rows = (self._dimensions.num_heads, num_groups, num_groups)
        rows = rows_of_rank(self._dimensions, rank, self.num_ranks)
        assert rows is not None, "the constructor has checked them"
        queries, keys = rows
        parts: list[tuple[Tensor, Box]] = []
        num_columns = sources[0].shape[1]
        for tensor, num_heads, own in zip(sources, all_rows, (queries, keys, keys), strict=True):
            if tensor.shape != (num_heads * self._dimensions.head_size, num_columns):
                text = f"{tensor.fqn} {list(tensor.shape)}"
                raise self._unusable("a tensor does not match the heads of config.json", text)
            parts.append((tensor, Box((own.start, 0), (len(own), num_columns))))
        num_rows = sum(box.sizes[0] for _, box in parts)
        return _RankTensor(rule.name, (num_rows, num_columns), tuple(parts))

    def _share(self, extent: int, tensor: Tensor) -> int:
        if extent % self.num_ranks:
            text = f"{extent} features of {tensor.fqn}"
            raise _wrong("--tensor-parallel", self.num_ranks, f"use a size that divides {text}")
        return extent // self.num_ranks

    def write_rank(self, file: BinaryIO, rank: int) -> None:
        """Write the safetensors file of a rank. Raises :class:`CheckpointUnusable` for a damaged tensor."""
        tensors = list(self.rank_tensors(rank))
        entries = [(tensor.name, self.dtype, tensor.shape) for tensor in tensors]
        header, _ = build_header(entries, {"format": "pt"})
        file.write(header)
        for tensor in tensors:
            for block in self._blocks(tensor):
                file.write(block)

    def _blocks(self, tensor: _RankTensor) -> Iterator[bytes | memoryview]:
        for stored, outer in tensor.parts:
            is_checked = stored.fqn in self._checked
            yield from tensor_blocks(self.root, stored, self.dtype, outer, is_checked=is_checked)
            self._checked.add(stored.fqn)
        zeros = nbytes_of(self.dtype, (tensor.num_zero_rows, *tensor.shape[1:]))
        while zeros:
            count = min(zeros, _ZERO_BYTES)
            yield bytes(count)
            zeros -= count

    def _unusable(self, what: str, value: str) -> CheckpointUnusable:
        return CheckpointUnusable(
            what,
            where=self._where,
            value=value,
            hint="export Hugging Face files (--to hf), and convert them with TensorRT-LLM's own scripts",
        )


# ---------------------------------------------------------------- files


def _small_files(config: bytes, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files beside the weights: the config, and the tokenizer where NeMo's exporter puts it."""
    contents = {"config.json": config}
    model = files.get("tokenizer.model")
    if model is not None:
        contents["tokenizer.model"] = model
        settings = {"library": "sentencepiece", "type": None, "model": "nemo:tokenizer.model"}
        contents["tokenizer_config.yaml"] = yaml.safe_dump(settings, sort_keys=False).encode()
        return contents
    for name, content in sorted(files.items()):
        if name != "config.json":
            contents[f"huggingface_tokenizer/{name}"] = content
    return contents


def _publish(
    export: Export, target: Path, model: _Model, contents: Mapping[str, bytes], compress: bool
) -> None:
    """Write the archive, or with *compress* false the directory."""
    # All tensors are described before anything is written.
    for rank in range(model.num_ranks):
        for _ in model.rank_tensors(rank):
            pass
    if not compress:
        with export.published_directory(target, "the checkpoint of TensorRT-LLM") as staging:
            write_side_files(contents, staging)
            for rank in range(model.num_ranks):
                with open(staging / f"rank{rank}.safetensors", "xb") as file:
                    model.write_rank(file, rank)
        return
    with export.published(target, "the .qnemo file") as file:
        writer = TarWriter(file)
        for name, content in contents.items():
            writer.add_bytes(name, content)
        for rank in range(model.num_ranks):
            writer.add_streamed(f"rank{rank}.safetensors", partial(model.write_rank, rank=rank))
        writer.finish()


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


def tensorrt_llm_config(
    files: Mapping[str, bytes], dtype: str, num_ranks: int, where: str
) -> tuple[dict[str, Any], bytes]:
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
    result: dict[str, Any] = {
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


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base and the scaling of the rotary embedding, from either generation of Hugging Face's keys."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = parameters.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROTARY_BASE
    found: dict[str, Any] = {"rotary_base": base}
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind not in (None, "default"):
        scaling = {"type": kind}
        for key, value in parameters.items():
            if key not in ("rope_type", "type", "rope_theta"):
                scaling[key] = value
        found["rotary_scaling"] = scaling
    return found


def _unusable(what: str, value: object, where: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        what,
        where=where,
        value=str(value)[:100],
        hint="export Hugging Face files (--to hf), and convert them with TensorRT-LLM's own scripts",
    )
