"""``ckpt import``: plan a checkpoint from what another program saved. Imports no torch.

Sources are what ``init_from`` reads (``convert/open.py``): files and directories in any format of
``sources/registry.py``. The training state is imported if the user asks for it and its format is known. Everything that
is not imported is reported. ``new_checkpoint.py`` writes the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.files import agreeing_config
from automodel_ckpt.checkpoint.export.plan import Plan, make_plan
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.sources.opening import MODEL
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.convert.formats.peft_adapter import has_adapter
from automodel_ckpt.convert.formats.registry import detect
from automodel_ckpt.convert.formats.torch.training_state import Parameters
from automodel_ckpt.convert.imports.adapter_import import (
    AdapterBuilder,
    AdapterModel,
    adapter_model,
)
from automodel_ckpt.convert.imports.external import losses_in
from automodel_ckpt.convert.imports.import_source import (
    ImportSource,
    check_merged,
    check_not_sparse,
)
from automodel_ckpt.convert.imports.names_file import Renaming, rename, without_prefix
from automodel_ckpt.convert.imports.new_checkpoint import NewCheckpoint, check_free
from automodel_ckpt.convert.imports.source_files import quantization_of, recipe_of, unusable
from automodel_ckpt.convert.imports.source_state import position_of, training_state_of
from automodel_ckpt.convert.imports.training_import import TrainingImport, training_import
from automodel_ckpt.convert.merging.model_names import (
    NameComparer,
    NameDifferences,
    fitting_prefixes,
    has_odd_prefix,
    has_stated_sizes,
)
from automodel_ckpt.convert.names.conversion import check_converted
from automodel_ckpt.errors import CheckpointUnusable

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What a user may choose about an import.

    *step* and *epoch* are by default those that the files of the source or their name state, else 0. *names* is a file
    with other names for the tensors (``names_file.py``). *config* is the path of the Hugging Face model's config.json,
    or of its directory, by default the source; the names of Megatron, and of torchtitan's Llama, are converted to those
    of this model, and the import has its config and tokenizer. With *parameters*, the training state is imported, too.
    It is called with the directory of config.json, and returns a function that lists the model's parameters. *adapters*
    builds the model of an adapter, which cannot be imported without it. *compare_names* compares the names of tensors
    with those of the model; None: they are not compared.
    """

    step: int | None = None
    epoch: int | None = None
    parameters: Callable[[Path], Parameters] | None = None
    names: Path | None = None
    config: Path | None = None
    adapters: AdapterBuilder | None = None
    compare_names: NameComparer | None = None


def prepare(source: Path, run: Path, options: ImportOptions = ImportOptions()) -> NewCheckpoint:
    """Inspect *source*, and check that ``epoch_E_step_S`` is free in the run directory *run*; write nothing.

    Reads headers, metadata and side files. Raises :class:`CheckpointUnusable` if there are no weights in a known
    format, they are damaged, or there is no training state although it was asked for.
    """
    source = source.expanduser()
    try:
        if options.config is not None:
            options = replace(options, config=_config_directory(options.config))
        return _prepared(ImportSource.of(source, options.config), run, options)
    except OSError as error:
        where = Path(error.filename or source)
        raise unusable("a file to import cannot be read", where, error.strerror) from error


