"""A checkpoint's model as one state dict in a file of ``torch.save``: verified, streamed, staged, published.

``torch.load(FILE, weights_only=True)`` returns a dict of tensors under the names of the model's Hugging Face files.
Tied names share one storage in the file, as ``torch.save`` writes them. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.dtypes import ORDINARY_FLOATS
from automodel_ckpt.checkpoint.files.type_aliases import Texts, ValueDict
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import (
    ArchiveTensor,
    write_torch_archive,
)
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.formats.format import ParameterGroup
from automodel_ckpt.convert.formats.torch.run_state import RunState
from automodel_ckpt.convert.targets.flow import Export, ExportReport
from automodel_ckpt.convert.targets.tensor_blocks import tensor_blocks

_CONFIG = "config.json"
_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


def write(export: Export, *, prefix: str | None = None) -> ExportReport:
    """Write the model as one state dict, in which *prefix* is added to all names."""
    export.file(".pt")
    export.check()
    state_dict = state_dict_of(export, export.source, prefix or "")
    publish_archive(export, state_dict)
    return export.report(len(state_dict))


def state_dict_of(export: Export, source: Source, prefix: str) -> dict[str, ArchiveTensor]:
    """Return the tensors of *source* by name, with the *prefix*, and log casts. A tied name is the tensor that it is
    tied to."""
    cast_code = export.cast_code
    state_dict = {}
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
    export.log_casts(casts)
    return state_dict


def archive_tensor(root: Path, tensor: Tensor, dtype: str) -> ArchiveTensor:
    """Return a stored tensor as a value of an archive: it is read when its record is written."""
    return ArchiveTensor(dtype, tensor.shape, partial(tensor_blocks, root, tensor, dtype))


def numbered_state(run: RunState, groups: Iterable[ParameterGroup]) -> ValueDict:
    """Return the state dict of a run's optimizer as torch has it: the parameters are numbered through its *groups*."""
    state = {}
    written = []
    number = 0
    for group in groups:
        first = number
        for name in group.parameters:
            tensors = {
                key: archive_tensor(run.root, tensor, tensor.dtype)
                for key, tensor in run.tensors.get(name, {}).items()
            }
            if entry := {**run.values.get(name, {}), **tensors}:
                state[number] = entry
            number += 1
        written.append({**group.options, "params": list(range(first, number))})
    return {"state": state, "param_groups": written}


def _ties(source: Source) -> Texts:
    """Return {tied name: stored name}. The manifest of Hugging Face files has them, but not the source.

    A model's ``state_dict()`` has two names where config.json ties the output layer to the embedding, and the files
    have one.
    """
    if source.tied:
        return source.tied
    ties = {}
    config = read_json(source.config_directory, _CONFIG) or {}
    embeddings = [name for name in source.tensors if name.endswith(_EMBEDDING)]
    has_head = any(name.endswith(_HEAD) for name in source.tensors)
    if config.get("tie_word_embeddings") is True and not has_head and len(embeddings) == 1:
        ties[_HEAD] = embeddings[0]
    for tree in source.manifest.trees.values() if source.manifest is not None else ():
        ties |= tree.tied
    return ties


def publish_archive(export: Export, value: Any) -> None:
    """Write *value* as a file of ``torch.save``, which becomes the target when it is complete."""
    with export.published("the file of torch.save") as file:
        write_torch_archive(file, value)
