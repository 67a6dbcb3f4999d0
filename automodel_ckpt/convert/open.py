"""Open weights in any format: the single entry point for reading a model from files.

:func:`open_source` describes one model for ``export``, ``diff`` and ``gguf``. :func:`open_weights` describes weights to
start from, for ``init_from`` and ``ckpt import``: it also accepts run directories, pointers, single files, and symbolic
links as in the Hub's cache. Both return slices (``checkpoint/parts/slices.py``), so that a rank reads only what it
needs.

Checkpoints of this program have a manifest. Any other directory or file is opened by the first format in
``formats/registry.py`` that recognizes it. Only manifests, headers and metadata are read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from automodel_ckpt.checkpoint.export.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import without_links
from automodel_ckpt.checkpoint.files.type_aliases import AnyPath, Strings, Values
from automodel_ckpt.checkpoint.options import Level
from automodel_ckpt.checkpoint.parts.manifest import Manifest, has_manifest
from automodel_ckpt.checkpoint.parts.slices import contiguous_slices
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.sources.source import (
    MODEL,
    Source,
    Tensors,
    check_finished,
    is_average,
    is_checkpoint,
    module_in,
    open_checkpoint,
    without_averages,
)
from automodel_ckpt.convert.formats.files import names_in
from automodel_ckpt.convert.formats.registry import detect
from automodel_ckpt.convert.imports.source_files import check_links_of_weights
from automodel_ckpt.errors import CheckpointUnusable, unusable

log = logging.getLogger("automodel_ckpt")

# Names with other ends are Hugging Face's or a module's own: the converters are not imported.
_OTHER_NAMES = (
    *("embedding.word_embeddings.weight", "decoder.final_layernorm.weight"),
    "tok_embeddings.weight",
)
_OWN_NAMES = "these are names of the other program: Hugging Face names need the model's config.json beside the weights"
_unusable = partial(
    unusable,
    hint="name a run directory, a checkpoint, a pointer such as checkpoints/LATEST, or a directory of *.safetensors",
)


@dataclass(frozen=True)
class Weights:
    """The modules found in *path*, by attribute name.

    Weights with digests have either *checkpoint*, a directory with a manifest, or *export*, the manifest of an export.
    *files* are then the names of the files that were opened. *omitted* names, in words, what else *path* contains than
    the modules. *side_files* is the directory with config.json and the like, if the format knows it. *stated_config* is
    what the files of another program themselves state of the model's config, under the keys of config.json.
    """

    path: Path
    modules: Mapping[str, Tensors]
    checkpoint: Path | None = None
    export: ExportManifest | None = None
    files: frozenset[str] = frozenset()
    omitted: Strings = ()
    side_files: Path | None = None
    stated_config: Values = field(default_factory=dict)

    def verify(self, level: Level, rank: int, num_ranks: int) -> None:
        """Compare this rank's share of the files with the manifest, if there is one.

        Raises :class:`CheckpointUnusable`, which lists all damage.
        """
        problems = []
        if self.checkpoint is not None:
            manifest = Manifest.read(self.checkpoint)
            problems = verify(self.checkpoint, manifest, level, rank=rank, num_ranks=num_ranks)
        elif self.export is not None:
            used = {*self.files, layout.HF_INDEX}
            problems = self.export.problems(only=used, level=level, rank=rank, num_ranks=num_ranks)
        CheckpointUnusable.check(problems)


def open_source(path: Path) -> Source:
    """Describe the model in *path*: a checkpoint, a module's directory in one, or a directory or file of another
    program.

    Weights with the names of Megatron, or of torchtitan's Llama, are described under a Hugging Face model's names if
    its config.json is in *path*. In a checkpoint of this program, symbolic links are not followed. In other
    directories, only those within the directory or to the Hub's cache. Raises :class:`CheckpointUnusable` if there is
    no model, the format is not supported, or the files contradict each other.
    """
    if is_checkpoint(path):
        return open_checkpoint(path)
    if path.is_file():
        return _open_file(path)
    directory = without_links(path)
    for place in (directory, directory / MODEL):
        if place.is_dir():
            check_links_of_weights(place)
    source = _open_external(directory)
    if source.misplaced:
        raise unusable(
            "the index names a tensor that is not in its file",
            source.model_directory / layout.HF_INDEX,
            source.misplaced[0],
        )
    return source


def open_base(directory: Path) -> Weights:
    """Describe the weights of a pretrained model in *directory* itself, even if a run has its checkpoints in it.

    Raises :class:`CheckpointUnusable` as :func:`open_weights` does.
    """
    return _open_resolved(without_links(directory))


def open_weights(path: AnyPath, config: Path | None = None) -> Weights:
    """Describe the weights in *path*: a run directory (its newest complete checkpoint), a checkpoint, a pointer to one,
    a module's directory in one, a directory of another program, or a single .safetensors file.

    Weights with the names of Megatron, or of torchtitan's Llama, are described under a Hugging Face model's names. The
    model's config.json is in the directory *config*, or else in *path*. Symbolic links are followed.
    Raises :class:`CheckpointUnusable` if there are no weights, the format is not supported, or the files contradict
    each other or the config.
    """
    given = Path(path).expanduser()
    is_pointer = given.name.removesuffix(".txt") in layout.POINTERS
    if given.is_file() and not is_pointer:
        return _weights_of(given, _open_file(given, config))
    return _open_resolved(_resolved(given), config)


def _open_resolved(found: Path, config: Path | None = None) -> Weights:
    # lexists(): a broken link must not let a checkpoint pass as files without digests.
    if has_manifest(found):
        return Weights(found, _modules_of(found), found)
    if has_manifest(found.parent):
        return Weights(found, {MODEL: _module_in(found)}, found.parent)
    return _weights_of(found, _open_external(found, config))


def _weights_of(path: Path, source: Source) -> Weights:
    module = Tensors(source.root, source.tensors, source.tied)
    return Weights(
        path,
        {MODEL: module},
        export=source.export,
        files=source.files,
        omitted=source.omitted,
        side_files=source.side_files,
        stated_config=source.stated_config,
    )


# ---------------------------------------------------------------- other programs


def _open_external(directory: Path, config: Path | None = None) -> Source:
    check_finished(directory)
    # A checkpoint of NeMo AutoModel, or of this program without its manifest, has the model in model/.
    for place in (directory, directory / MODEL):
        if not place.is_dir():
            continue
        known = detect(place)
        if known is not None:
            return _in_hugging_face_names(known.open(place), place, config)
        if any(name.endswith(".distcp") for name in names_in(place)):
            from automodel_ckpt.convert.formats.torch.dcp import PyTorchDcp

            return PyTorchDcp().open(place)  # raises an error: .metadata is missing
    try:
        os.listdir(directory)
    except OSError as error:
        raise unusable("the directory cannot be read", directory, error.strerror) from error
    raise unusable("there are no shards here", directory, "no *.safetensors file")


def _open_file(path: Path, config: Path | None = None) -> Source:
    try:
        # Links are followed: the user named this file.
        known = detect(path)
    except OSError as error:
        raise _unusable("the file cannot be read", path, error.strerror) from error
    assert known is not None, "the last format recognizes every file"
    return _in_hugging_face_names(known.open(path), path, config)


def _in_hugging_face_names(source: Source, path: Path, config: Path | None) -> Source:
    """Return *source* with the names of a Hugging Face model, if it has Megatron's or torchtitan's and the model is
    known."""
    if not any(name.endswith(_OTHER_NAMES) for name in source.tensors):
        return source
    from automodel_ckpt.convert.names.conversion import (
        conversion_in,
        has_megatron_names,
        required_conversion,
    )
    from automodel_ckpt.convert.names.torchtitan import (
        has_torchtitan_names,
        torchtitan_conversion,
    )

    directory = path if path.is_dir() else path.parent
    if has_torchtitan_names(source.tensors):
        found = torchtitan_conversion(config or directory)
    elif has_megatron_names(source.tensors):
        found = conversion_in(config or directory)
    else:
        return source
    if config is not None:
        found = required_conversion(found, config)
    if found is None:
        return replace(source, notes=(*source.notes, _OWN_NAMES))
    return replace(found.source(source), side_files=config or directory)


# ---------------------------------------------------------------- checkpoints of this program


def _resolved(path: Path) -> Path:
    """Return the checkpoint of a pointer or run directory; any other path without links."""
    path = without_links(resume.pointed_path(path) or path)
    if not path.is_dir():
        value = "a file, not a directory" if path.exists() else "no such directory"
        raise _unusable("there are no weights here", path, value)
    if has_manifest(path):
        return path
    newest = resume.newest(path)
    if newest is None:
        return path
    warning = resume.skipped_warning(path, newest)
    if warning is not None:
        log.warning("%s", warning)
    return path / newest.name


def _modules_of(checkpoint: Path) -> dict[str, Tensors]:
    """Return the modules of a checkpoint, without the average of its model."""
    manifest = Manifest.read(checkpoint)
    modules = {name: _module(checkpoint, manifest, name) for name in without_averages(manifest)}
    if not modules:
        value = ", ".join(manifest.state) or "no state"
        raise _unusable("this checkpoint holds no module", checkpoint, value)
    return modules


def _module(checkpoint: Path, manifest: Manifest, name: str) -> Tensors:
    """Return a module. Interleaved slices of a tensor become one, which is read in one go."""
    tree = manifest.trees[name]
    tensors = {
        fqn: replace(tensor, slices=contiguous_slices(tensor))
        for fqn, tensor in tree.tensors.items()
    }
    return Tensors(checkpoint, tensors, tree.tied)


def _module_in(directory: Path) -> Tensors:
    """Return the module that a checkpoint stores in *directory*."""
    checkpoint = directory.parent
    manifest = Manifest.read(checkpoint)
    name, _ = module_in(manifest, directory)
    module = _module(checkpoint, manifest, name)
    if not is_average(manifest, name):
        return module
    # Tensors that do not train are stored with the model.
    model = _module(checkpoint, manifest, MODEL)
    return replace(module, tensors={**model.tensors, **module.tensors}, tied=model.tied)