def _prepared(source: ImportSource, run: Path, options: ImportOptions) -> NewCheckpoint:
    weights = source.opened.modules[MODEL]
    adapter = _adapter(source, weights, options)
    if adapter is not None and options.parameters is not None:
        options = replace(options, parameters=adapter.parameters_in)
    renaming = None
    name_notes: tuple[str, ...] = ()
    omitted = source.opened.omitted
    if adapter is not None:
        weights, copies = _without_copies(adapter.with_names_of_base(weights), adapter)
        name_notes = _renamed_note(adapter)
        omitted = (*omitted, *copies)
    if options.names is not None:
        renaming = rename(weights, options.names)
        weights = renaming.after
        omitted = (*omitted, *renaming.left_out)
    check_converted(weights.tensors, str(source.path))
    check_not_sparse(weights)
    if adapter is None:
        check_merged(weights, source.path)
    if adapter is None:
        compared = _compared(source, weights, options)
        if compared.renaming is not None:
            renaming = compared.renaming
            weights = renaming.after
            omitted = (*omitted, *renaming.left_out)
        name_notes = compared.notes
    training = _training(source, weights, options, renaming)
    if training is not None:
        # The omitted parts of the model's files are what the training state consists of.
        omitted = training.state.omitted
    position = position_of(source, options.step, options.epoch)
    counters = training or position
    name = layout.CheckpointName(step=counters.step, epoch=counters.epoch)
    check_free(run, name)
    maps = BaseMaps(is_adapter=adapter is not None)
    plan = make_plan(weights.tensors, {}, maps, where=str(source.directory))
    left_out = source.left_out(omitted, has_training=training is not None)
    return NewCheckpoint(
        source=source.path,
        kind=source.known.name,
        weights=weights,
        plan=plan,
        side_files=_side_files(source, adapter, plan, options.config),
        other_files=recipe_of(source.run_directory),
        losses=losses_in(source.run_directory, detect(source.run_directory, follow_links=True)),
        run=run,
        name=name,
        left_out=tuple(left_out),
        training=training,
        has_training_state=source.has_training_state,
        training_left=source.training_left,
        position_from=position.origin,
        adapter=adapter,
        name_notes=name_notes,
    )


def _training(
    source: ImportSource, weights: Tensors, options: ImportOptions, renaming: Renaming | None
) -> TrainingImport | None:
    """Return the training state of the source, if it is asked for."""
    if options.parameters is None:
        return None
    path, state = training_state_of(
        source, options.parameters, config=options.config, renaming=renaming
    )
    return training_import(
        state,
        weights.tensors,
        weights.tied,
        where=str(path),
        step=options.step,
        epoch=options.epoch,
    )


@dataclass(frozen=True, slots=True)
class _Compared:
    """What a comparison of an import's tensors with the model found: *notes* in words, and a *renaming* of tensors."""

    notes: tuple[str, ...] = ()
    renaming: Renaming | None = None


def _compared(source: ImportSource, weights: Tensors, options: ImportOptions) -> _Compared:
    """Compare *weights* with the model that config.json describes.

    Raises :class:`CheckpointUnusable` if the tensors have other names or shapes than the model's.
    """
    compare = options.compare_names
    has_config_of_model = source.known.saves_config and options.config is None
    if compare is None or has_config_of_model:
        return _Compared()
    has_own_names = source.known.has_own_names or has_odd_prefix(weights.tensors)
    files = source.side_files(options.config)
    config = files.get(_CONFIG)
    if config is None:
        return _Compared(_unchecked(weights) if has_own_names else ())
    content = _content(config)
    is_from_elsewhere = has_own_names or options.config is not None
    if not is_from_elsewhere and has_stated_sizes(content, weights.tensors):
        return _Compared()
    found = compare(config, [*weights.tensors, *weights.tied])
    if found is None:
        unknown = "unchecked, because those of this type of model are unknown"
        return _Compared((unknown,) if has_own_names else ())
    renaming = None
    notes: tuple[str, ...] = ()
    if is_from_elsewhere:
        notes = tuple(found.lines())
    if has_own_names and options.names is None:
        again = _without_prefix(found, config, weights, compare)
        if again is not None:
            found, renaming = again
            weights, notes = renaming.after, (_prefix_note(renaming),)
        else:
            found.check(str(source.path))
    is_quantized = bool(quantization_of(files))
    found.check_shapes(weights.tensors, str(source.path), is_quantized=is_quantized)
    padded = found.padded_rows(weights.tensors)
    if padded is not None:
        notes += (f"the vocabulary has {padded} rows, {found.vocab_size} by config.json: padding",)
    return _Compared(notes, renaming)


