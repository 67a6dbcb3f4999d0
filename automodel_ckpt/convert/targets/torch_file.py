"""A checkpoint's model as one state dict in a file of ``torch.save``: verified, streamed, staged, published.

``torch.load(FILE, weights_only=True)`` returns a dict of tensors under the names of the model's Hugging Face files.
Tied names share one storage in the file, as ``torch.save`` writes them. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.export.export_leftovers import Log
from automodel_ckpt.checkpoint.export.files import cast_lines
from automodel_ckpt.checkpoint.export.plan import parse_cast_dtype
from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import (
    ArchiveTensor,
    write_torch_archive,
)
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.convert.publishing import published_file
from automodel_ckpt.convert.targets.output_paths import file_output
from automodel_ckpt.convert.targets.report import ExportReport
from automodel_ckpt.convert.targets.source_checks import check_files
from automodel_ckpt.convert.targets.tensor_blocks import tensor_blocks

_CONFIG = "config.json"
_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
log_default = logging.getLogger("automodel_ckpt")


def export_torch(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    prefix: str = "",
    cast_dtype: str | None = None,
    overwrite: bool = False,
    log: Log = log_default.info,
) -> ExportReport:
    """Write the model in *source* (anything that ``open_source`` of ``convert/open.py`` accepts) as one state dict.

    *output* defaults to the source's name with ``.pt``, next to it. *prefix* is added to all names. Tensors keep the
    dtype of the checkpoint, unless *cast_dtype* (bf16, fp16, fp32, fp64) casts the floating-point ones.

    Raises :class:`CheckpointUnusable` for a damaged source, :class:`SaveFailed` if the file cannot be written, and
    :class:`RecipeError` for a wrong argument. In each case nothing was written.
    """
    started = time.monotonic()
    cast_code = parse_cast_dtype(cast_dtype)
    opened = open_source(Path(source))
    target = file_output(opened, output, ".pt", overwrite=overwrite)
    check_files(opened)
    for text in opened.notes:
        log(f"warning: {text}")
    state_dict = state_dict_of(opened, prefix, cast_code, log)
    publish_archive(target, state_dict, log)
    return ExportReport(
        target,
        len(state_dict),
        target.stat().st_size,
        time.monotonic() - started,
        opened.has_digests,
        opened.notes,
    )


def state_dict_of(
    source: Source, prefix: str, cast_code: str | None, log: Log
) -> dict[str, ArchiveTensor]:
    """Return the tensors of a model by name, with the *prefix*. A tied name is the tensor that it is tied to.

    *log* gets a line for each kind of cast.
    """
    state_dict: dict[str, ArchiveTensor] = {}
    casts: Counter[tuple[str, str]] = Counter()
    for fqn, tensor in source.tensors.items():
        dtype = tensor.dtype
        if cast_code is not None and dtype in ORDINARY_FLOATS:
            dtype = cast_code
        casts[tensor.dtype, dtype] += 1
        state_dict[prefix + fqn] = archive_tensor(source.root, tensor, dtype)
    for alias, stored in _ties(source).items():
        if stored in source.tensors:
            state_dict.setdefault(prefix + alias, state_dict[prefix + stored])
    for text in cast_lines(casts):
        log(text)
    return state_dict


def archive_tensor(root: Path, tensor: Tensor, dtype: str) -> ArchiveTensor:
    """Return a stored tensor as a value of an archive: it is read when its record is written."""
    return ArchiveTensor(dtype, tensor.shape, partial(tensor_blocks, root, tensor, dtype))


def _ties(source: Source) -> Mapping[str, str]:
    """Return {tied name: stored name}. The manifest of Hugging Face files has them, but not the source."""
    if source.tied:
        return source.tied
    ties = dict(_tied_head(source))
    if source.manifest is None:
        return ties
    for tree in source.manifest.trees.values():
        ties.update(tree.tied)
    return ties


def _tied_head(source: Source) -> Mapping[str, str]:
    """Return {name of the output layer: name of the embedding} if config.json ties them and the files omit the former.

    Hugging Face files have one of both, and a model's ``state_dict()`` has two names.
    """
    config = read_json(source.config_directory, _CONFIG) or {}
    embeddings = [name for name in source.tensors if name.endswith(_EMBEDDING)]
    has_head = any(name.endswith(_HEAD) for name in source.tensors)
    if config.get("tie_word_embeddings") is not True or has_head or len(embeddings) != 1:
        return {}
    return {_HEAD: embeddings[0]}


def publish_archive(target: Path, value: Any, log: Log) -> None:
    """Write *value* as a file of ``torch.save``, which replaces *target* when it is complete."""
    with (
        published_file(target, log, what="the file of torch.save") as path,
        path.open("wb") as file,
    ):
        write_torch_archive(file, value)
