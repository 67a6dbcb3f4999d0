"""An adapter of another program as a checkpoint of this program. Imports no torch.

``adapter_config.json`` (peft 0.21, ``LoraConfig``) states the kind of an adapter, and the names in
``adapter_model.safetensors`` state where it is: ``base_model.model.<layer>.lora_A.weight``. Only options that a
recipe's ``peft`` section has are accepted. peft itself never reads the file: it imports modules that the file names
(``megatron_core``), and evaluates its regular expressions, which can take forever.

The command that imports builds the model with these settings, without memory, because the base and its layers decide
the names and the order of the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import some_of
from automodel_ckpt.checkpoint.export.base_identity import base_revision
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Counts, Files, Shape, Strings, Values
from automodel_ckpt.checkpoint.parts.slices import TensorMap
from automodel_ckpt.checkpoint.sources.model_files import ADAPTER_SIDE_FILES, read_files
from automodel_ckpt.checkpoint.sources.source import MODEL, Tensors
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.formats.format import ModelParameter
from automodel_ckpt.convert.open import open_base
from automodel_ckpt.convert.targets.tensor_blocks import is_copy
from automodel_ckpt.errors import CheckpointUnusable, RecipeError, unusable

_PREFIX = "base_model.model."
# What peft saves of modules besides their adapters: a module that is trained in full, as a second copy, and the one of
# the base, which is not used.
_TRAINED = ".modules_to_save."
_UNTRAINED = ".original_module."
_ADAPTER_PARTS = (
    ".lora_A.",
    ".lora_B.",
    ".lora_embedding_A",
    ".lora_embedding_B",
    ".lora_magnitude_vector",
)
_NAME = re.compile(r"[A-Za-z0-9_.]+", re.ASCII)
_MAX_RANK = 1 << 16
_MAX_NAMED = 5
_MERGE = (
    "merge it into its base with peft (merge_and_unload), and import the result; an adapter that is no change of the "
    "base's weights, such as a prefix, can only be continued with peft"
)
# Options with any value: a recipe has them, or they do not affect the function that the adapter computes.
_READ_OPTIONS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_dora",
        "use_rslora",
    }
)
# Other ways of drawing an adapter (such as pissa) also change the weights of the base.
_INITS = (True, False, "gaussian", "orthogonal")


@dataclass(frozen=True)
class AdapterSettings:
    """The kind and the location of an adapter.

    *lora* has the fields of a recipe's ``peft`` section but ``target_modules``. *targets* are the full names of the
    layers with an adapter, among them the modules of ``target_parameters`` (fused experts). *rows* has the number of
    rows of each module with its weight in the file, as a resized embedding has. *base* is the name of the base in the
    file: a directory or a name on the Hub, empty if the file has none. *revision* is its branch, tag or commit on the
    Hub. None: the main branch.
    """

    lora: Values
    targets: Strings
    rows: Counts
    task_type: str | None
    base: str
    revision: str | None


@dataclass(frozen=True)
class AdapterModel:
    """A model with an adapter, as a recipe builds it.

    *parameters* are the trained ones, in the order of ``named_parameters()``. *shapes* has the tensors of the adapter's
    file by name. *files* are the side files of a checkpoint, by name. *base* is the directory of the base, and
    *section* the ``peft`` section of a recipe that continues from the adapter. *vocab_size* is the vocabulary size
    of the recipe's model, if the vocabulary of the base was resized.
    """

    parameters: tuple[ModelParameter, ...]
    shapes: Mapping[str, Shape]
    files: Files
    base: Path
    section: Values
    vocab_size: int | None = None


AdapterBuilder = Callable[[AdapterSettings], AdapterModel]
"""Builds the model of an adapter. The command that imports passes it: building needs torch, transformers and peft.

