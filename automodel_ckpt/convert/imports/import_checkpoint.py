"""``ckpt import``: plan a checkpoint from what another program saved. Imports no torch.

Sources are what ``init_from`` reads (``convert/open.py``): files and directories in any format of
``sources/registry.py``. The training state is imported if the user asks for it and its format is known. Everything that
is not imported is reported. ``new_checkpoint.py`` writes the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.files import agreeing_config
from automodel_ckpt.checkpoint.export.plan import BaseMaps, make_plan
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import without_links
from automodel_ckpt.checkpoint.files.type_aliases import Strings
from automodel_ckpt.checkpoint.sources.source import MODEL, Tensors
from automodel_ckpt.convert.formats.format import Parameters
from automodel_ckpt.convert.formats.hugging_face import has_adapter
from automodel_ckpt.convert.formats.registry import detect
from automodel_ckpt.convert.formats.torch.numbered_optimizer import WITHOUT_STATE
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
    position_of,
    training_state_of,
)
from automodel_ckpt.convert.imports.names_file import rename
from automodel_ckpt.convert.imports.new_checkpoint import NewCheckpoint, check_free
from automodel_ckpt.convert.imports.source_files import quantization_of, recipe_of, source_error
from automodel_ckpt.convert.imports.training_import import training_import
from automodel_ckpt.convert.merging.model_names import (
    NameComparer,
    has_odd_prefix,
)
from automodel_ckpt.convert.names.conversion import check_converted
from automodel_ckpt.errors import RecipeError, unusable

_CONFIG = "config.json"


@dataclass(frozen=True)
class ImportOptions:
    """What a user may choose about an import.

    *step* and *epoch* default to the values that the source's files or their name state, else 0. *names* is a file with
    other names for the tensors (``names_file.py``). *config* is the path of the Hugging Face model's config.json, or of
    its directory, by default the source. The names of Megatron, and of torchtitan's Llama, are converted to this
    model's names, and the import has its config and tokenizer. With *parameters*, the training state is imported, too.
    It is called with the directory of config.json, and returns a function that lists the model's parameters. *adapters*
    builds the model of an adapter, which cannot be imported without it. *compare_names* compares the names of tensors
    with the model's names. None: they are not compared.
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
        raise source_error("a file to import cannot be read", where, error.strerror) from error


def _prepared(source: ImportSource, run: Path, options: ImportOptions) -> NewCheckpoint:
    stored = weights = source.opened.modules[MODEL]
    adapter = _adapter(source, weights, options)
    name_notes: Strings = ()
    omitted = [*source.opened.omitted]
    if adapter is not None:
        # peft can save copies of layers of the base, and second ones of modules that are trained in full.
        tensors = {name: weights.tensors[name] for name in adapter.shapes}
        if num_copies := len(weights.tensors) - len(tensors):
            omitted.append(
                f"{counted(num_copies, 'copy', 'copies')} of weights of the base or the adapter"
            )
        stored = weights = replace(weights, tensors=tensors)
        if options.parameters is not None:
            trained = adapter.parameters
            options = replace(options, parameters=lambda _: lambda: trained)
    if options.names is not None:
        weights = rename(weights, options.names, omitted)
    check_converted(weights.tensors, str(source.path))
    check_not_sparse(weights)
    if adapter is None:
        check_merged(weights, source.path)
        name_notes = _compared(source, weights, options)
    training = None
    name, origin = position_of(source, options.step, options.epoch)
    if options.parameters is not None:
        if weights is not stored:
            raise RecipeError(
                "the weights get other names, and the state of the optimizer cannot get them",
                "ckpt import --training-state",
                next(iter(stored.tensors))[:200],
                WITHOUT_STATE,
            )
        path, state = training_state_of(source, options.parameters, config=options.config)
        training = training_import(state, where=path, step=options.step, epoch=options.epoch)
        # The omitted parts of the model's files are what the training state consists of.
        omitted = [*training.state.omitted]
        name = layout.CheckpointName(step=training.step, epoch=training.epoch)
    check_free(run, name)
    maps = BaseMaps(is_adapter=adapter is not None)
    plan = make_plan(weights.tensors, {}, maps, where=str(source.directory))
    side_files = dict(adapter.files) if adapter else source.side_files(options.config)
    if _CONFIG in side_files:
        # It agrees with the tensors that are written.
        path = source.directory / _CONFIG
        side_files[_CONFIG], _ = agreeing_config(side_files[_CONFIG], plan, BaseMaps(), path)
    left_out = source.left_out(omitted, has_training=training is not None)
    states = list(source.states())
    reasons = (known.training_left(path) for path, known in states)
    return NewCheckpoint(
        source=source.path,
        kind=source.known.name,
        weights=weights,
        plan=plan,
        side_files=side_files,
        other_files=recipe_of(source.run_directory),
        losses=losses_in(source.run_directory, detect(source.run_directory)),
        run=run,
        name=name,
        left_out=tuple(left_out),
        lineage={"imported_from": str(source.path), "imported_kind": source.known.name},
        training=training,
        has_training_state=any(known.has_training_state(path) for path, known in states),
        training_left=next(filter(None, reasons), ""),
        position_from=origin,
        adapter=adapter,
        name_notes=name_notes,
    )


def _compared(source: ImportSource, weights: Tensors, options: ImportOptions) -> Strings:
    """Compare *weights* with the model that config.json describes. Returns notes in words.

    Files that were saved with their config.json are not compared: building the model takes seconds. Raises
    :class:`CheckpointUnusable` if the tensors have other names or shapes than the model's.
    """
    compare = options.compare_names
    has_own_names = source.known.has_own_names or has_odd_prefix(weights.tensors)
    has_config_of_model = source.known.saves_config and options.config is None
    if compare is None or has_config_of_model or not (has_own_names or options.config):
        return ()
    files = source.side_files(options.config)
    config = files.get(_CONFIG)
    if config is None:
        first = next(iter(weights.tensors))
        return (f"unchecked, because there is no config.json; the first is {first}",)
    found = compare(config, [*weights.tensors, *weights.tied])
    if found is None:
        unknown = "unchecked, because those of this type of model are unknown"
        return (unknown,) if has_own_names else ()
    if has_own_names and options.names is None:
        found.check(str(source.path))
    found.check_shapes(weights.tensors, str(source.path), is_quantized=bool(quantization_of(files)))
    return tuple(found.lines())


def _adapter(source: ImportSource, weights: Tensors, options: ImportOptions) -> AdapterModel | None:
    """Return the model of the source's adapter, or None when it has none. Raises :class:`CheckpointUnusable`."""
    if source.is_file or not has_adapter(source.directory):
        return None
    if options.adapters is None or options.config is not None:
        raise unusable(
            "an adapter is imported with its base, not with a config",
            source.directory,
            layout.ADAPTER_MODEL,
            "name the directory of the base with --base",
        )
    return adapter_model(source.directory, weights, options.adapters)


def _config_directory(config: Path) -> Path:
    """Return the directory of a config.json, from the path of the file or of its directory."""
    directory = config.parent if config.name == _CONFIG else config
    if not (directory / _CONFIG).is_file():
        raise unusable(
            "there is no config.json",
            directory,
            "no such file",
            "give --config the directory of the model's config.json",
        )
    return without_links(directory)
