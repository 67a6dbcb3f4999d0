"""The model of an adapter for ``ckpt import``; torch, transformers and peft are imported when it is built."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from automodel_ckpt.checkpoint.files.type_aliases import Counts, ValueDict
from automodel_ckpt.errors import CheckpointUnusable, RecipeError, unusable

if TYPE_CHECKING:
    from automodel_ckpt.convert.imports.adapter_import import (
        AdapterBuilder,
        AdapterModel,
        AdapterSettings,
    )
    from automodel_ckpt.models.layers.lora import Lora

_MAX_NAMED = 5
_OPTIONS = (
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "dropout",
    "modules_to_save",
    "use_dora",
    "use_rslora",
    "bias",
)
# The layer of the base inside the module that replaces it.
_WRAPPED = ".base_layer"
_NOT_FOUND = "the base of the adapter was not found"
_HINT = "name the directory of the base that the adapter was trained on with --base"


def adapter_builder(base: str | None, run: Path) -> AdapterBuilder:
    """Return a function that builds the model of an adapter on the meta device, as a recipe builds it.

    *base* is the directory or the name of the base on the Hub, by default the name that the adapter states. The files
    of the base are read once for their digest, which each start of the *run* compares.
    """

    def build(settings: AdapterSettings) -> AdapterModel:
        return _build(settings, base or settings.base, run)

    return build


def _build(settings: AdapterSettings, base: str, run: Path) -> AdapterModel:
    from automodel_ckpt.checkpoint.saving.adapter_assets import peft_document
    from automodel_ckpt.checkpoint.sources.source import EXPECTED_TENSORS
    from automodel_ckpt.checkpoint.state.module_tensors import tensor_specs
    from automodel_ckpt.convert.formats.format import ModelParameter
    from automodel_ckpt.convert.imports.adapter_import import AdapterModel
    from automodel_ckpt.models.inspect.interface import num_embeddings
    from automodel_ckpt.models.inspect.signature import empty_model, parameters_of
    from automodel_ckpt.models.layers.adapter import add_adapters
    from automodel_ckpt.models.layers.adapter_layers import find_parameters
    from automodel_ckpt.models.layers.lora import Lora
    from automodel_ckpt.training.model.adapters import adapter_assets

    # Another base, given with --base, does not have the revisions of this one.
    revision = settings.revision if base == settings.base else None
    directory = _directory_of(base, revision)
    model = empty_model(directory, hint=_HINT)
    model.tie_weights()
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    targets = _layers(settings.targets, find_parameters(model, settings.lora["target_parameters"]))
    if missing := [
        name for name in (*targets, *settings.lora["modules_to_save"]) if name not in modules
    ]:
        _raise_missing(missing, settings.task_type, type(model).__name__, directory)
    lora = Lora(target_modules=targets, **settings.lora)
    num_base_rows = num_embeddings(model)
    vocab_size = _resize(model, settings.rows)
    adapted = add_adapters(model, lora, task_type=settings.task_type, num_base_rows=num_base_rows)
    assets = adapter_assets(
        adapted.model,
        adapted,
        base,
        revision=revision,
        run=run,
        preprocessor=None,
        reads_base=True,
    )
    # It belongs to the shards of a model, and the weights of an import are one file.
    files = {name: data for name, data in assets.files.items() if name != EXPECTED_TENSORS}
    shapes = {key: spec.shape for key, spec in tensor_specs(adapted.model).items()}
    trained = [ModelParameter(*listed) for listed in parameters_of(adapted.model)]
    is_tied = bool(model.all_tied_weights_keys)
    section = _section(lora, peft_document(adapted.peft_config)["target_modules"], is_tied=is_tied)
    return AdapterModel(tuple(trained), shapes, files, directory, section, vocab_size)


def _directory_of(base: str, revision: str | None) -> Path:
    """Return the directory of the *base*. Raises :class:`CheckpointUnusable`."""
    from automodel_ckpt.models.inspect.repository import base_directory

    directory = None
    try:
        directory = base_directory(base, revision) if base else None
    except (OSError, ValueError) as error:
        raise unusable(_NOT_FOUND, base, str(error)[:300], _HINT) from error
    if directory is None:
        raise unusable(_NOT_FOUND, base, "no such directory", _HINT)
    return directory


def _layers(targets: Iterable[str], parameters: Iterable[str]) -> list[str]:
    """Return the names in *targets*, except modules that have one of the adapted *parameters*."""
    with_parameters = {name.rpartition(".")[0] for name in parameters}
    # Each adapted parameter of a module wraps it once more.
    return [name for name in targets if name.replace(_WRAPPED, "") not in with_parameters]


def _resize(model: Any, rows: Counts) -> int | None:
    """Resize the vocabulary of *model* to the *rows* of its embedding, by module.

    Returns None when that is not necessary. Raises :class:`RecipeError` if only one of embedding and output layer is
    stored, and they are not tied: peft does not save the other one if it is not adapted.
    """
    from automodel_ckpt.models.inspect.interface import num_embeddings

    names = {id(module): name for name, module in model.named_modules()}
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    ends = [names[id(end)] for end in ends if id(end) in names]
    found = {rows[end] for end in ends if end in rows}
    if not found or found == {num_embeddings(model)}:
        return None
    lost = [end for end in ends if end not in rows]
    if len(found) > 1 or (lost and not model.all_tied_weights_keys):
        # The caller adds where the adapter is, and that it can be merged by the program that has it.
        raise RecipeError(
            "the vocabulary was resized, and the adapter's file does not have all weights of the new size",
            "model.vocab_size",
            ", ".join(f"{end}: {rows.get(end, 'not there')}" for end in ends),
            "",
        )
    (vocab_size,) = found
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    model.tie_weights()
    return vocab_size


def _section(lora: Lora, peft_targets: list[str] | str, *, is_tied: bool) -> ValueDict:
    """Return the ``peft`` section of a recipe with this adapter; *peft_targets* are suffixes of names, if possible.

    *is_tied*: the base has tied weights.
    """
    section: ValueDict = {"r": lora.r, "alpha": lora.alpha}
    targets = list(lora.target_modules)
    if isinstance(peft_targets, list):
        targets = peft_targets
    section["target_modules"] = targets
    default = type(lora)()
    for name in _OPTIONS:
        value = getattr(lora, name)
        if value != getattr(default, name):
            section[name] = value
    if is_tied and not lora.ensure_weight_tying:
        section["ensure_weight_tying"] = False
    return section


def _raise_missing(
    missing: list[str], task_type: str | None, model: str, directory: Path
) -> NoReturn:
    raise CheckpointUnusable(
        "the base has no such layers",
        directory,
        f"{', '.join(missing[:_MAX_NAMED])}; the base is a {model}, task_type of the adapter: {task_type}",
        "name the base that it was trained on with --base; layers of single experts, and those with the "
        "names of another version of transformers: merge it with the versions that saved it (merge_and_unload); "
        "an adapter on a base with another head: start a run with its weights (recipe: sequence_classification or "
        "embedding, a section peft like its config, init_from.path: the adapter)",
    )
