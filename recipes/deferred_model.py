"""A model before it is sharded: on the meta device where possible, with a function that fills this rank's shards."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import GenerationConfig, PreTrainedConfig

from automodel_ckpt.checkpoint.module_tensors import (
    StoredLayout,
    set_stored_layout,
    stored_layout,
    unwrap,
)
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.state.fill_modules import Filling, fill_module, module_shapes
from automodel_ckpt.checkpoint.state.quantized_tensors import (
    QuantizedFiles,
    UnsupportedQuantization,
    find_quantized,
)
from automodel_ckpt.config.schema import ModelConfig
from automodel_ckpt.convert.open import open_weights
from automodel_ckpt.distributed.agree import gather_objects, raise_on_all_ranks
from automodel_ckpt.distributed.parallelize import Materialise
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.models.build import build_model, fetched_directory, fresh_dtype, uses_code
from automodel_ckpt.models.hf_names import names_in_files, tensor_names_in
from automodel_ckpt.models.meta_init import (
    InitialValues,
    allocate,
    initialise,
    is_transient,
    on_meta,
)
from automodel_ckpt.models.mtp import add_mtp, copies_in_files, is_of_mtp, mtp_of, with_mtp_names
from automodel_ckpt.models.mtp_families import MtpPlan, patterns_in_files
from automodel_ckpt.models.repository import importing_code
from automodel_ckpt.models.task_head import HeadDifferences, head_differences
from automodel_ckpt.models.vocabulary import log_resized, set_size, vocabulary_names
from automodel_ckpt.models.weight_matching import Names, Verdict, compare
from automodel_ckpt.recipes.init_from import MODEL
from automodel_ckpt.recipes.mtp_files import check_mtp_complete, fill_mtp, mtp_names
from automodel_ckpt.recipes.repository import repository_options
from automodel_ckpt.units import counted

log = logging.getLogger("automodel_ckpt")

_CANNOT_BUILD = (
    ValueError,
    ImportError,
    RuntimeError,
    AttributeError,
    TypeError,
    KeyError,
    NotImplementedError,
    AssertionError,
)
"""What transformers' and torch's constructors raise; AssertionError: a padding token beyond a smaller vocabulary."""


@dataclass(frozen=True, slots=True)
class DeferredModel:
    """A model on the meta device, and the function that fills what is left of it on this rank after sharding.

    If *materialise* is None, the model has its values, which are the same on all ranks.
    """

    model: nn.Module
    materialise: Materialise | None = None


class NotDeferrable(Exception):
    """The reason why each rank has to build the complete model."""


def build_deferred(
    section: ModelConfig,
    config: PreTrainedConfig,
    *,
    base: str | None,
    auto_class: Any,
    seed: int,
    group: ProcessGroup | None,
    vocab_size: int | None = None,
    needs_values: str = "",
    loading: Mapping[str, Any] | None = None,
    mtp: MtpPlan | None = None,
    allow_new_head: bool = False,
) -> DeferredModel:
    """Build the model that a recipe's *section* describes. A collective; all ranks return the same kind of model.

    *base* is the directory or Hub name of the weights: ``from_pretrained`` of the section, or ``peft.base_dir``; None:
    fresh weights.
    A pretrained model has an embedding of *vocab_size* rows; None: as many as its files have. Each rank builds the
    complete model, with the number of rows of the files, if shards of it cannot be filled separately: if the files have
    other names than the model's tensors, or because of *needs_values* (a reason) or *loading* (further arguments of
    ``from_pretrained``). The reason is logged. The model gets the layers of *mtp* (None: none). With *allow_new_head*,
    the head of a classification model gets random values where the files lack it. Raises
    :class:`RecipeError` as :func:`~automodel_ckpt.models.build.build_model` does, and for a base without these layers.
    """
    deferred, reason = None, ""
    try:
        if needs_values or loading:
            raise NotDeferrable(needs_values or "its weights are changed while they are read")
        resized = _resized(config, vocab_size)
        deferred = _on_meta(
            section, base, resized, auto_class, seed, group, mtp, allow_new_head=allow_new_head
        )
    except NotDeferrable as error:
        reason = str(error)
    # If one rank cannot read the files (another cache), all ranks build the complete model.
    reasons = gather_objects(group, reason)
    if deferred is not None and not any(reasons):
        return deferred
    if len(reasons) > 1:
        log.info("each rank builds the complete model first: %s", next(filter(None, reasons)))
    complete = _complete(
        section, base, config, auto_class, loading, mtp, allow_new_head=allow_new_head
    )
    return DeferredModel(complete)


def _resized(config: PreTrainedConfig, vocab_size: int | None) -> PreTrainedConfig:
    resized = copy.deepcopy(config)
    if vocab_size is not None:
        set_size(resized, vocab_size)
    return resized


def _complete(
    section: ModelConfig,
    base: str | None,
    config: PreTrainedConfig,
    auto_class: Any,
    loading: Mapping[str, Any] | None,
    mtp: MtpPlan | None,
    *,
    allow_new_head: bool,
) -> nn.Module:
    model = build_model(
        config,
        auto_class=auto_class,
        from_pretrained=base,
        dtype=section.dtype or "float32",
        attn_implementation=section.attn_implementation,
        allow_missing=section.allow_missing,
        allow_unexpected=section.allow_unexpected,
        loading=loading,
        repository=repository_options(section),
        not_in_model=patterns_in_files(config),
        allow_new_head=allow_new_head,
    )
    if mtp is not None:
        add_mtp(model, mtp)
        if base is not None and not mtp.is_new:
            directory = fetched_directory(os.path.expanduser(base), section.revision)
            # The names of *model* cannot be used: transformers drops its renaming rules when it dequantizes.
            skeleton = on_meta(lambda: _made(_not_quantized(config), auto_class, {}, mtp))
            fill_mtp(model, directory, layout_in_files(skeleton, directory), base)
    return model


def _not_quantized(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of *config* without the settings of quantized files."""
    ordinary = copy.deepcopy(config)
    if hasattr(ordinary, "quantization_config"):
        del ordinary.quantization_config
    return ordinary


