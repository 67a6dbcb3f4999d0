"""The files of another program that an import reads: where their weights are, in which format, and what else is there.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import is_sparse, without_links
from automodel_ckpt.checkpoint.files.type_aliases import FileDict
from automodel_ckpt.checkpoint.parts.manifest import has_manifest
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.sources.source import MODEL, Tensors
from automodel_ckpt.convert.formats.format import Format, Parameters, TrainingState
from automodel_ckpt.convert.formats.registry import detect, detect_run, formats_in
from automodel_ckpt.convert.imports.file_names import parse_name
from automodel_ckpt.convert.imports.source_files import (
    check_links_of_weights,
    side_files_of,
    source_error,
    without_unused_code,
)
from automodel_ckpt.convert.open import Weights, open_weights
from automodel_ckpt.errors import unusable

# Named as a file, it would be imported as a model.
_OLD_ADAPTER = "adapter_model.bin"
_SINGLE_FILES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".nemo", ".qnemo")
_MAX_NAMED = 5
_PLACES = (".", MODEL, f"{MODEL}/{layout.CONSOLIDATED}")
# State that NeMo AutoModel saves next to the model.
_OTHER_STATE = ("dataloader", "rng", "step_scheduler.pt")


@dataclass(frozen=True)
class ImportSource:
    """What a user asked to import: a directory or a file at *path*, with its weights in *directory*.

    *known* is the format of the weights, and *opened* describes them.
    """

    path: Path
    directory: Path
    known: Format
    opened: Weights

    @staticmethod
    def of(path: Path, config: Path | None) -> ImportSource:
        """Locate and open the weights in *path*.

        *config* is the directory of the model's config.json. Names of Megatron and torchtitan are converted to this
        model's names. Raises :class:`CheckpointUnusable` if there are no weights in a known format.
        """
        # Without links, except the last part of a file: its name determines the format.
        if path.is_file():
            path = Path(os.path.realpath(path.parent), path.name)
            known = detect(path)
            opened = open_weights(path, config)
            assert known is not None, "open_weights raises for an unknown format"
            return ImportSource(path, path.parent, known, opened)
        path = without_links(path)
        directory, known = _located(path)
        return ImportSource(path, directory, known, open_weights(directory, config))

    @property
    def is_file(self) -> bool:
        return self.path.is_file()

    @property
    def run_directory(self) -> Path:
        """The directory in which the recipe and the losses of the other program are looked for."""
        return self.directory if self.is_file else self.path

    def states(self) -> Iterator[tuple[Path, Format]]:
        """Yield the paths that may have a training state, with their formats: the source, and where its weights are."""
        for path in dict.fromkeys((self.path, self.directory)):
            known = detect_run(path)
            if known is not None:
                yield path, known

    def side_files(self, config: Path | None) -> FileDict:
        """Return the config and the tokenizer's files, from the directory *config* or else from the source."""
        chosen = config or self.opened.side_files
        files = side_files_of(chosen, chosen) if chosen is not None else {}
        if files or self.known.has_own_config:
            return files
        if self.is_file:
            return without_unused_code(side_files_of(self.directory, self.directory))
        return side_files_of(self.path, self.directory)

    def left_out(self, omitted: Iterable[str], *, has_training: bool) -> Iterator[str]:
        """Yield what exists in the source and is not imported, in words.

        *omitted* is what the formats name themselves. *has_training*: the training state is imported.
        """
        known = detect_run(self.path) if has_training else None
        imported = known.parts(self.path) if known is not None else frozenset()
        others = formats_in(self.path) if self.path.is_dir() else {}
        for name, other in others.items():
            is_of_weights = (self.path / name).resolve() == self.directory.resolve()
            if not is_of_weights and name not in imported:
                yield f"{name}: {other.name}"
        yield from omitted
        for name in () if has_training else _OTHER_STATE:
            if os.path.lexists(self.path / name):
                yield name


def check_merged(weights: Tensors, where: Path) -> None:
    """Raise :class:`CheckpointUnusable` for a model with adapters in its layers, as a script saves it with peft."""
    for name in weights.tensors:
        if ".lora_A." in name:
            base = name.partition(".lora_A.")[0] + ".base_layer.weight"
            if base in weights.tensors:
                raise unusable(
                    "these are the weights of a base and of an adapter that is not merged into it",
                    where,
                    f"{base[:200]}, {name[:200]}",
                    "in your own code, load them into the model of peft, and save the adapter (save_pretrained), "
                    "or the merged model (merge_and_unload().save_pretrained)",
                )