def _unchecked(weights: Tensors) -> tuple[str, ...]:
    first = next(iter(weights.tensors))
    return (f"unchecked, because there is no config.json; the first is {first}",)


def _content(config: bytes) -> dict[str, Any]:
    """Return the content of a config.json; empty if it is not a JSON mapping, which is an error where it is written."""
    with contextlib.suppress(ValueError):
        content = parse_json(config)
        if isinstance(content, dict):
            return content
    return {}


def _without_prefix(
    found: NameDifferences, config: bytes, weights: Tensors, compare: NameComparer
) -> tuple[NameDifferences, Renaming] | None:
    """Return the tensors with a prefix without it if they have exactly the names of the model then.

    None if there is no such prefix, or several, as of a model and its average.
    """
    if not found.unknown or not found.missing:
        return None
    names = [*weights.tensors, *weights.tied]
    without: dict[str, NameDifferences] = {}

    def fits(prefix: str) -> bool:
        stripped = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        again = compare(config, stripped)
        if again is None or again.unknown or again.missing:
            return False
        without[prefix] = again
        return True

    fitting = fitting_prefixes(names, found.missing, fits)
    if len(fitting) != 1:
        return None
    return without[fitting[0]], without_prefix(weights, fitting[0])


def _prefix_note(renaming: Renaming) -> str:
    after = next(iter(renaming.after.tensors))
    before = next(name for name in renaming.before.tensors if name.endswith(f".{after}"))
    return f"those of the model after the prefix {before.removesuffix(after)!r}, which is removed"


def _side_files(
    source: ImportSource, adapter: AdapterModel | None, plan: Plan, config: Path | None
) -> dict[str, bytes]:
    """Return the files beside the weights, with a config.json that agrees with the tensors in *plan*."""
    files = dict(adapter.files) if adapter is not None else source.side_files(config)
    if _CONFIG in files:
        path = source.directory / _CONFIG
        files[_CONFIG], _ = agreeing_config(files[_CONFIG], plan, BaseMaps(), path)
    return files


def _adapter(source: ImportSource, weights: Tensors, options: ImportOptions) -> AdapterModel | None:
    """Return the model of the source's adapter; None if it has none. Raises :class:`CheckpointUnusable`."""
    if source.is_file or not has_adapter(source.directory):
        return None
    if options.adapters is None or options.config is not None:
        raise CheckpointUnusable(
            "an adapter is imported with its base, not with a config",
            where=str(source.directory),
            value=layout.ADAPTER_MODEL,
            hint="name the directory of the base with --base",
        )
    return adapter_model(source.directory, weights, options.adapters)


def _without_copies(weights: Tensors, adapter: AdapterModel) -> tuple[Tensors, list[str]]:
    """Return an adapter's tensors without the copies of other weights in its file, and a text about these."""
    tensors = {name: weights.tensors[name] for name in weights.tensors if name in adapter.shapes}
    num_copies = len(weights.tensors) - len(tensors)
    if not num_copies:
        return weights, []
    return replace(weights, tensors=tensors), [
        f"{counted(num_copies, 'copy', 'copies')} of weights that the base or the adapter has"
    ]


def _renamed_note(adapter: AdapterModel) -> tuple[str, ...]:
    """Report layers that have other names in the base than in the adapter's file."""
    if not adapter.renamed:
        return ()
    old, new = next(iter(adapter.renamed.items()))
    count = counted(len(adapter.renamed), "layer")
    return (f"{count} renamed as in this version of transformers, such as {old[:200]} to {new}",)


def _config_directory(config: Path) -> Path:
    """Return the directory of a config.json, from its own path or that of its directory."""
    directory = config.parent if config.name == _CONFIG else config
    if not (directory / _CONFIG).is_file():
        raise CheckpointUnusable(
            "there is no config.json",
            where=str(directory),
            value="no such file",
            hint="give --config the directory of the model's config.json",
        )
    return Path(os.path.realpath(directory))
