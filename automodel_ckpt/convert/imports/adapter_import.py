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

from automodel_ckpt.checkpoint.export.adapter_record import base_revision
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.model_files import ADAPTER_SIDE_FILES, read_files
from automodel_ckpt.checkpoint.sources.source import MODEL, Tensors
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.formats.torch.training_state import ModelParameter
from automodel_ckpt.convert.open import open_base
from automodel_ckpt.convert.targets.tensor_blocks import difference
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

_PREFIX = "base_model.model."
# Between the name of a module and those of its tensors, in a module that is trained in full.
_TRAINED = ".modules_to_save."
_UNTRAINED = ".original_module."
_ADAPTER_PARTS = (
    ".lora_A.",
    ".lora_B.",
    ".lora_embedding_A",
    ".lora_embedding_B",
    ".lora_magnitude_vector",
)
_BIASES = ("none", "all", "lora_only")
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


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The kind and the location of an adapter.

    *lora* has the fields of a recipe's ``peft`` section but ``target_modules``. *targets* are the full names of the
    layers with an adapter, among them the modules of ``target_parameters`` (fused experts). *rows* has the number of
    rows of each module whose weight is in the file, which an embedding that was resized has. *base* is the name of the
    base in the file: a directory or a name on the Hub, empty if the file has none. *revision* is its branch, tag or
    commit on the Hub; None: the main branch.
    """

    lora: Mapping[str, Any]
    targets: tuple[str, ...]
    rows: Mapping[str, int]
    task_type: str | None
    base: str
    revision: str | None


@dataclass(frozen=True, slots=True)
class AdapterModel:
    """A model with an adapter, as a recipe builds it.

    *parameters* are those that train, in the order of ``named_parameters()``. *shapes* has the tensors of the adapter's
    file by name. *base_names* maps the names that frozen tensors have in peft to their names in the base's files, of
    which a tied tensor has several. *files* are the side files of a checkpoint, by name. *base* is the directory of the
    base, and *section* the ``peft`` section of a recipe that continues from the adapter. *vocab_size* is that of the
    recipe's model, if the vocabulary of the base was resized.
    """

    parameters: tuple[ModelParameter, ...]
    shapes: Mapping[str, tuple[int, ...]]
    base_names: Callable[[], Mapping[str, Sequence[str]]]
    files: Mapping[str, bytes]
    base: Path
    section: Mapping[str, Any]
    vocab_size: int | None = None


AdapterBuilder = Callable[[AdapterSettings], AdapterModel]
"""Builds the model of an adapter. The command that imports passes it: building needs torch, transformers and peft.

It raises :class:`CheckpointUnusable` if the base is missing, or has no such layers, and :class:`RecipeError` if a
recipe cannot have the adapter.
"""


def adapter_model(directory: Path, weights: Tensors, build: AdapterBuilder) -> AdapterModel:
    """Return the model of the adapter in *directory*, whose file has the tensors *weights*.

    The file can have more tensors than the model's *shapes*: copies of the base's weights. Raises
    :class:`CheckpointUnusable` if the options are damaged, or a recipe has none of this kind, or if the tensors are not
    those of the adapter.
    """
    path = directory / layout.ADAPTER_MODEL
    tensors = _without_wrapped(path, weights)
    try:
        model = build(_read_settings(directory, tensors))
    except RecipeError as error:
        # Its hints are for the keys of a recipe, and the user has none.
        problem = error.problems[0]
        raise CheckpointUnusable(
            problem.what,
            where=str(directory / layout.ADAPTER_CONFIG),
            value=problem.value,
            hint=_MERGE,
        ) from error
    more = tensors.keys() - model.shapes.keys()
    if more:
        base_names = model.base_names()
        copies = sorted(more & base_names.keys())
        _check_copies(path, weights, copies, model.base, base_names)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in copies}
    _check_tensors(path, tensors, model)
    return replace(model, files={**model.files, **read_files(directory, ADAPTER_SIDE_FILES)})


def _without_wrapped(path: Path, weights: Tensors) -> dict[str, Tensor]:
    """Return the tensors without those that peft adds for modules trained in full, with ``save_embedding_layers``.

    These are the module of the base, which is not used, and a second copy of the trained one. Raises
    :class:`CheckpointUnusable` if the two copies differ.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in weights.tensors.items():
        other = name.replace(_TRAINED, ".")
        if _TRAINED in name and other in weights.tensors:
            if difference(weights.root, tensor, weights, [other]):
                what = "the adapter's file has two different copies of a module that was trained in full"
                raise _unusable(what, path, f"{name[:200]}, {other[:200]}")
        elif _UNTRAINED not in name:
            found[name] = tensor
    return found