def check_not_sparse(weights: Tensors) -> None:
    """Raise :class:`CheckpointUnusable` for a sparse file: it could make an import write terabytes of zeros."""
    slices = (stored for tensor in weights.tensors.values() for stored in tensor.slices)
    for file in sorted({stored.file for stored in slices}):
        path = weights.root / file
        status = os.lstat(path)
        if is_sparse(status):
            raise source_error(
                "this file is sparse: nearly all of it is unallocated",
                path,
                f"{status.st_size} bytes",
            )


def _located(source: Path) -> tuple[Path, Format]:
    """Return the directory of the weights, and its format. Raises :class:`CheckpointUnusable`."""
    if not source.is_dir():
        raise unusable(
            "the path to import does not exist",
            source,
            "no such file or directory",
            f"check the path; relative paths start at the working directory, {os.getcwd()}",
        )
    known = detect(source)
    if known is not None and not known.is_readable:
        known.open(source)  # raises an error that names the format
    # lexists(): a broken link must not make a checkpoint look like files of another program.
    is_ours = any(has_manifest(place) for place in (source, source.parent))
    if is_ours or resume.newest(source) is not None:
        raise unusable(
            "this is already a checkpoint or a run of automodel_ckpt: there is nothing to import",
            source,
            layout.MANIFEST,
            "use it in init_from.path (a new run) or checkpoint.restore_from (the same run)",
        )
    for place in _PLACES:
        directory = source / place
        if directory.is_symlink() or not directory.is_dir():
            continue
        # Before detect(), which follows links: they must not lead out of the directory.
        check_links_of_weights(directory)
        known = detect(directory, readable_only=True)
        if known is not None:
            return directory, known
    raise source_error("no weights that can be imported were found", source, _found(source))


def _found(source: Path) -> str:
    names = sorted(os.listdir(source))
    if _OLD_ADAPTER in names:
        return f"{_OLD_ADAPTER} of an old version of peft: load it with peft, and save it again"
    # A single file comes first: it may be the model.
    names.sort(key=lambda name: not name.endswith(_SINGLE_FILES))
    found = ", ".join(names[:_MAX_NAMED]) or "nothing"
    return f"it contains {found}: name the file or the directory with the weights"


def position_of(
    source: ImportSource, step: int | None, epoch: int | None
) -> tuple[layout.CheckpointName, str]:
    """Return the step and the epoch of the imported checkpoint, and where they were stated, in words.

    They are the user's values, else the values in the files of the source, else the values in its name.
    """
    stated = [(step, epoch, "as given")]
    for path, known in source.states() if step is None and epoch is None else ():
        counters = known.counters(path)
        stated.append((counters.step, counters.epoch, "stated in the files"))
    named = parse_name(source.path.name)
    stated.append((named.step, named.epoch, "stated in the name"))
    for step, epoch, origin in stated:
        if step is not None or epoch is not None:
            return layout.CheckpointName(step=step or 0, epoch=epoch or 0), origin
    return layout.CheckpointName(step=0, epoch=0), ""


def training_state_of(
    source: ImportSource,
    parameters: Callable[[Path], Parameters],
    *,
    config: Path | None,
) -> tuple[Path, TrainingState]:
    """Return the training state of the source, and the path that has it.

    *parameters* is called with the directory of config.json, by default the source's, and returns a function that lists
    the model's parameters.

    Raises :class:`CheckpointUnusable` if there is no training state that can be imported.
    """
    directory = config or source.directory
    if not (directory / "config.json").is_file():
        directory = source.run_directory
    kinds = []
    for path, known in source.states():
        state = known.training_state(path, parameters(directory))
        if state is None:
            kinds.append(known.training_left(path) or known.name)
            continue
        if state.optimizer is not None:
            states = state.optimizer.tensors
            tensors = {f"{n}.{e}": each for n in states for e, each in states[n].items()}
            check_not_sparse(Tensors(state.optimizer.root, tensors))
        # Counters that only the name of the source states.
        named = parse_name(source.path.name)
        counters = {
            name: getattr(named, name)
            for name in ("step", "epoch", "consumed_samples")
            if getattr(state, name) is None
        }
        return path, replace(state, **counters)
    raise unusable(
        "there is no training state that can be imported",
        source.path,
        ", ".join(kinds) or "no known format",
        "import the weights without --training-state; runs of transformers' Trainer, Lightning and NeMo "
        "AutoModel, and of PyTorch DCP if the optimizer has the names of the weights, can be continued",
    )
