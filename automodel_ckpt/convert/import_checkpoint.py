"""``ckpt import``: convert what another program saved into a checkpoint. Imports no torch.

Sources are what ``init_from`` reads (``convert/open.py``): files and directories in any format of
``sources/registry.py``. The result is a complete checkpoint of weights in the layout ``hf``, written and published as
any save: staged, with digests, and renamed once. The training state is imported if the user asks for it and its format
is known. Everything that is not imported is reported.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.export.files import agreeing_config
from automodel_ckpt.checkpoint.export.plan import OutputFile, Plan, make_plan
from automodel_ckpt.checkpoint.export.script import no_need_script
from automodel_ckpt.checkpoint.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.failures import as_failure
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import is_sparse, read_safely
from automodel_ckpt.checkpoint.manifest import Manifest, StateRecord, Summary, Tree
from automodel_ckpt.checkpoint.policy import KeepPolicy
from automodel_ckpt.checkpoint.run import maintenance, resume
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.saving.environment import environment
from automodel_ckpt.checkpoint.slices import Tensor, whole_tensor
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.sources.model_files import is_side_file
from automodel_ckpt.checkpoint.sources.opening import MODEL
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.tensors.stored import whole_checked
from automodel_ckpt.checkpoint.writing.jobs import Blocks, Chunk, Data, FileJob, run_all
from automodel_ckpt.checkpoint.writing.rank_manifest import (
    RankManifest,
    merge_files,
    merge_tree,
    readable_bytes,
)
from automodel_ckpt.convert.adapter_import import AdapterBuilder, AdapterModel, adapter_model
from automodel_ckpt.convert.external import losses_in
from automodel_ckpt.convert.file_names import NameMetadata, parse_name
from automodel_ckpt.convert.names.conversion import check_converted
from automodel_ckpt.convert.names.torchtitan import (
    first_fused,
    has_torchtitan_names,
    is_only_in_optimizer,
    required_torchtitan_conversion,
)
from automodel_ckpt.convert.names_file import Renaming, rename
from automodel_ckpt.convert.open import Weights, open_weights
from automodel_ckpt.convert.sources.format import Format
from automodel_ckpt.convert.sources.registry import detect, detect_run, formats_in
from automodel_ckpt.convert.sources.torch_files import BIN_INDEX
from automodel_ckpt.convert.targets.tensor_blocks import tensor_blocks
from automodel_ckpt.convert.training_import import (
    OPTIMIZER,
    TrainingImport,
    training_import,
    training_jobs,
    written_optimizer,
)
from automodel_ckpt.convert.training_state import OptimizerState, Parameters, TrainingState
from automodel_ckpt.errors import CheckpointUnusable

_FORMAT = "hf"
_CONFIG = "config.json"
# Tokenizers of large vocabularies take some ten megabytes.
_MAX_SIDE_BYTES = 128 << 20
# It is parsed, and then takes up to 25 times its size.
_MAX_CONFIG_BYTES = 16 << 20
_MAX_RECIPE_BYTES = 1 << 20
_WEIGHT_FILES = (
    ".safetensors",
    ".distcp",
    ".bin",
    layout.HF_INDEX,
    BIN_INDEX,
    layout.DCP_METADATA,
    layout.EXPORT_MANIFEST,
)
_PLACES = (".", MODEL, f"{MODEL}/{layout.CONSOLIDATED}")
_HINT = "use a directory of *.safetensors or of PyTorch DCP (.metadata and *.distcp), or a checkpoint with model/"
ABSENT = ("optimizer", "learning-rate schedule", "data position", "random numbers", "counters")


@dataclass(frozen=True, slots=True)
class Import:
    """What an import takes from *source* and writes to ``run/name``.

    *side_files* are written to ``model/``, *other_files* to the checkpoint, each by name. *left_out* lists what exists
    in the source and is not imported. *contents*, if given, computes the data of each tensor of *weights*; by default
    it is read from the source. *lineage* is recorded in the manifest, by default the path and kind of the source.
    *training* is the training state, if it was asked for; without it, *has_training_state* is whether the format has
    one. *position_from* states where step and epoch in the name come from, in words. *adapter* is the model
    of an adapter.
    """

    source: Path
    kind: str
    weights: Tensors
    plan: Plan
    side_files: Mapping[str, bytes]
    other_files: Mapping[str, bytes]
    losses: Mapping[str, Any]
    run: Path
    name: layout.CheckpointName
    left_out: tuple[str, ...]
    contents: Callable[[Tensor], Blocks] | None = None
    lineage: Mapping[str, Any] | None = None
    training: TrainingImport | None = None
    has_training_state: bool = False
    position_from: str = ""
    adapter: AdapterModel | None = None

    @property
    def absent(self) -> tuple[str, ...]:
        """What the checkpoint does not contain, in words."""
        return ABSENT if self.training is None else tuple(self.training.absent)

    @property
    def target(self) -> Path:
        return self.run / str(self.name)

    @property
    def has_config(self) -> bool:
        """Whether the model's config.json is among the side files."""
        return _CONFIG in self.side_files

    @property
    def is_adapter(self) -> bool:
        """Whether the weights are those of an adapter, a single file that PEFT reads."""
        return layout.ADAPTER_CONFIG in self.side_files

    @property
    def has_digests(self) -> bool:
        """Whether the source has digests that its tensors are compared with."""
        digests: list[str | None] = []
        for tensor in self.weights.tensors.values():
            digests += [stored.digest for stored in tensor.slices if stored.nbytes]
        return bool(digests) and None not in digests

    @property
    def nbytes(self) -> int:
        contents = [*self.side_files.values(), *self.other_files.values()]
        training = self.training.nbytes if self.training is not None else 0
        return self.plan.nbytes + training + sum(len(content) for content in contents)