It raises :class:`CheckpointUnusable` if the base is missing, or has no such layers, and :class:`RecipeError` if a
recipe cannot have the adapter.
"""


def adapter_model(directory: Path, weights: Tensors, build: AdapterBuilder) -> AdapterModel:
    """Return the model of the adapter in *directory*. Its file has the tensors *weights*.

    The file can also have the weights of adapted embeddings and output layers, as peft saves them. Raises
    :class:`CheckpointUnusable` if the options are damaged, or a recipe has none of this kind, or if the tensors do not
    match the adapter.
    """
    path = directory / layout.ADAPTER_MODEL
    tensors = {}
    for name, tensor in weights.tensors.items():
        other = name.replace(_TRAINED, ".")
        if other == name and _UNTRAINED not in name:
            tensors[name] = tensor
        elif other != name and (
            other not in weights.tensors
            or not is_copy(weights.root, tensor, weights.root, weights.tensors[other])
        ):
            raise unusable(
                "a module that was trained in full differs from its second copy, or has only one",
                path,
                name[:200],
            )
    try:
        model = build(_read_settings(directory, tensors))
    except RecipeError as error:
        # Its hints are for the keys of a recipe, and the user has none.
        problem = error.problems[0]
        where = directory / layout.ADAPTER_CONFIG
        raise unusable(problem.what, where, problem.value, _MERGE) from error
    more = tensors.keys() - model.shapes.keys()
    of_base = [name for name in more if name.endswith(".base_layer.weight")]
    _check_copies(path, weights, of_base, model.base)
    lines = []
    for name in sorted({*tensors, *model.shapes} - {*of_base}):
        stored = list(tensors[name].shape) if name in tensors else "missing"
        built = list(model.shapes[name]) if name in model.shapes else "no such tensor"
        if stored != built:
            lines.append(f"{name[:200]}: in the file {stored}, in the model {built}")
    if lines:
        raise unusable(
            "the adapter's tensors are not those of an adapter on this base",
            path,
            some_of(lines, _MAX_NAMED),
            "name the directory of the base that it was trained on with --base; if the file has embeddings, save the "
            "adapter again with save_embedding_layers=False",
        )
    return replace(model, files={**model.files, **read_files(directory, ADAPTER_SIDE_FILES)})


def _check_copies(path: Path, weights: Tensors, copies: Sequence[str], base: Path) -> None:
    """Raise :class:`CheckpointUnusable` unless each of the *copies* equals a tensor of the base with its shape.

    peft saves them with adapters on an embedding or an output layer. One that differs was resized or trained.
    """
    stored = open_base(base).modules[MODEL] if copies else None
    for name in copies:
        assert stored is not None
        copy = weights.tensors[name]
        alike = [other for other, tensor in stored.tensors.items() if tensor.shape == copy.shape]
        if not any(
            is_copy(weights.root, copy, stored.root, stored.tensors[each]) for each in alike
        ):
            raise unusable(
                "the adapter's file has weights of the base that differ from the base",
                path,
                name[:200],
                f"{base} is not the base that it was trained on: name that one with --base; or they were resized or "
                f"trained: {_MERGE}",
            )


def _read_settings(directory: Path, tensors: TensorMap) -> AdapterSettings:
    path = directory / layout.ADAPTER_CONFIG
    values = read_json(directory, layout.ADAPTER_CONFIG)
    if values is None:
        raise unusable("the adapter has no description", path, "no such file")
    dropout = values.get("lora_dropout", 0.0)
    usable = {
        "peft_type": values.get("peft_type") == "LORA",
        "init_lora_weights": values.get("init_lora_weights", True) in _INITS,
        "lora_dropout": type(dropout) in (int, float) and 0 <= dropout < 1,
        "bias": values.get("bias", "none") in ("none", "all", "lora_only"),
        "task_type": isinstance(values.get("task_type"), str | None),
        "base_model_name_or_path": isinstance(values.get("base_model_name_or_path"), str | None),
        **dict.fromkeys(unknown_options(values), False),
    }
    for name, is_usable in usable.items():
        if not is_usable:
            raise _unsupported(path, name, values.get(name))
    targets, others = _modules_of(tensors, path.with_name(layout.ADAPTER_MODEL))
    saved = tuple(_names(path, values, "modules_to_save"))
    lora = {
        "r": _rank(path, "r", values.get("r")),
        "alpha": _rank(path, "lora_alpha", values.get("lora_alpha")),
        "rank_pattern": _ranks(path, values, "rank_pattern", targets),
        "alpha_pattern": _ranks(path, values, "alpha_pattern", targets),
        "dropout": float(dropout),
        "target_parameters": tuple(_names(path, values, "target_parameters")),
        "modules_to_save": tuple(name for name in others if saved and name.endswith(saved)),
        "bias": values.get("bias", "none"),
        "use_dora": bool(values.get("use_dora")),
        "use_rslora": bool(values.get("use_rslora")),
        "ensure_weight_tying": bool(values.get("ensure_weight_tying")),
    }
    rows = {}
    for name, tensor in tensors.items():
        module = name.removeprefix(_PREFIX).removesuffix(".weight").removesuffix(".base_layer")
        if name.endswith(".weight") and len(tensor.shape) == 2:
            rows[module] = tensor.shape[0]
    base = values.get("base_model_name_or_path") or ""
    revision = base_revision(values, path)
    return AdapterSettings(lora, tuple(targets), rows, values.get("task_type"), base, revision)


def unknown_options(options: Values) -> list[str]:
    """The names of what is set in adapter_config.json and no recipe has, such as ``trainable_token_indices``."""
    return [name for name, value in options.items() if name not in _READ_OPTIONS and value]


def _modules_of(names: Iterable[str], path: Path) -> tuple[list[str], list[str]]:
    """Return the full names of the layers with an adapter, and of the other modules in the adapter's file."""
    targets: dict[str, None] = {}
    others: dict[str, None] = {}
    for name in names:
        if not name.startswith(_PREFIX) or _NAME.fullmatch(name) is None:
            raise unusable(
                "a tensor of the adapter does not have one of peft's names", path, repr(name[:200])
            )
        inner = name.removeprefix(_PREFIX)
        parts = [part for part in _ADAPTER_PARTS if part in inner]
        if parts:
            targets[inner.partition(parts[0])[0]] = None
        else:
            others[inner.rpartition(".")[0]] = None
    return list(targets), list(others)


