"""A checkpoint's model with quantized linear layers, in the format compressed-tensors of vLLM and transformers.

Weights are rounded to the nearest value, without calibration. The library ``compressed-tensors`` (the extra of that
name) defines the schemes, quantizes and packs. Memory: the largest tensor, of which the library makes several copies in
float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted_are
from automodel_ckpt.checkpoint.export.files import write_side_files
from automodel_ckpt.checkpoint.export.plan import (
    ExportTensor,
    Plan,
)
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS, ORDINARY_FLOATS, TORCH_NAMES
from automodel_ckpt.checkpoint.files.safe_open import json_bytes, parse_json
from automodel_ckpt.checkpoint.files.safetensors_header import build_header
from automodel_ckpt.checkpoint.files.type_aliases import Shape, ValueDict
from automodel_ckpt.checkpoint.parts.slices import nbytes_of
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.checkpoint.tensors.box_reader import whole_checked
from automodel_ckpt.checkpoint.tensors.float_cast import cast
from automodel_ckpt.convert.formats.files import library
from automodel_ckpt.convert.targets.flow import Export, ExportReport
from automodel_ckpt.convert.targets.tensor_blocks import tensor_blocks
from automodel_ckpt.errors import unusable

SCHEMES = ("FP8_DYNAMIC", "W4A16", "W8A16", "W8A8")
"""Presets of the library. W and A are the bits of weights and activations. FP8_DYNAMIC is 8-bit floats for both."""
_FORMATS = {
    "FP8_DYNAMIC": "float-quantized",
    "W4A16": "pack-quantized",
    "W8A16": "pack-quantized",
    "W8A8": "int-quantized",
}
_PACKED = "pack-quantized"
_CODES = {"FP8_DYNAMIC": "F8_E4M3", "W8A8": "I8"}
_CONFIG = "config.json"
_WORD_BITS = 32
_WHERE = "ckpt export --to compressed-tensors"

LinearWeights = Callable[[Path], frozenset[str]]
"""Returns the names of the linear layers' weights, for the model with its config.json in a directory."""


Entry = tuple[str, str, Shape]
"""The name of a tensor of the output, its dtype code, and its shape."""


def write(export: Export, *, scheme: str, linear_weights: LinearWeights) -> ExportReport:
    """Quantize the linear layers of the model by *scheme* (one of SCHEMES), and write Hugging Face files.

    Tensors that are not quantized (norms, embeddings, the output layer, biases) keep the dtype of the checkpoint, if
    they are not cast.
    """
    quantizer = _Quantizer(scheme)
    opened = export.source
    side = export.required_config("quantizing")
    export.directory(f"-{scheme}")
    export.check()
    plan = export.plan()
    files, file_warnings = export.side_files(plan)
    # These warnings are about weights that lie among the side files: here they may be the source.
    export.warn(*(() if opened.finished else file_warnings))
    quantized = _selected(export, plan, linear_weights(side), quantizer)
    files[_CONFIG] = _config(files[_CONFIG], quantizer, plan, quantized)
    export.log_casts(plan.casts)
    with export.published_directory() as staging:
        files[layout.HF_INDEX] = _write_weights(staging, opened, plan, quantized, quantizer)
        write_side_files(files, staging)
    summary = f"{len(quantized)} of them quantized"
    return export.report(len(plan.tensors), summary, num_quantized=len(quantized))


class _Quantizer:
    """The library's scheme *name*, and what it makes of a weight. Raises :class:`RecipeError` without the library."""

    def __init__(self, name: str) -> None:
        quantization, compressors, self._utils = (
            library(f"compressed_tensors.{module}", "quantizing", _WHERE, "compressed-tensors")
            for module in ("quantization", "compressors", "quantization.utils")
        )
        self._torch = import_module("torch")
        self.name = name
        self.format = _FORMATS[name]
        self._quantization = quantization
        self._scheme = quantization.preset_name_to_scheme(name, ["Linear"])
        self._compressor = compressors.BaseCompressor.get_value_from_registry(self.format)

    @property
    def group_size(self) -> int | None:
        """The number of columns that share a scale. None: all columns of a row share one."""
        size: int | None = self._scheme.weights.group_size
        return size

    def config(self, ignored: Sequence[str]) -> ValueDict:
        """Return ``quantization_config`` for config.json, which names the layers that are not quantized."""
        config = self._quantization.QuantizationConfig(
            config_groups={"group_0": self._scheme},
            format=self.format,
            quantization_status="compressed",
            ignore=list(ignored),
        )
        return dict(json.loads(config.model_dump_json()))

    def entries(self, layer: str, shape: Shape, scale_dtype: str) -> Iterator[Entry]:
        """Yield what is stored for the weight of *layer* (with a dot), of *shape* [out, in]."""
        rows, columns = shape
        num_groups = columns // self.group_size if self.group_size else 1
        scale = (f"{layer}weight_scale", scale_dtype, (rows, num_groups))
        if self.format != _PACKED:
            yield f"{layer}weight", _CODES[self.name], shape
            yield scale
        else:
            num_words = math.ceil(columns * self._scheme.weights.num_bits / _WORD_BITS)
            yield f"{layer}weight_packed", "I32", (rows, num_words)
            yield scale
            yield f"{layer}weight_shape", "I64", (2,)

    def compress(self, weight: Any) -> Iterator[tuple[str, memoryview]]:
        """Yield the name and the bytes of each part of a *weight*, a tensor [out, in]."""
        groups = weight.reshape(len(weight), -1, self.group_size or weight.shape[1])
        scale, _ = self._utils.calculate_qparams(
            groups.amin(-1), groups.amax(-1), self._scheme.weights
        )
        state = self._compressor.compress({"weight": weight, "weight_scale": scale}, self._scheme)
        for suffix, value in state.items():
            yield suffix, value.contiguous().view(self._torch.uint8).numpy().reshape(-1).data