def _check_copies(
    path: Path,
    weights: Tensors,
    copies: Iterable[str],
    base: Path,
    names: Mapping[str, Sequence[str]],
) -> None:
    """Raise :class:`CheckpointUnusable` unless the tensors *copies* equal those of the *base*.

    peft saves them beside adapters on an embedding or on the output layer, as ``<layer>.base_layer.weight``, and with
    ``save_embedding_layers`` (peft 0.21, ``get_peft_model_state_dict``). One that differs was resized or trained, so
    that the adapter does not belong to the base alone. *names* maps copies to names in the base's files, of which a
    tied tensor has several, and the files one or more.
    """
    stored = open_base(base).modules[MODEL]
    lines: list[str] = []
    for copy in copies:
        fault = difference(weights.root, weights.tensors[copy], stored, names[copy])
        if fault:
            lines.append(f"{copy[:200]}: {fault}")
    if lines:
        raise CheckpointUnusable(
            "the adapter's file has weights of the base that differ from the base",
            where=str(path),
            value=_listed(lines),
            hint=f"{base} is not the base that it was trained on: name that one with --base; or the weights were "
            "resized or trained with the adapter: merge them in your own code (load the adapter with peft, "
            "merge_and_unload, save_pretrained), and import the result",
        )


def _listed(lines: Sequence[str]) -> str:
    return "\n    " + "\n    ".join(lines[:_MAX_NAMED])


def _read_settings(directory: Path, tensors: Mapping[str, Tensor]) -> AdapterSettings:
    path = directory / layout.ADAPTER_CONFIG
    values = read_json(directory, layout.ADAPTER_CONFIG)
    if values is None:
        raise _unusable("the adapter has no description", path, "no such file")
    options = _Options(path, values)
    if values.get("peft_type") != "LORA":
        raise options.unsupported("peft_type", values.get("peft_type"))
    if values.get("init_lora_weights", True) not in _INITS:
        raise options.unsupported("init_lora_weights", values["init_lora_weights"])
    for name in unknown_options(values):
        raise options.unsupported(name, values[name])
    targets, others = _modules_of(tensors, path.with_name(layout.ADAPTER_MODEL))
    saved = tuple(options.names("modules_to_save"))
    dropout = values.get("lora_dropout", 0.0)
    base = values.get("base_model_name_or_path")
    for name, is_right in (
        ("lora_dropout", type(dropout) in (int, float) and 0 <= dropout < 1),
        ("bias", values.get("bias", "none") in _BIASES),
        ("task_type", isinstance(values.get("task_type"), str | None)),
        ("base_model_name_or_path", isinstance(base, str | None)),
    ):
        if not is_right:
            raise options.damaged(name, values[name])
    lora = {
        "r": options.whole("r", values.get("r")),
        "alpha": options.whole("lora_alpha", values.get("lora_alpha")),
        "rank_pattern": options.numbers("rank_pattern", targets),
        "alpha_pattern": options.numbers("alpha_pattern", targets),
        "dropout": float(dropout),
        "target_parameters": tuple(options.names("target_parameters")),
        "modules_to_save": tuple(name for name in others if saved and name.endswith(saved)),
        "bias": values.get("bias", "none"),
    }
    for name in ("use_dora", "use_rslora", "ensure_weight_tying"):
        lora[name] = bool(values.get(name))
    revision = base_revision(values, path)
    return AdapterSettings(
        lora, tuple(targets), _rows_in(tensors), values.get("task_type"), base or "", revision
    )