# ---------------------------------------------------------------- options


def _rank(path: Path, option: str, value: Any) -> int:
    """Return a positive whole number. Some programs write lora_alpha as 16.0."""
    if type(value) not in (int, float) or not 0 < value <= _MAX_RANK or value != int(value):
        raise _unsupported(path, option, value)
    return int(value)


def _names(path: Path, values: Values, option: str) -> list[str]:
    """Return a list of names, each of which is usable as a pattern of the recipe's section."""
    names = values.get(option) or []
    is_list = isinstance(names, list) and all(isinstance(each, str) for each in names)
    if not is_list or not all(map(_NAME.fullmatch, names)):
        raise _unsupported(path, option, names)
    return list(names)


def _ranks(path: Path, values: Values, option: str, targets: Sequence[str]) -> dict[str, int]:
    """Return the numbers that names of layers, or their ends, have; peft ignores those that match no layer."""
    patterns = values.get(option) or {}
    if not isinstance(patterns, dict):
        raise _unsupported(path, option, patterns)
    found = {}
    for pattern, value in patterns.items():
        number = _rank(path, option, value)
        # This program writes ^ before full names.
        name = pattern.removeprefix("^")
        if _NAME.fullmatch(name) is None:
            # peft takes it as a regular expression, which can take forever to match.
            raise _unsupported(path, option, f"{pattern} is no name of a layer")
        if any(f".{target}".endswith(f".{name}") for target in targets):
            found[name] = number
    return found


def _unsupported(path: Path, option: str, value: object) -> CheckpointUnusable:
    what = (
        "an option of the adapter cannot be imported: a recipe has none like it, or it is damaged"
    )
    return unusable(what, path, f"{option}: {value!r:.100}", _MERGE)