def prepare(
    source: Path,
    run: Path,
    *,
    step: int | None = None,
    epoch: int | None = None,
    parameters: Callable[[Path], Parameters] | None = None,
    names: Path | None = None,
    config: Path | None = None,
    adapters: AdapterBuilder | None = None,
) -> Import:
    """Inspect *source*, and check that ``epoch_E_step_S`` is free in the run directory *run*; write nothing.

    *step* and *epoch* are by default those that the files of the source or their name state, else 0. *names* is a file
    with other names for the tensors (``names_file.py``). *config* is the directory of the Hugging Face model's
    config.json, by default the source; the names of Megatron, and of torchtitan's Llama, are converted to those of this
    model, and the import has its config and tokenizer. With *parameters*, the training state is imported, too. It is
    called with the directory of config.json, and returns a function that lists the model's parameters. *adapters*
    builds the model of an adapter, which cannot be imported without it.

    Reads headers, metadata and side files. Raises :class:`CheckpointUnusable` if there are no weights in a known
    format, they are damaged, or there is no training state although it was asked for.
    """
    source = source.expanduser()
    try:
        if config is not None:
            config = _config_directory(config)
        return _prepared(_resolved(source), run, step, epoch, parameters, names, config, adapters)
    except OSError as error:
        where = Path(error.filename or source)
        raise _unusable("a file to import cannot be read", where, error.strerror) from error


def _resolved(source: Path) -> Path:
    """Return the path without symbolic links; the link that a file itself is stays, since its name tells its format."""
    if source.is_file():
        return Path(os.path.realpath(source.parent), source.name)
    return Path(os.path.realpath(source))