@dataclass(frozen=True, slots=True)
class _Options:
    """The content of adapter_config.json. Methods raise :class:`CheckpointUnusable` for damaged options."""

    path: Path
    values: Mapping[str, Any]

    def whole(self, option: str, value: Any) -> int:
        """Return a positive whole number."""
        # Some programs write lora_alpha as 16.0.
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not 0 < value <= _MAX_RANK:
            what = "an option of the adapter is not a positive whole number"
            raise _unusable(what, self.path, f"{option}: {value!r:.100}")
        return value

    def names(self, option: str) -> list[str]:
        """Return a list of names, each of which is usable as a pattern of the recipe's section."""
        names = self.values.get(option) or []
        if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names):
            raise self.damaged(option, names)
        for name in names:
            if _NAME.fullmatch(name) is None:
                raise self.unsupported(option, name)
        return names

    def numbers(self, option: str, targets: Sequence[str]) -> dict[str, int]:
        """Return the numbers that names of layers, or their ends, have; peft ignores those that match no layer.

        peft takes them as regular expressions, which can take forever to match.
        """
        patterns = self.values.get(option) or {}
        if not isinstance(patterns, dict):
            raise self.damaged(option, patterns)
        found: dict[str, int] = {}
        for pattern, value in patterns.items():
            text = f"{option}: {pattern[:100]!r}"
            number = self.whole(text, value)
            # This program writes ^ before full names.
            name = pattern.removeprefix("^")
            if _NAME.fullmatch(name) is None:
                raise CheckpointUnusable(
                    "a pattern of the adapter is not read: it is no name of a layer",
                    where=str(self.path),
                    value=text,
                    hint=f"replace it in the file by names of layers; or {_MERGE}",
                )
            if any(f".{target}".endswith(f".{name}") for target in targets):
                found[name] = number
        return found

    def unsupported(self, option: str, value: object) -> CheckpointUnusable:
        """Return the error for an option that the ``peft`` section does not have."""
        return CheckpointUnusable(
            "this kind of adapter cannot be imported, because a recipe has none like it",
            where=str(self.path),
            value=f"{option}: {value!r:.100}",
            hint=_MERGE,
        )

    def damaged(self, option: str, value: object) -> CheckpointUnusable:
        """Return the error for an option of the wrong type."""
        what = "an option of the adapter is damaged"
        return _unusable(what, self.path, f"{option}: {value!r:.100}")


def _rows_in(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for name, tensor in tensors.items():
        module = name.removeprefix(_PREFIX).removesuffix(".weight").removesuffix(".base_layer")
        if name.endswith(".weight") and len(tensor.shape) == 2:
            rows[module] = tensor.shape[0]
    return rows


def unknown_options(options: Mapping[str, Any]) -> list[str]:
    """The names of what is set in adapter_config.json and no recipe has, such as ``trainable_token_indices``."""
    return [name for name, value in options.items() if name not in _READ_OPTIONS and value]


def _modules_of(names: Iterable[str], path: Path) -> tuple[list[str], list[str]]:
    """Return the full names of the layers with an adapter, and of the other modules in the adapter's file."""
    targets: dict[str, None] = {}
    others: dict[str, None] = {}
    for name in names:
        if not name.startswith(_PREFIX) or _NAME.fullmatch(name) is None:
            what = "a tensor of the adapter does not have one of peft's names"
            raise _unusable(what, path, repr(name[:200]))
        inner = name.removeprefix(_PREFIX)
        parts = [part for part in _ADAPTER_PARTS if part in inner]
        if parts:
            targets[inner.partition(parts[0])[0]] = None
        else:
            others[inner.rpartition(".")[0]] = None
    return list(targets), list(others)


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], model: AdapterModel) -> None:
    """Raise :class:`CheckpointUnusable` unless the file has exactly the tensors of the model's adapter."""
    lines: list[str] = []
    for name in sorted({*tensors, *model.shapes}):
        stored = list(tensors[name].shape) if name in tensors else "missing"
        built = list(model.shapes[name]) if name in model.shapes else "no such tensor"
        if stored != built:
            lines.append(f"{name[:200]}: in the file {stored}, in the model {built}")
    if lines:
        raise CheckpointUnusable(
            "the adapter's tensors are not those of an adapter on this base",
            where=str(path),
            value=_listed(lines),
            hint="name the directory of the base that it was trained on with --base, or restore the file from "
            "another copy",
        )


def _unusable(what: str, path: Path, value: object) -> CheckpointUnusable:
    return CheckpointUnusable(
        what, where=str(path), value=value, hint="restore the file from another copy"
    )