def _selected(
    export: Export, plan: Plan, linear: frozenset[str], quantizer: _Quantizer
) -> frozenset[str]:
    """Return the names of the weights to quantize, and warn of linear layers that stay as they are."""
    chosen = set()
    unsuited = []
    size = quantizer.group_size
    for tensor in plan.tensors:
        if tensor.fqn in linear and len(tensor.stored.shape) == 2:
            is_float = {tensor.stored.dtype, tensor.dtype} <= ORDINARY_FLOATS
            if is_float and tensor.stored.shape[1] % (size or 1) == 0:
                chosen.add(tensor.fqn)
            else:
                unsuited.append(tensor.fqn)
    if not chosen:
        raise unusable(
            "no weight of this model can be quantized by this scheme",
            "ckpt export --to compressed-tensors --scheme",
            quantizer.name,
            f"the columns of a weight must be divisible by {size}; use another scheme, such as W8A8",
        )
    if unsuited:
        export.warn(
            f"{counted_are(len(unsuited), 'linear layer')} not quantized, such as {unsuited[0]}: columns are not "
            f"divisible by {size}, or values are no ordinary floats"
        )
    return frozenset(chosen)


def _config(raw: bytes, quantizer: _Quantizer, plan: Plan, quantized: frozenset[str]) -> bytes:
    """Return config.json with the names of the layers with a matrix that is not quantized.

    Some readers quantize each layer that is not listed.
    """
    # The output layer has no tensor if it is tied to the embedding.
    ignored = {"lm_head"}
    for tensor in plan.tensors:
        layer, _, last = tensor.fqn.rpartition(".")
        is_matrix = last == "weight" and len(tensor.stored.shape) >= 2
        if is_matrix and tensor.fqn not in quantized:
            ignored.add(layer)
    config = parse_json(raw)
    config["quantization_config"] = quantizer.config(sorted(ignored))
    return json_bytes(config)


# ---------------------------------------------------------------- writing


def _write_weights(
    staging: Path, source: Source, plan: Plan, quantized: frozenset[str], quantizer: _Quantizer
) -> bytes:
    """Write the files of weights, and return the index of all tensors."""
    weight_map = {}
    total = 0
    for file in plan.files:
        entries: list[Entry] = []
        for tensor in file.tensors:
            shape = tensor.stored.shape
            if tensor.fqn in quantized:
                entries += quantizer.entries(tensor.fqn.removesuffix("weight"), shape, tensor.dtype)
            else:
                entries.append((tensor.fqn, tensor.dtype, shape))
        # Wide elements first: every tensor is then aligned to its elements, which readers that map the file need.
        entries.sort(key=lambda entry: -DTYPE_BITS[entry[1]])
        header, starts = build_header(entries, {"format": "pt"})
        for name, dtype, shape in entries:
            weight_map[name] = file.name
            total += nbytes_of(dtype, shape)
        with open(staging / file.name, "xb") as out:
            out.write(header)
            for tensor in file.tensors:
                for name, data in _outputs(source.root, tensor, quantized, quantizer):
                    out.seek(starts[name])
                    out.write(data)
                    starts[name] += data.nbytes
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json_bytes(document)


def _outputs(
    root: Path, tensor: ExportTensor, quantized: frozenset[str], quantizer: _Quantizer
) -> Iterator[tuple[str, memoryview]]:
    """Yield the name and the next bytes of each tensor that is stored for *tensor*."""
    if tensor.fqn not in quantized:
        for block in tensor_blocks(root, tensor.stored, tensor.dtype):
            yield tensor.fqn, block
        return
    layer = tensor.fqn.removesuffix("weight")
    for suffix, data in quantizer.compress(_weight(root, tensor)):
        yield layer + suffix, data


def _weight(root: Path, tensor: ExportTensor) -> Any:
    """Return a weight as a torch tensor in the dtype of the export. Raises :class:`CheckpointUnusable`."""
    torch = import_module("torch")
    values = cast(whole_checked(root, tensor.stored), tensor.stored.dtype, tensor.dtype).copy()
    return torch.from_numpy(values.view("u1")).view(getattr(torch, TORCH_NAMES[tensor.dtype]))