def _prepared(
    source: Path,
    run: Path,
    step: int | None,
    epoch: int | None,
    parameters: Callable[[Path], Parameters] | None,
    names: Path | None,
    config: Path | None,
    adapters: AdapterBuilder | None,
) -> Import:
    directory, known, opened = _opened(source, config)
    weights = opened.modules[MODEL]
    adapter = _adapter(source, directory, weights, adapters, config)
    if adapter is not None and parameters is not None:
        parameters = adapter.parameters_in
    omitted = opened.omitted
    renaming = None
    if names is not None:
        renaming = rename(weights, names)
        weights = renaming.after
        omitted = (*omitted, *renaming.left_out)
    check_converted(weights.tensors, str(source))
    _check_not_sparse(weights)
    training = None
    if parameters is not None:
        training = _training(source, directory, weights, step, epoch, parameters, config, renaming)
        # The omitted parts of the model's files are what the training state consists of.
        omitted = training.state.omitted
    position = _position(source, directory, step, epoch)
    counters = training or position
    name = layout.CheckpointName(step=counters.step, epoch=counters.epoch)
    check_free(run, name)
    maps = BaseMaps(is_adapter=adapter is not None)
    plan = make_plan(weights.tensors, {}, maps, where=str(directory))
    place = directory if source.is_file() else source
    if adapter is not None:
        side = dict(adapter.files)
    else:
        side = _side_files(config or opened.side_files)
        if not side and not known.has_own_config:
            side = _side_files_nearby(source, directory)
    if _CONFIG in side:
        side[_CONFIG], _ = agreeing_config(side[_CONFIG], plan, BaseMaps(), directory / _CONFIG)
    return Import(
        source,
        known.name,
        weights,
        plan,
        side,
        dict(_recipe(place)),
        losses_in(place, detect(place, follow_links=True)),
        run,
        name,
        tuple(_left_out(source, directory, omitted, has_training=training is not None)),
        training=training,
        has_training_state=_has_training_state(source, directory),
        position_from=position.origin,
        adapter=adapter,
    )


def _side_files_nearby(source: Path, directory: Path) -> dict[str, bytes]:
    """Return the model's side files in or around *source*, whose weights are in *directory*."""
    if source.is_file():
        return without_unused_code(side_files_of(directory, directory))
    return side_files_of(source, directory)


def _opened(source: Path, config: Path | None) -> tuple[Path, Format, Weights]:
    """Return the directory of the weights in *source*, their format, and the weights.

    Raises :class:`CheckpointUnusable` if there are none in a known format.
    """
    if source.is_file():
        known = detect(source, follow_links=True)
        opened = open_weights(source, config)
        assert known is not None, "open_weights raises for an unknown format"
        return source.parent, known, opened
    directory, known = _located(source)
    return directory, known, open_weights(directory, config)


def _side_files(directory: Path | None) -> dict[str, bytes]:
    """Return the config and the tokenizer's files in *directory*; none without a directory."""
    return side_files_of(directory, directory) if directory is not None else {}


def _adapter(
    source: Path,
    directory: Path,
    weights: Tensors,
    adapters: AdapterBuilder | None,
    config: Path | None,
) -> AdapterModel | None:
    """Return the model of the adapter in *directory*; None if it has none. Raises :class:`CheckpointUnusable`."""
    if source.is_file() or not os.path.lexists(directory / layout.ADAPTER_MODEL):
        return None
    if adapters is None or config is not None:
        raise CheckpointUnusable(
            "an adapter is imported with its base, not with a config",
            where=str(directory),
            value=layout.ADAPTER_MODEL,
            hint="name the directory of the base with --base",
        )
    return adapter_model(directory, weights.tensors, adapters)


@dataclass(frozen=True, slots=True)
class _Position:
    """The step and the epoch in the name of an import, and where they were stated, in words."""

    step: int
    epoch: int
    origin: str


def _position(source: Path, directory: Path, step: int | None, epoch: int | None) -> _Position:
    """Return the position that the user gave; else that in the files of the source; else that in its name."""
    if step is not None or epoch is not None:
        return _Position(step or 0, epoch or 0, "as given")
    for path, known in _states(source, directory):
        stated = known.counters(path)
        if stated.step is not None or stated.epoch is not None:
            return _Position(stated.step or 0, stated.epoch or 0, "stated in the files")
    named = parse_name(source.name)
    if named.step is not None or named.epoch is not None:
        return _Position(named.step or 0, named.epoch or 0, "stated in the name")
    return _Position(0, 0, "")


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


def _states(source: Path, directory: Path) -> Iterator[tuple[Path, Format]]:
    """Yield the paths that may have a training state, with their formats: the source, and where its weights are."""
    for path in dict.fromkeys((source, directory)):
        known = detect_run(path)
        if known is not None:
            yield path, known