def _made(
    config: PreTrainedConfig,
    auto_class: Any,
    options: Mapping[str, Any],
    mtp: MtpPlan | None,
) -> Any:
    """A model of *config* with the initial values of its class."""
    # transformers' from_config changes the config that it gets.
    model = auto_class.from_config(copy.deepcopy(config), **options)
    if mtp is not None:
        add_mtp(model, mtp)
    return model


def _on_meta(
    section: ModelConfig,
    base: str | None,
    config: PreTrainedConfig,
    auto_class: Any,
    seed: int,
    group: ProcessGroup | None,
    mtp: MtpPlan | None,
    *,
    allow_new_head: bool,
) -> DeferredModel:
    options: dict[str, Any] = {
        "dtype": fresh_dtype(config, section.dtype or "float32"),
        "trust_remote_code": uses_code(config, auto_class, repository_options(section)),
    }
    if section.attn_implementation is not None:
        options["attn_implementation"] = section.attn_implementation

    # Files that can be read in parts are dequantized while they are read.
    ordinary = config if base is None else _not_quantized(config)

    def build() -> Any:
        with importing_code(options["trust_remote_code"]):
            return on_meta(lambda: _made(ordinary, auto_class, options, mtp))

    try:
        # Built twice: InitialValues needs one that nothing else changes, and the model is
        # resized, adapted and sharded in place.
        model, values = build(), InitialValues(build(), seed)
        if not values.are_complete():
            raise NotDeferrable(
                f"{type(model).__name__} has values that only its constructor knows"
            )
    except _CANNOT_BUILD as error:
        raise NotDeferrable(
            f"it cannot be built without memory ({type(error).__name__}: {error})"
        ) from error
    source = None
    if base is not None:
        has_new_mtp = mtp is not None and mtp.is_new
        source = _Source(
            base, model, config, section, new_mtp=has_new_mtp, allow_new_head=allow_new_head
        )
    return DeferredModel(model.train(), _materialiser(model, values, source, group))


def _materialiser(
    model: nn.Module, values: InitialValues, source: _Source | None, group: ProcessGroup | None
) -> Materialise:
    # Names before adapters change them: each module's random stream is seeded by its name.
    modules = dict(model.named_modules())
    transient = {
        name: {key for key in module._buffers if is_transient(module, key)}
        for name, module in modules.items()
    }

    def wanted(name: str, module: nn.Module) -> Callable[[str], bool]:
        if source is None:
            return lambda key: True
        return lambda key: key in transient[name] or f"{name}.{key}" in source.drawn

    def materialise(shared: nn.Module, device: torch.device) -> None:
        allocate(shared, device)
        # A pipeline stage has lost the modules of the other stages.
        here = set(shared.modules())
        left = {name: module for name, module in modules.items() if module in here}
        initialise(left, values, wanted)
        if source is not None:
            # A node reads its own copy of the files, which may be damaged or missing there only.
            with raise_on_all_ranks(group):
                source.fill(shared, left)

    return materialise


