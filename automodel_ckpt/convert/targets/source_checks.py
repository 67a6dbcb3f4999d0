"""Validate and plan what is exported, before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from automodel_ckpt.checkpoint.export.plan import Plan, export_names, make_plan
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.sources.base_maps import maps_of
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.errors import CheckpointUnusable

_LANGUAGE_MODEL = "ForCausalLM"
_HEAD = "lm_head.weight"


def check_files(source: Source) -> None:
    """Raise :class:`CheckpointUnusable` if a file of a checkpoint is missing or has another size than in the manifest,
    or if a tensor of the model is missing or left over.

    For exports that compare the bytes of each tensor with their digests when they read them.
    """
    _check_names(source)
    if source.manifest is None:
        return
    problems = verify(source.root, source.manifest, "size")
    if problems:
        raise CheckpointUnusable.all_of(problems)


def check_digests(source: Source, num_threads: int = 5) -> None:
    """Raise :class:`CheckpointUnusable` if a file of a checkpoint or an export does not match its digest, or if a
    tensor of the model is missing or left over.

    For exports that write parts of the stored slices: only a whole slice has a digest.
    """
    _check_names(source)
    problems = []
    if source.manifest is not None:
        problems = verify(source.root, source.manifest, "digest", num_threads=num_threads)
    elif source.export is not None:
        only = set(source.files)
        problems = source.export.problems(only=only, level="digest", rank=0, num_ranks=1)
    if problems:
        raise CheckpointUnusable.all_of(problems)


def _check_names(source: Source) -> None:
    export_names(source.tensors, source.tied, maps_of(source), str(source.model_directory), [])


def plan_in_stored_dtypes(source: Source, cast_code: str | None) -> Plan:
    """Plan an export whose tensors have the dtypes of the checkpoint, not those of its base, unless *cast_code* casts
    them.

    Raises :class:`CheckpointUnusable` if the tensors are not those of the model.
    """
    maps = replace(maps_of(source), dtype=None)
    where = str(source.model_directory)
    return make_plan(source.tensors, source.tied, maps, cast_dtype=cast_code, where=where)


def check_language_model(
    config: Mapping[str, Any], names: Collection[str], program: str, where: str
) -> None:
    """Raise :class:`CheckpointUnusable` if the model with this config.json, whose tensors have these *names*, is no
    causal language model: *program* has no others.
    """
    architecture = next(iter(config.get("architectures") or ()), "")
    has_head = _HEAD in names or config.get("tie_word_embeddings") is True
    if architecture and not architecture.endswith(_LANGUAGE_MODEL):
        value = str(architecture)[:100]
    elif not has_head:
        value = f"no {_HEAD}, and config.json does not tie it to the embedding"
    else:
        return
    raise CheckpointUnusable(
        f"only causal language models are exported for {program}",
        where=where,
        value=value,
        hint="export Hugging Face files (--to hf), which have every kind of model",
    )