def _has_training_state(source: Path, directory: Path) -> bool:
    return any(known.has_training_state(path) for path, known in _states(source, directory))


def _training(
    source: Path,
    directory: Path,
    weights: Tensors,
    step: int | None,
    epoch: int | None,
    parameters: Callable[[Path], Parameters],
    config: Path | None,
    renaming: Renaming | None,
) -> TrainingImport:
    """Return the training state of the source. Raises :class:`CheckpointUnusable` if there is none."""
    if config is None:
        config = directory if (directory / _CONFIG).is_file() else source
    if config.is_file():
        config = config.parent
    kinds = []
    for path, known in _states(source, directory):
        state = known.training_state(path, parameters(config))
        if state is None:
            kinds.append(known.name)
            continue
        state = _completed(state, parse_name(source.name))
        state = _in_names_of(renaming.before if renaming else weights, state, config)
        if renaming is not None:
            state = renaming.training_state(state)
            state = replace(state, omitted=(*state.omitted, *renaming.left_out))
        if state.optimizer is not None:
            _check_not_sparse(_optimizer_tensors(state.optimizer))
        return training_import(
            state, weights.tensors, weights.tied, where=str(path), step=step, epoch=epoch
        )
    raise CheckpointUnusable(
        "there is no training state that can be imported",
        where=str(source),
        value=", ".join(kinds) or "no known format",
        hint="import the weights without --training-state",
    )


def _in_names_of(weights: Tensors, state: TrainingState, config: Path) -> TrainingState:
    """Return *state* under the names of *weights*, which were converted if torchtitan's names are only in *state*.

    Raises :class:`CheckpointUnusable` for the fused parameters of torchtitan if the weights have torchtitan's names,
    too: there, they are not fused.
    """
    if state.optimizer is None:
        return state
    if is_only_in_optimizer(state.optimizer, weights.tensors):
        return required_torchtitan_conversion(config).training_state(state)
    fused = first_fused(state.optimizer)
    if fused is not None and has_torchtitan_names(weights.tensors):
        raise CheckpointUnusable(
            "torchtitan's optimizer has fused queries, keys and values, and its weights have them apart",
            where=str(state.optimizer.root),
            value=fused,
            hint="add --config DIR, a directory with the config.json of the same Llama, to convert both",
        )
    return state


def _completed(state: TrainingState, named: NameMetadata) -> TrainingState:
    """Return the training state with the counters that only the name of the source states."""
    samples = state.consumed_samples
    if samples is None:
        samples = named.consumed_samples
    return replace(
        state,
        step=named.step if state.step is None else state.step,
        epoch=named.epoch if state.epoch is None else state.epoch,
        consumed_samples=samples,
    )


def _optimizer_tensors(optimizer: OptimizerState) -> Tensors:
    """Return all tensors of an optimizer's state, for checks of their files."""
    tensors: dict[str, Tensor] = {}
    for name, entries in optimizer.tensors.items():
        for entry, tensor in entries.items():
            tensors[f"{name}.{entry}"] = tensor
    return Tensors(optimizer.root, tensors)


def run_import(planned: Import) -> Path:
    """Write and publish the checkpoint that :func:`prepare` planned, and return its path.

    ``LATEST`` then points at the newest checkpoint of the run. Raises :class:`SaveFailed` if it cannot be written, and
    :class:`CheckpointUnusable` if the source cannot be read; then nothing of it remains.
    """
    run = RunDirectory(planned.run, KeepPolicy(), "val_loss")
    try:
        # The lease first: recover() removes staging directories, which a live run may be writing.
        run.hold()
        maintenance.recover(run.root)
    except OSError as error:
        run.release()
        raise as_failure(error, "importing", run.root) from error
    try:
        _check_step_order(planned.run, planned.name)  # a run may have saved since it was planned
        return _write(planned, run.root)
    finally:
        run.release()


# ---------------------------------------------------------------- what there is