def _ignored_names(model: Any, names: Iterable[str], globs: Iterable[str]) -> list[str]:
    """Those of *names*, which the model lacks, that ``from_pretrained`` or *globs* ignore (such as heads for several
    tokens)."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored: list[str] = []
    for name in sorted(names):
        by_pattern = any(re.search(pattern, name) for pattern in patterns)
        if by_pattern or any(fnmatchcase(name, glob) for glob in globs):
            ignored.append(name)
    return ignored


def keep_buffers_in_float32(model: Any) -> None:
    """Give the buffers on the meta device that the model keeps in float32 that dtype, as ``from_pretrained`` does.

    Raises :class:`NotDeferrable` if it keeps parameters in float32 beside others: fsdp2 cannot shard these together.
    """
    kept: set[str] = set()
    if model.dtype in (torch.float16, torch.bfloat16):
        kept |= set(model._keep_in_fp32_modules_strict or ())
    if model.dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    patterns = [re.compile(re.escape(name).replace(r"\*", ".*")) for name in kept]

    def is_kept(name: str) -> bool:
        return any(pattern.search(name) for pattern in patterns)

    if any(is_kept(name) for name, _ in model.named_parameters()):
        raise NotDeferrable("parts of it stay in float32")
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and is_kept(f"{module_name}.{name}"):
                module._buffers[name] = buffer.float()


def layout_in_files(model: nn.Module, directory: Path | None) -> StoredLayout:
    """How Hugging Face files store the tensors of *model*, which is not sharded yet; *directory* has the files of a
    pretrained model."""
    found = names_in_files(model, directory)
    if mtp_of(model) is None:
        return StoredLayout(names=found.names, rows=found.parts)
    in_base = frozenset(tensor_names_in(directory)) if directory is not None else frozenset()
    found = with_mtp_names(model, found, in_base)
    copies: dict[str, str] = {}
    for name, stored in copies_in_files(model, found.names).items():
        if name in in_base:
            copies[name] = stored
    return StoredLayout(names=found.names, rows=found.parts, copies=copies)


class _Source:
    """The files of a pretrained model, whose tensors are those of *model* one to one: :class:`NotDeferrable` if not.

    Those of the vocabulary may have another number of rows.
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
        self._head = HeadDifferences((), ())
        self._name, self._config, self._new_mtp = name, config, new_mtp
        directory = fetched_directory(os.path.expanduser(name), section.revision)
        if directory is None:
            raise NotDeferrable("its files cannot be fetched, or are no safetensors")
        if dtype == "auto" and not isinstance(config.dtype, torch.dtype):
            raise NotDeferrable("its configuration has no dtype")
        keep_buffers_in_float32(model)
        try:
            self._tensors: Tensors = open_weights(directory).modules[MODEL]
        except (CheckpointUnusable, OSError, KeyError) as error:
            raise NotDeferrable(f"its files cannot be read in parts ({error})") from error
        self._quantized = self._find_quantized(config)
        self._layout = layout_in_files(model, directory)
        set_stored_layout(model, self._layout)
        self._new_layers: frozenset[str] = frozenset()
        if new_mtp:
            self._new_layers = frozenset(filter(is_of_mtp, model.state_dict(keep_vars=True)))
        self._verdict = self._compared(model)
        fqns = {stored: fqn for fqn, stored in self._layout.names.items()}
        self._resized = {
            fqns.get(name, name): shapes for name, shapes in self._verdict.resized.items()
        }
        # from_pretrained would read this file; from_config does not.
        if (directory / "generation_config.json").is_file() and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(directory)

    @property
    def drawn(self) -> set[str]:
        """The tensors that start from the model's own initial values, or whose new rows do."""
        fqns = {stored: fqn for fqn, stored in self._layout.names.items()}
        drawn = {*self._new_layers, *(fqns.get(name, name) for name in self._head.drawn)}
        if self._new_rows == "init":
            drawn.update(self._resized)
        return drawn

    def _find_quantized(self, config: PreTrainedConfig) -> QuantizedFiles:
        settings = getattr(config, "quantization_config", None)
        if settings is None:
            return QuantizedFiles({}, frozenset())
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
        shapes, tied = module_shapes(model)
        there: dict[str, tuple[int, ...]] = {}
        for fqn, tensor in self._tensors.tensors.items():
            if fqn not in self._quantized.parts:
                there[fqn] = tensor.shape
        there |= {name: found.shape for name, found in self._quantized.tensors.items()}
        # Equal to the embedding and the output layer, which are read.
        for name in self._layout.copies:
            tied.pop(name, None)
            del there[name]
        if self._new_mtp:
            for name in mtp_names(self._layout):
                del shapes[name]
                there.pop(name, None)
        else:
            check_mtp_complete(mtp_names(self._layout), there, self._name)
        ignored = _ignored_names(model, set(there) - set(shapes), patterns_in_files(self._config))
        if ignored:
            log.warning(
                "not trained and not exported, because transformers has no module for them: %s of the files "
                "(such as layers that predict further tokens): %s, ...",
                counted(len(ignored), "tensor"),
                ignored[0],
            )
        for name in ignored:
            del there[name]
        if set(tied) & set(there) and set(tied.values()) & set(there):
            raise NotDeferrable("its files contain tied tensors twice")
        resizable = {self._layout.name_of(name) for name in vocabulary_names(model)}
        verdict = compare(
            Names(shapes, tied), Names(there), prefix=model.base_model_prefix, resizable=resizable
        )
        if resized_quantized := set(verdict.resized) & set(self._quantized.tensors):
            raise NotDeferrable(f"quantized tensors are resized ({min(resized_quantized)})")
        if self._allow_new_head:
            verdict = self._without_heads(model, verdict)
        if different := verdict.lines(allowed=False):
            raise NotDeferrable(
                f"its files name other tensors ({different[0]}, {len(different)} in all)"
            )
        return verdict

    def _without_heads(self, model: Any, verdict: Verdict) -> Verdict:
        """Return *verdict* without the differences that another head explains, which are kept and logged."""
        self._head = head_differences(model, missing=verdict.missing, unexpected=verdict.unexpected)
        self._head.log(self._name)
        missing = [name for name in verdict.missing if name not in self._head.drawn]
        unexpected = [name for name in verdict.unexpected if name not in self._head.ignored]
        return replace(verdict, missing=tuple(missing), unexpected=tuple(unexpected))

    def fill(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        """Read the values of this rank's shards from the files.

        *modules* are those of the unsharded model, by name, that are left on this rank; adapters may wrap them now.
        """
        model = unwrap(model)
        # The files are those of the base that the adapters are in.
        adapted: Any = getattr(model, "get_base_model", None)
        model = adapted() if adapted is not None else model
        # A model with adapters has an empty layout: its checkpoints contain no experts, but its base is read with them.
        present = _present_fqns(self._layout.rows, model, modules)
        rows = {fqn: self._layout.rows[former] for former, fqn in present.items()}
        layout = replace(stored_layout(model), rows=rows)
        for name, (there, here) in self._resized.items():
            log_resized(name, there, here, self._new_rows)
        fill_module(model, self._fillings(model, modules, layout), self._new_rows, layout)

    def _fillings(
        self, model: nn.Module, modules: Mapping[str, nn.Module], layout: StoredLayout
    ) -> dict[str, Filling]:
        """The stored tensors for the tensors of *model* that are left on this rank, by their names in *layout*."""
        fqns = {stored: fqn for fqn, stored in self._layout.names.items()}
        owners_of_rows: dict[str, str] = {}
        for fqn, parts in self._layout.rows.items():
            owners_of_rows.update(dict.fromkeys(parts, fqn))
        former_fqns: dict[str, str] = {}
        for name in self._verdict.matches:
            former_fqns[name] = owners_of_rows.get(name, fqns.get(name, name))
        present = _present_fqns(former_fqns.values(), model, modules)
        fillings: dict[str, Filling] = {}
        for name, stored in self._verdict.matches.items():
            if former_fqns[name] not in present:
                continue
            fqn = present[former_fqns[name]]
            target = name if name in owners_of_rows else layout.name_of(fqn)
            is_resized = name in self._verdict.resized
            quantized = self._quantized.tensors.get(stored)
            fillings[target] = Filling(self._tensors, stored, is_resized, quantized)
        return fillings


def _present_fqns(
    former_fqns: Iterable[str], model: nn.Module, modules: Mapping[str, nn.Module]
) -> dict[str, str]:
    """{FQN in the model without adapters: FQN in *model*} of the tensors that are left on this rank.

    Adapters moved some modules into others, so that their names changed. *modules* have their former names.
    """
    names = {id(module): name for name, module in model.named_modules()}
    present: dict[str, str] = {}
    for former in former_fqns:
        parent, _, key = former.rpartition(".")
        if parent not in modules:
            continue
        name = names[id(modules[parent])]
        present[former] = f"{name}.{key}" if name else key
    return present
