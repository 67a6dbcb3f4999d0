"""The files of a pretrained model, compared with the tensors of the model, and read into this rank's shards of it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import GenerationConfig, PreTrainedConfig

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.files.layout import RankLayout
from automodel_ckpt.checkpoint.files.type_aliases import Shape, TextDict
from automodel_ckpt.checkpoint.options import Level
from automodel_ckpt.checkpoint.sources.source import MODEL, Tensors
from automodel_ckpt.checkpoint.state.fill_modules import Filling, fill_module, module_shapes
from automodel_ckpt.checkpoint.state.module_tensors import (
    StoredLayout,
    set_stored_layout,
    stored_layout,
    unwrap,
)
from automodel_ckpt.checkpoint.state.storable import DTYPES
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from automodel_ckpt.models.build import fresh_dtype
from automodel_ckpt.models.hf_names import names_in_files, tensor_names_in, tensor_types_in
from automodel_ckpt.models.inspect.interface import log_resized, vocabulary_names
from automodel_ckpt.models.inspect.repository import base_directory, fetched_directory
from automodel_ckpt.models.meta_init import float32_pattern
from automodel_ckpt.models.weight_matching import (
    Names,
    Verdict,
    compare,
    former_buffers,
    ignored_by,
)
from automodel_ckpt.parallel.ranks.agree import raise_on_all_ranks

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.state.quantized_tensors import QuantizedFiles, QuantizedTensor

log = logging.getLogger("automodel_ckpt")


class NotDeferrable(Exception):
    """The reason why each rank has to build the complete model."""


def layout_in_files(model: nn.Module, directory: Path | None) -> StoredLayout:
    """How Hugging Face files store the tensors of *model*, which is not sharded yet. *directory* has the files of a
    pretrained model."""
    found = names_in_files(model, directory)
    if not _has_mtp(model):
        return StoredLayout(names=found.names, rows=found.parts)
    from automodel_ckpt.models.loss.mtp import copies_in_files, with_mtp_names

    in_base = frozenset(tensor_names_in(directory)) if directory is not None else frozenset()
    found = with_mtp_names(model, found, in_base)
    copies: TextDict = {}
    for name, stored in copies_in_files(model, found.names).items():
        if name in in_base:
            copies[name] = stored
    return StoredLayout(names=found.names, rows=found.parts, copies=copies)


def _has_mtp(model: nn.Module) -> bool:
    """Whether *model* has layers for multi-token prediction. Their module is not imported for this check."""
    return "mtp" in model._modules


def types_in_files(model: nn.Module, directory: Path) -> dict[str, torch.dtype]:
    """{FQN: type} of the parameters of *model* that the safetensors files in *directory* contain in one type.

    The layout of *model* is recorded (``set_stored_layout``).
    """
    layout, stored = stored_layout(model), tensor_types_in(directory)
    types: dict[str, torch.dtype] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        parts = layout.rows.get(name) or [layout.name_of(name)]
        codes = {stored.get(part, "") for part in parts}
        if len(codes) == 1 and codes <= DTYPES.keys():
            types[name] = DTYPES[codes.pop()]
    return types


class PretrainedFiles:
    """The files of a pretrained model. Their tensors match the tensors of *model* one to one.

    Tensors of the vocabulary may have another number of rows. Raises :class:`NotDeferrable` for other differences.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        config: PreTrainedConfig,
        section: ModelConfig,
        *,
        new_mtp: bool = False,
        allow_new_head: bool = False,
    ) -> None:
        """*new_mtp*: the layers for multi-token prediction keep their initial values. *allow_new_head*: so does the
        head of a classification model that the files lack."""
        dtype, self._new_rows = section.dtype, section.new_tokens
        self._allow_new_head = allow_new_head
        self._drawn_in_head: Sequence[str] = ()
        self._name, self._config, self._new_mtp = name, config, new_mtp
        directory = fetched_directory(os.path.expanduser(name), section.revision)
        if directory is None:
            raise NotDeferrable("its files cannot be fetched, or are no safetensors")
        if dtype == "auto" and not isinstance(config.dtype, torch.dtype):
            raise NotDeferrable("its configuration has no dtype")
        # model.dtype is the dtype of the first parameter, which may be one that the class creates in float32.
        keep_in_float32(model, fresh_dtype(config, dtype or "float32"))
        try:
            from automodel_ckpt.convert.open import open_base

            self._tensors: Tensors = open_base(directory).modules[MODEL]
        except (CheckpointUnusable, OSError, KeyError) as error:
            raise NotDeferrable(f"its files cannot be read in parts ({error})") from error
        quantized = self._find_quantized(config)
        self._quantized: Mapping[str, QuantizedTensor] = (
            {} if quantized is None else quantized.tensors
        )
        self._parts = frozenset() if quantized is None else quantized.parts
        self._layout = layout_in_files(model, directory)
        set_stored_layout(model, self._layout)
        self._new_layers: frozenset[str] = frozenset()
        if new_mtp:
            from automodel_ckpt.models.loss.mtp import is_of_mtp

            self._new_layers = frozenset(filter(is_of_mtp, model.state_dict(keep_vars=True)))
        self._fqns = {stored: fqn for fqn, stored in self._layout.names.items()}
        """The FQN of each tensor that has another name in the files, by that name."""
        self._verdict = self._compared(model)
        self._resized: dict[str, tuple[Shape, Shape]] = {}
        """The shapes in the files and in the model of each resized tensor, by FQN."""
        for name, shapes in self._verdict.resized.items():
            self._resized[self._fqns.get(name, name)] = shapes
        # from_pretrained would read this file; from_config does not.
        if (directory / "generation_config.json").is_file() and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(directory)

    @property
    def drawn(self) -> set[str]:
        """The tensors that start from the model's own initial values, at least in their new rows."""
        drawn = set(self._new_layers)
        for name in self._drawn_in_head:
            drawn.add(self._fqns.get(name, name))
        if self._new_rows == "init":
            drawn.update(self._resized)
        return drawn

    def _find_quantized(self, config: PreTrainedConfig) -> QuantizedFiles | None:
        settings = getattr(config, "quantization_config", None)
        if settings is None:
            return None
        from automodel_ckpt.checkpoint.state.quantized_tensors import (
            UnsupportedQuantization,
            find_quantized,
        )

        if not isinstance(settings, Mapping):
            settings = settings.to_dict()
        try:
            found = find_quantized(self._tensors.tensors, settings)
        except UnsupportedQuantization as error:
            raise NotDeferrable(str(error)) from error
        log.info(
            "%d quantized tensors (%s) are dequantized while they are read",
            len(found.tensors),
            settings.get("quant_method"),
        )
        return found

    def _compared(self, model: Any) -> Verdict:
        """Compare the tensors of the files with *model*'s tensors. Raises :class:`NotDeferrable` if they differ."""
        shapes, tied = module_shapes(model)
        in_files: dict[str, Shape] = {}
        for name, tensor in self._tensors.tensors.items():
            if name not in self._parts:
                in_files[name] = tensor.shape
        for name, quantized in self._quantized.items():
            in_files[name] = quantized.shape
        # Equal to the embedding and the output layer, which are read.
        for name in self._layout.copies:
            tied.pop(name, None)
            del in_files[name]
        if _has_mtp(model):
            self._compare_mtp(shapes, in_files)
        for name in self._ignored(model, set(in_files) - set(shapes)):
            del in_files[name]
        if set(tied) & set(in_files) and set(tied.values()) & set(in_files):
            raise NotDeferrable("its files contain tied tensors twice")
        verdict = compare(
            Names(shapes, tied),
            Names(in_files),
            prefix=model.base_model_prefix,
            resizable={self._layout.name_of(name) for name in vocabulary_names(model)},
        )
        if resized_quantized := set(verdict.resized) & set(self._quantized):
            raise NotDeferrable(f"quantized tensors are resized ({min(resized_quantized)})")
        if self._allow_new_head:
            verdict = self._without_heads(model, verdict)
        if different := verdict.lines(allowed=False):
            raise NotDeferrable(
                f"its files name other tensors ({different[0]}, {len(different)} in all)"
            )
        return verdict

    def _compare_mtp(self, shapes: dict[str, Shape], in_files: dict[str, Shape]) -> None:
        """Take new layers for multi-token prediction out of the comparison, or check that the files have all others."""
        from automodel_ckpt.models.loss.mtp import is_of_mtp

        names = {name for fqn, name in self._layout.names.items() if is_of_mtp(fqn)}
        for fqn, parts in self._layout.rows.items():
            names.update(parts if is_of_mtp(fqn) else ())
        if self._new_mtp:
            for name in names:
                del shapes[name]
                in_files.pop(name, None)
        elif missing := sorted(names - in_files.keys()):
            raise RecipeError(
                "the base has no weights of the layers for multi-token prediction",
                where="model.mtp.weights",
                value=f"{self._name} lacks {len(missing)} of {len(names)}, such as {missing[0]}",
                hint="set weights: new for random initial values, or remove model.mtp",
            )

    def _ignored(self, model: Any, names: Iterable[str]) -> list[str]:
        """Those of *names*, which the model lacks, that are not read. Logs those that it does not compute itself."""
        names = sorted(names)
        if not names:
            return []
        former = former_buffers(model, names)
        known = set(ignored_by(model, names)).difference(former)
        from automodel_ckpt.models.inspect.interface import other_parts_in_files
        from automodel_ckpt.models.loss.mtp_families import patterns_in_files

        globs = [*patterns_in_files(self._config), *other_parts_in_files(self._config)]
        ignored: list[str] = []
        for name in names:
            if name in known or any(fnmatchcase(name, glob) for glob in globs):
                ignored.append(name)
        if ignored:
            log.warning(
                "not trained and not exported, because transformers has no module for them: %s of the files "
                "(such as layers that predict further tokens): %s, ...",
                counted(len(ignored), "tensor"),
                ignored[0],
            )
        return [*ignored, *former]

    def _without_heads(self, model: Any, verdict: Verdict) -> Verdict:
        """Return *verdict* without the differences that another head explains, which are kept and logged."""
        from automodel_ckpt.models.task_head import head_differences

        head = head_differences(model, missing=verdict.missing, unexpected=verdict.unexpected)
        head.log(self._name)
        self._drawn_in_head = head.drawn
        return replace(
            verdict,
            missing=tuple(name for name in verdict.missing if name not in head.drawn),
            unexpected=tuple(name for name in verdict.unexpected if name not in head.ignored),
        )

    def fill(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        """Read the values of this rank's shards from the files.

        *modules* has, by name, the modules of the unsharded model that are left on this rank. Adapters may wrap them
        now.
        """
        model = unwrap(model)
        # The files belong to the base that the adapters are in.
        adapted: Any = getattr(model, "get_base_model", None)
        model = adapted() if adapted is not None else model
        # A model with adapters has an empty layout: its checkpoints contain no experts, but its base is read with them.
        present = _present_fqns(self._layout.rows, model, modules)
        rows = {fqn: self._layout.rows[former] for former, fqn in present.items()}
        layout = replace(stored_layout(model), rows=rows)
        for name, (in_files, in_model) in self._resized.items():
            log_resized(name, in_files, in_model, self._new_rows)
        fill_module(model, self._fillings(model, modules, layout), self._new_rows, layout)

    def _fillings(
        self, model: nn.Module, modules: Mapping[str, nn.Module], layout: StoredLayout
    ) -> dict[str, Filling]:
        """The stored tensors for the tensors of *model* that are left on this rank, by their names in *layout*."""
        owners_of_rows: TextDict = {}
        for fqn, parts in self._layout.rows.items():
            owners_of_rows.update(dict.fromkeys(parts, fqn))
        former_fqns: TextDict = {}
        for name in self._verdict.matches:
            former_fqns[name] = owners_of_rows.get(name, self._fqns.get(name, name))
        present = _present_fqns(former_fqns.values(), model, modules)
        fillings: dict[str, Filling] = {}
        for name, stored in self._verdict.matches.items():
            if former_fqns[name] not in present:
                continue
            fqn = present[former_fqns[name]]
            target = name if name in owners_of_rows else layout.name_of(fqn)
            is_resized = name in self._verdict.resized
            quantized = self._quantized.get(stored)
            parent, _, key = former_fqns[name].rpartition(".")
            # Layers with weights in 4 bits have this method.
            take = getattr(modules[parent], "fill_weight", None) if key == "weight" else None
            fillings[target] = Filling(self._tensors, stored, is_resized, quantized, take)
        return fillings


def _present_fqns(
    former_fqns: Iterable[str], model: nn.Module, modules: Mapping[str, nn.Module]
) -> TextDict:
    """{FQN in the model without adapters: FQN in *model*} of the tensors that are left on this rank.

    Adapters moved some modules into others, so that their names changed. *modules* have their former names.
    """
    names = {id(module): name for name, module in model.named_modules()}
    present: TextDict = {}
    for former in former_fqns:
        parent, _, key = former.rpartition(".")
        if parent not in modules:
            continue
        name = names[id(modules[parent])]
        present[former] = f"{name}.{key}" if name else key
    return present


def keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Give the parameters and buffers on the meta device that a model of type *dtype* keeps in float32 that type.

    ``from_pretrained`` does the same.
    """
    pattern = float32_pattern(model, dtype)
    if pattern is None:
        return
    for name, parameter in model.named_parameters():
        if pattern.search(name):
            # The parameter stays the same object, so that ties are kept.
            parameter.data = parameter.data.float()
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and pattern.search(f"{module_name}.{name}"):
                module._buffers[name] = buffer.float()


def verify_base(
    name: str,
    level: Level,
    ranks: RankLayout,
    group: ProcessGroup | None,
    revision: str | None = None,
) -> None:
    """Compare a base model that is an export with its manifest, before anything is read from it; other bases have none.

    *revision* is a branch, tag or commit of a Hub name. Called on all ranks, each of which reads its share. Raises
    :class:`CheckpointUnusable`, the same on all ranks.
    """
    with raise_on_all_ranks(group):
        directory = base_directory(name, revision)
        _verify_export(directory, level, rank=ranks.rank, num_ranks=ranks.world_size)


def verify_side_files(name: str, level: Level, revision: str | None = None) -> None:
    """Compare the small files of a directory that is an export (config, tokenizer, processor) with its manifest, before
    they are read. Every rank reads them all. Raises :class:`CheckpointUnusable`."""
    directory = None
    with contextlib.suppress(OSError, ValueError):  # no name of the Hub, which its reader reports
        directory = base_directory(name, revision)
    _verify_export(directory, level, are_weights_read=False)


def _verify_export(
    directory: Path | None, level: Level, *, are_weights_read: bool = True, **share: int
) -> None:
    export = find_export_manifest(directory, follow_links=True) if directory is not None else None
    if directory is None or export is None:
        return
    # Side files that training does not read may be missing from a copy.
    present = {file for file in export.files if (directory / file).exists()}
    if not are_weights_read:
        present = {file for file in present if not file.endswith(".safetensors")}
    if problems := export.problems(only=present, level=level, **share):
        raise CheckpointUnusable.all_of(problems)