def _located(source: Path) -> tuple[Path, Format]:
    """Return the directory of the weights, and its format. Raises :class:`CheckpointUnusable`."""
    if not source.is_dir():
        raise _unusable("there is nothing to import", source, "no such file or directory")
    known = detect(source)
    if known is not None and not known.is_readable:
        known.open(source)  # raises an error that names the format
    # lexists(): a broken link must not make a checkpoint look like files of another program.
    if any(os.path.lexists(place / layout.MANIFEST) for place in (source, source.parent)):
        raise CheckpointUnusable(
            "this is already a checkpoint of automodel_ckpt: there is nothing to import",
            where=str(source),
            value=layout.MANIFEST,
            hint="use it in init_from.path (a new run) or checkpoint.restore_from (the same run)",
        )
    for place in _PLACES:
        directory = source / place
        if directory.is_symlink() or not directory.is_dir():
            continue
        known = _importable(directory)
        if known is not None:
            return directory, known
    raise _unusable("no weights that can be imported were found", source, _found(source))


def _importable(directory: Path) -> Format | None:
    """Return the format of a directory with weights; None if there are none. Raises :class:`CheckpointUnusable`."""
    # Before detect(), which follows links: they must not lead out of the directory.
    _check_links(directory, lambda file: file.endswith(_WEIGHT_FILES))
    return detect(directory, follow_links=True, readable_only=True)


def _found(source: Path) -> str:
    names = sorted(os.listdir(source))
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        return f"it contains {pickled[0]}: name the file, if it has the model's weights"
    if not names:
        return "it is empty"
    return f"it holds {', '.join(names[:5])}"


def _check_links(directory: Path, concerned: Callable[[str], bool]) -> None:
    """Check symbolic links to the files selected by *concerned*: they may point within the directory.

    In the Hub's cache, they may also point to the blobs of the same model. Raises :class:`CheckpointUnusable`.
    """
    allowed = [directory]
    if directory.parent.name == "snapshots":
        allowed.append(directory.parent.parent / "blobs")
    for path in directory.iterdir():
        if not path.is_symlink() or not concerned(path.name):
            continue
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(root) for root in allowed):
            what = "a symbolic link points outside of the directory"
            raise _unusable(what, path, os.readlink(path))


def _check_not_sparse(weights: Tensors) -> None:
    """Raise :class:`CheckpointUnusable` for a sparse file: it could make an import write terabytes of zeros."""
    files: set[str] = set()
    for tensor in weights.tensors.values():
        files.update(stored.file for stored in tensor.slices)
    for file in sorted(files):
        path = weights.root / file
        status = os.lstat(path)
        if is_sparse(status):
            what = "this file is sparse: nearly all of it is unallocated"
            raise _unusable(what, path, f"{status.st_size} bytes")


def check_free(run: Path, name: layout.CheckpointName) -> None:
    """Check that the checkpoint *name* can be imported into *run*. Raises :class:`CheckpointUnusable`."""
    _check_name_is_free(run / str(name))
    _check_step_order(run, name)


