"""Models of NeMo: a ``.nemo`` file, which is a tar archive, and the directory that one is unpacked to. No torch.

Layout (source: nemo.core.connectors.save_restore_connector, NeMo 3.0): ``model_config.yaml``; the weights, which are
one file of torch.save (``model_weights.ckpt``) or a distributed checkpoint of Megatron-Core (``model_weights/``); and
*artifacts*, for example a tokenizer. The config refers to an artifact by the text ``nemo:`` and its name in the
archive. NeMo 1 also wrote a file for each rank, which is not read.

NeMo 3 writes uncompressed archives. Their tensors are read in place. Older versions compress with gzip: these archives
are decompressed once to a temporary file.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.base.units import some_of
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.files import faults_of, names_in, omitted_texts
from automodel_ckpt.convert.formats.format import Details, Format
from automodel_ckpt.convert.formats.nemo.megatron import MegatronCore
from automodel_ckpt.convert.formats.nemo.packed_files import (
    PackedFiles,
    has_member,
    packed_files,
)
from automodel_ckpt.convert.formats.nemo.plain_yaml import parse_yaml, scalars_in
from automodel_ckpt.convert.formats.torch.torch_files import read_model
from automodel_ckpt.convert.names.dimensions import config_of_arguments
from automodel_ckpt.errors import CheckpointUnusable, unusable

CONFIG = "model_config.yaml"
WEIGHTS = "model_weights.ckpt"
DISTRIBUTED_WEIGHTS = "model_weights"
ARTIFACT_PREFIX = "nemo:"
MAX_CONFIG_BYTES = 1 << 20
# Source: nemo.utils.model_utils.inject_model_parallel_rank, NeMo 3.0.
_RANK = re.compile(r"(mp_rank_[0-9]{2,4}|tp_rank_[0-9]{2,4}_pp_rank_[0-9]{3,4})/", re.ASCII)
_NUMBERS = ("num_attention_heads", "num_query_groups", "kv_channels", "moe_router_topk")


class NemoDirectory(Format):
    """A directory that a ``.nemo`` file was unpacked to, or that NeMo wrote with ``pack_nemo_file = False``."""

    name = "an unpacked .nemo file of NeMo"

    def detect(self, path: Path) -> bool:
        return (path / CONFIG).is_file() and bool(self.parts(path))

    def open(self, path: Path) -> Source:
        """Describe the model. Symbolic links are followed only to a file, which the user chose."""
        packed = packed_files(path)
        config = read_config(packed)
        if (path / DISTRIBUTED_WEIGHTS).is_dir():
            source = MegatronCore().open(path / DISTRIBUTED_WEIGHTS)
            return replace(source, stated_config=_stated_config(config))
        if any(name.startswith(f"{DISTRIBUTED_WEIGHTS}/") for name in packed.files):
            raise unusable(
                "a distributed checkpoint in a .nemo file is read after it was unpacked",
                path,
                f"{DISTRIBUTED_WEIGHTS}/",
                f"unpack it (`ckpt unpack {path} DIR`), and use the directory",
            )
        return _source(packed, config, path if path.is_dir() else path.parent)

    def parts(self, path: Path) -> frozenset[str]:
        return frozenset(name for name in names_in(path) if _is_weights(path, name))

    def details(self, path: Path) -> Details:
        """Return the config as written."""
        content = packed_files(path).read(CONFIG, MAX_CONFIG_BYTES).decode()
        return {CONFIG: tuple(content.splitlines())}


class NemoFile(NemoDirectory):
    """A ``.nemo`` file."""

    name = "a .nemo file of NeMo"

    def detect(self, path: Path) -> bool:
        return has_member(path, CONFIG)


def _is_weights(path: Path, name: str) -> bool:
    if name == WEIGHTS:
        return True
    is_weights = name == DISTRIBUTED_WEIGHTS or _RANK.match(f"{name}/") is not None
    return is_weights and (path / name).is_dir()


def read_config(packed: PackedFiles) -> ValueDict:
    """Return the model's config, with each scalar as text. Raises :class:`CheckpointUnusable`."""
    with faults_of(packed.path / CONFIG, "the model's config cannot be read"):
        return dict(parse_yaml(packed.read(CONFIG, MAX_CONFIG_BYTES).decode()))


def _stated_config(config: Values) -> ValueDict:
    """Return what the config of a GPT model states of the keys of ``config.json`` that the shapes do not show.

    Source of the keys: NeMo 1's examples/nlp/language_modeling/conf/megatron_llama_config.yaml.
    """
    arguments: ValueDict = {key: _number(config.get(key)) for key in _NUMBERS}
    arguments["group_query_attention"] = arguments["num_query_groups"] is not None
    for argument, key in (("norm_epsilon", "layernorm_epsilon"), ("rotary_base", "rotary_base")):
        with suppress(ValueError):
            arguments[argument] = float(str(config.get(key)))
    return config_of_arguments(arguments)


def _number(value: object) -> int | None:
    """Return a number of the config, in which each scalar is text, or None for null or another value."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    return None


# ---------------------------------------------------------------- weights


def _source(packed: PackedFiles, config: Values, directory: Path) -> Source:
    if WEIGHTS not in packed.files:
        raise _no_weights(packed)
    stored = packed.files[WEIGHTS]
    path = packed.root / stored.file
    model = read_model(path, stored.file, start=stored.start, nbytes=stored.nbytes)
    omitted = omitted_texts(0, model.num_values)
    references = {text for text in scalars_in(config) if text.startswith(ARTIFACT_PREFIX)}
    if references:
        names = [text.removeprefix(ARTIFACT_PREFIX) for text in sorted(references)]
        omitted = (*omitted, f"artifacts of NeMo ({some_of(names, 5)})")
    return Source(
        packed.root,
        directory,
        model.tensors,
        omitted=omitted,
        stated_config=_stated_config(config),
    )


def _no_weights(packed: PackedFiles) -> CheckpointUnusable:
    ranks = sorted(name for name in packed.files if _RANK.match(name))
    if not ranks:
        value = f"no {WEIGHTS} or {DISTRIBUTED_WEIGHTS}/"
        return unusable("there are no weights in this checkpoint of NeMo", packed.path, value)
    return unusable(
        "this model of NeMo has a file of weights for each rank",
        packed.path,
        f"{len(ranks)} files, such as {ranks[0][:100]}",
        "merge them with NeMo 1's examples/nlp/language_modeling/megatron_change_num_partitions.py "
        "(tensor and pipeline parallel size 1)",
    )