def _check_name_is_free(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointUnusable(
            "a checkpoint of this step already exists",
            where=str(target),
            value=target.name,
            hint="import into another run directory, or under another --step",
        )


def _check_step_order(run: Path, name: layout.CheckpointName) -> None:
    """Raise :class:`CheckpointUnusable` if the import would become the newest checkpoint of a training run.

    The run resumes from its newest checkpoint, and weights alone would lose its optimizer state.
    """
    newest = resume.newest(run) if run.is_dir() else None
    if newest is None or (newest.step, newest.epoch) > name:
        return
    if not Summary.read(run / newest.name).has_optimizer:
        return
    raise CheckpointUnusable(
        "the imported weights would become the newest checkpoint of an existing training run",
        where=str(run),
        value=newest.name,
        hint="import into a separate run directory, and start from it with init_from",
    )


def side_files_of(source: Path, directory: Path) -> dict[str, bytes]:
    """Return config, tokenizer and the like: from ``.hf_metadata``, beside the weights, or in the directory above."""
    for place in (directory / layout.HF_METADATA, directory, source):
        if place.is_symlink() or not place.is_dir():
            continue
        names = [path.name for path in place.iterdir() if path.is_file()]
        names = sorted(filter(is_side_file, names))
        if _CONFIG not in names:
            continue
        _check_links(place, lambda name: is_side_file(name) or name == layout.EXPORT_MANIFEST)
        files: dict[str, bytes] = {}
        for name in names:
            limit = _MAX_CONFIG_BYTES if name == _CONFIG else _MAX_SIDE_BYTES
            files[name] = _content(place / name, limit)
        export = find_export_manifest(place, follow_links=True)
        if export is not None:
            for name, content in files.items():
                export.check_bytes(name, content)
        return files
    return {}


def without_unused_code(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return side files without Python files if no JSON file refers to code of the model (``auto_map``).

    A single file of weights is often in the directory of the scripts that wrote it.
    """
    for name, content in files.items():
        if name.endswith(".json") and b'"auto_map"' in content:
            return dict(files)
    return {name: content for name, content in files.items() if not name.endswith(".py")}


def _content(path: Path, limit: int) -> bytes:
    # read_safely() rejects links. Those of the Hub's cache have passed _check_links().
    real = Path(os.path.realpath(path))
    return read_safely(real.parent, real.name, limit=limit)


def _recipe(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the recipe that the other program saved, unchanged, for reference."""
    path = source / layout.CONFIG
    if path.is_file() and not path.is_symlink() and path.stat().st_size <= _MAX_RECIPE_BYTES:
        yield layout.CONFIG, _content(path, _MAX_RECIPE_BYTES)


def _left_out(
    source: Path, directory: Path, omitted: Iterable[str], *, has_training: bool
) -> Iterator[str]:
    """Yield what exists in the source and is not imported, in words. *omitted* is what the formats name themselves."""
    known = detect_run(source) if has_training else None
    imported = known.parts(source) if known is not None else frozenset()
    for name, text in _left_out_nearby(source, directory):
        if name not in imported:
            yield text
    yield from omitted
    if not has_training:
        yield from _left_out_state(source)


def _left_out_nearby(source: Path, directory: Path) -> Iterator[tuple[str, str]]:
    """Yield the directories of *source*, other than that of the weights, that have a known format, with its name."""
    if not source.is_dir():
        return
    for name, known in formats_in(source).items():
        if (source / name).resolve() != directory.resolve():
            yield name, f"{name}: {known.name}"


def _left_out_state(source: Path) -> Iterator[str]:
    """Yield the other state that NeMo AutoModel saves, which is not imported."""
    for name in ("dataloader", "rng", "step_scheduler.pt"):
        if os.path.lexists(source / name):
            yield name


# ---------------------------------------------------------------- writing


def _write(planned: Import, run: Path) -> Path:
    staging = commit.reserve(run, str(planned.name))
    try:
        written = RankManifest(0)
        run_all(_jobs(planned), staging, written)
        if planned.training is not None:
            run_all(training_jobs(planned.training), staging, written)
        manifest = _manifest(planned, written)
        commit.finalize(staging, readable_bytes(manifest, run / str(planned.name)))
        published = commit.publish(staging, str(planned.name))
        newest = resume.newest(run)
        assert newest is not None
        # Not to the import itself: one of an earlier step must not move LATEST back.
        commit.point(run, layout.LATEST, newest.name)
        return published
    except OSError as error:
        raise as_failure(error, f"importing {planned.source}", run) from error
    finally:
        commit.discard(staging)


def _jobs(planned: Import) -> Iterator[FileJob]:
    for file in planned.plan.files:
        yield FileJob(f"{MODEL}/{file.name}", list(_chunks(planned, file)), MODEL, file.nbytes)
    beside = dict(planned.side_files)
    if not planned.is_adapter:
        beside[layout.HF_INDEX] = planned.plan.index()
        beside[layout.CONSOLIDATE_SCRIPT] = no_need_script().encode()
    contents = {f"{MODEL}/{name}": data for name, data in beside.items()} | dict(
        planned.other_files
    )
    contents[layout.LOSSES] = json.dumps(_losses(planned), indent=2).encode() + b"\n"
    for name, data in contents.items():
        yield FileJob(name, [Chunk(0, data)], nbytes=len(data))


def _chunks(planned: Import, file: OutputFile) -> Iterator[Chunk]:
    """Yield the header and the tensors of a file. A tensor is read when its chunk is written."""
    yield Chunk(0, file.header)
    path = f"{MODEL}/{file.name}"
    for tensor, start in file.placed():
        entry = whole_tensor(tensor.fqn, tensor.dtype, tensor.stored.shape, path, start)
        data = _data(planned.weights.root, tensor.stored)
        if planned.contents is not None:
            data = planned.contents(tensor.stored)
        yield Chunk(start, data, entry)


def _data(root: Path, tensor: Tensor) -> Data:
    """Return a tensor's row-major bytes for a job.

    A tensor that is one range of bytes is mapped. One that has to be gathered, from several slices or through strides,
    is read in blocks: memory does not grow with the tensor.
    """
    filled = [stored for stored in tensor.slices if stored.nbytes]
    is_strided = any(stored.strides is not None for stored in filled)
    if len(filled) > 1 or is_strided:
        return Blocks(tensor.nbytes, partial(tensor_blocks, root, tensor, tensor.dtype))
    return partial(_mapped, root, tensor)


def _mapped(root: Path, tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in one slice, compared with their digest if there is one."""
    return whole_checked(root, tensor).reshape(-1).view("u1").data


def _losses(planned: Import) -> dict[str, Any]:
    """Return the content of losses.json: the source's losses, null if they are not finite numbers."""
    return {
        "step": planned.name.step,
        "epoch": planned.name.epoch,
        "train_loss": _finite(planned.losses.get("train_loss")),
        "val_loss": _finite(planned.losses.get("val_loss")),
    }


def _finite(value: object) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    if not math.isfinite(number):
        return None
    return number


def _manifest(planned: Import, written: RankManifest) -> Manifest:
    model = merge_tree(MODEL, _FORMAT, [written], {})
    trees = {MODEL: _without_ties(model, planned.side_files.get(_CONFIG))}
    state = {MODEL: StateRecord("module", "replicated", f"{MODEL}/")}
    lineage = dict(planned.lineage or {})
    if not lineage:
        lineage = {"imported_from": str(planned.source), "imported_kind": planned.kind}
    progress: dict[str, Any] = {}
    training = planned.training
    if training is not None:
        state |= training.records()
        lineage |= training.lineage()
        progress = training.progress
        if training.state.optimizer is not None:
            trees[OPTIMIZER] = written_optimizer(written)
    return Manifest(
        step=planned.name.step,
        epoch=planned.name.epoch,
        created=time.time(),
        world_size=1,
        dp_size=1,
        progress=progress,
        losses=_losses(planned),
        validated=False,
        environment=environment(),
        lineage=lineage,
        state=state,
        trees=trees,
        files=merge_files([written]),
    )


def _without_ties(tree: Tree, config: bytes | None) -> Tree:
    """Record the head as a copy of the embedding, if config.json ties them and both have the same bytes."""
    if config is None or not parse_json(config).get("tie_word_embeddings"):
        return tree
    tied = {}
    for head in (fqn for fqn in tree.tensors if fqn.endswith("lm_head.weight")):
        same = (
            fqn
            for fqn in tree.tensors
            if fqn.endswith("embed_tokens.weight") and _equal(tree, fqn, head)
        )
        if (kept := next(same, None)) is not None:
            tied[head] = kept
    tensors = {fqn: tensor for fqn, tensor in tree.tensors.items() if fqn not in tied}
    return replace(
        tree, tensors=tensors, tied=tied, copies={fqn: tree.tensors[fqn] for fqn in tied}
    )


def _equal(tree: Tree, one: str, other: str) -> bool:
    a, b = tree.tensors[one], tree.tensors[other]
    return (a.dtype, a.shape, a.slices[0].digest) == (b.dtype, b.shape, b.slices[0].digest)


def _unusable(what: str, where: Path, value: object) -> CheckpointUnusable:
    return CheckpointUnusable(what, where=str(where), value=value, hint=_HINT)
