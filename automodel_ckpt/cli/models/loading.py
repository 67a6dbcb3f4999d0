"""Load the model that a path describes, for generation: a checkpoint, an export, an adapter, or a name of the Hub."""

from __future__ import annotations

import shlex
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
)

from automodel_ckpt.base.hub_access import is_hub_name, resolve_commit
from automodel_ckpt.base.terminal import print_error
from automodel_ckpt.base.units import some_of
from automodel_ckpt.checkpoint.export.base_identity import (
    base_revision,
    find_base,
    identify_base,
    read_peft_record,
)
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.export.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.export.next_steps import computes_embeddings, try_command
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.parts.manifest import Manifest, has_manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.sources.model_files import GENERATION_CONFIG, check_directory
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.cli.common.paths import find_checkpoint, local_model
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from automodel_ckpt.models.build import with_attention_caps
from automodel_ckpt.models.inspect.interface import AutoMultimodalModel, naming_files
from automodel_ckpt.models.inspect.repository import check_sizes
from automodel_ckpt.training.parts.preprocessors import absent_tokenizer, check_vocabulary_file

MODEL = "model"
_HINT = (
    "name a checkpoint, an export, an adapter, or a model of the Hub; if its files have a value that is not valid, "
    "correct that"
)


@dataclass(frozen=True)
class LoadedModel:
    """A transformers *model* in evaluation mode, and its tokenizer, or its processor if it takes images.

    *name* is what was loaded, for messages.
    """

    name: str
    model: Any
    preprocessor: Any

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, also a processor's tokenizer."""
        return getattr(self.preprocessor, "tokenizer", self.preprocessor)


def load(
    path: str, *, base: str | None = None, device: str | None = None, dtype: str = "auto"
) -> LoadedModel:
    """Load the model of *path* to *device*, by default a GPU if there is one.

    Digests are verified. A checkpoint that has not been exported is exported to a temporary directory; an adapter is
    added to its base. *base* is the directory of the base if it was moved. *dtype* is the name of a torch dtype, or
    ``auto``: the dtype of the files. Code in the files is never executed. Raises :class:`CheckpointUnusable` or
    :class:`RecipeError` if there is no model, if it is damaged, or if transformers cannot load it.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(), _hugging_face_directory(path, base) as found:
        # peft uses names of transformers that will be removed; a user cannot change that.
        warnings.simplefilter("ignore", FutureWarning)
        options = {"dtype": dtype, "trust_remote_code": False}
        what = "transformers cannot load this model"
        with naming_files(what, path, hint=_HINT, kind=CheckpointUnusable):
            adapter = found.adapter
            if adapter is not None and (adapter / layout.ADAPTER_MODEL_CONFIG).is_file():
                head = adapter / layout.ADAPTER_MODEL_CONFIG
                _check_head(AutoConfig.from_pretrained(head, trust_remote_code=False), str(adapter))
            model = _model_of(found.model, options, found.revision)
            if adapter is not None:
                from peft import PeftModel

                if (adapter / GENERATION_CONFIG).is_file():
                    model.generation_config = GenerationConfig.from_pretrained(adapter)
                model = PeftModel.from_pretrained(model, str(adapter))
            preprocessor = _preprocessor_of(model, found)
    return LoadedModel(path, model.to(where).eval(), preprocessor)


@dataclass(frozen=True)
class _Files:
    """Where transformers loads from: *model* is a directory or a name of the Hub, and *adapter* a directory of peft."""

    model: str
    adapter: Path | None = None
    revision: str | None = None


@contextmanager
def _hugging_face_directory(path: str, base: str | None) -> Iterator[_Files]:
    """Yield the files of the model of *path*. Temporary files are removed afterwards."""
    local = local_model(path)
    if local is None:
        yield _Files(path)
        return
    found = _model_directory(local)
    if _is_loadable(found):
        check_directory(found)
        _verify(found)
        yield _files_of(found, found, base)
        return
    with tempfile.TemporaryDirectory(prefix="automodel_ckpt-") as directory:
        exported = Path(directory) / MODEL
        print_error(f"exporting {found} to a temporary directory; `ckpt export` keeps the files")
        consolidate(found, exported, log=lambda line: None, opener=_open_with_config)
        yield _files_of(exported, found, base)


def _open_with_config(path: Path) -> Source:
    """Open the files of a model. Raises :class:`CheckpointUnusable` if there are only weights."""
    source = open_source(path)
    directory = source.metadata_directory or source.side_files
    names = ("config.json", layout.ADAPTER_CONFIG)
    if directory is not None and any((directory / name).is_file() for name in names):
        return source
    command = f"ckpt import {shlex.quote(str(path))} RUN --config DIR"
    raise CheckpointUnusable(
        "these weights have no config.json, which describes the model",
        path,
        "no such file",
        f"`{command}` adds that of the original model in DIR, and its tokenizer; then name RUN",
    )


def _model_directory(path: Path) -> Path:
    """The directory or file with the model of *path*: for a run, the model of its newest checkpoint, or its export."""
    if _is_loadable(path):
        return path
    found = find_checkpoint(path)
    places = (found / MODEL / layout.CONSOLIDATED, found / MODEL, found / layout.CONSOLIDATED)
    return next(filter(_is_loadable, places), found)


def _is_loadable(directory: Path) -> bool:
    """Whether transformers or peft can load the files in *directory* as they are."""
    if (directory / layout.ADAPTER_CONFIG).is_file():
        return (directory / layout.ADAPTER_MODEL).is_file()
    return any(directory.glob("model*.safetensors")) and (directory / "config.json").is_file()


def _verify(directory: Path) -> None:
    """Raise :class:`CheckpointUnusable` if a file of an export, or of a checkpoint's model, is missing or damaged."""
    export = find_export_manifest(directory, follow_links=True)
    problems = []
    if export is not None:
        present = {name for name in export.files if (directory / name).exists()}
        weights = {name for name in export.files if name.endswith(".safetensors")}
        problems = export.problems(only=present | weights, level="digest")
    elif has_manifest(directory.parent):
        manifest = Manifest.read(directory.parent)
        names = [name for name in manifest.files if name.startswith(f"{directory.name}/")]
        files = {name: manifest.files[name] for name in names}
        problems = verify(directory.parent, replace(manifest, files=files), "digest")
    CheckpointUnusable.check(problems)


def _files_of(directory: Path, source: Path, base: str | None) -> _Files:
    """The files in *directory*, which were made of *source*. Finds the base of an adapter."""
    if not (directory / layout.ADAPTER_CONFIG).is_file():
        if base is not None:
            raise RecipeError("this model has no base: it is no adapter", "--base", base)
        return _Files(str(directory))
    config = read_json(directory, layout.ADAPTER_CONFIG) or {}
    stated = config.get("base_model_name_or_path")
    record, run = _peft_record(source)
    recorded = find_base(record, run) if record is not None else None
    name = base or recorded or stated
    if not isinstance(name, str) or not name:
        raise CheckpointUnusable(
            "the adapter does not state its base",
            directory / layout.ADAPTER_CONFIG,
            stated,
            "name the directory of the base with --base",
        )
    where = directory / layout.ADAPTER_CONFIG
    revision = base_revision(config, where) if name == stated else None
    if is_hub_name(name):
        # One request instead of the library's retries, with an error that states what to do.
        revision = resolve_commit(name, revision, where=str(where))
    elif record is not None and Path(name).is_dir():
        digest = record["base"].get("digest")
        if digest not in (None, identify_base(name, Path(name), run=run).digest):
            # An adapter on another base of the same shapes is loaded, and answers nonsense.
            print_error(
                f"warning: {name} is not the base that the adapter was trained on: its files differ"
            )
    return _Files(name, directory, revision)


def _peft_record(source: Path) -> tuple[ValueDict | None, Path]:
    """What a checkpoint of this program records about its adapter and its base, and the run; None for other files."""
    for checkpoint, name in ((source, MODEL), (source.parent, source.name)):
        with suppress(CheckpointUnusable):
            return read_peft_record(checkpoint, name), checkpoint.parent
    return None, source


def _model_of(name: str, options: ValueDict, revision: str | None) -> Any:
    check_sizes(PreTrainedConfig.get_config_dict(name, revision=revision)[0], name)
    config = AutoConfig.from_pretrained(name, trust_remote_code=False, revision=revision)
    _check_head(config, name)
    # Private in transformers 5.17 to 5.24.
    seq2seq: Any = AutoModelForSeq2SeqLM._model_mapping
    model_class: Any = AutoModelForCausalLM
    if config.is_encoder_decoder and type(config) in seq2seq:
        model_class = AutoModelForSeq2SeqLM
    elif type(config) not in AutoModelForCausalLM._model_mapping or _takes_images(config):
        model_class = AutoMultimodalModel
    model, info = model_class.from_pretrained(
        name,
        config=with_attention_caps(config),
        use_safetensors=True,
        revision=revision,
        output_loading_info=True,
        **options,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers has drawn random values for them.
        raise CheckpointUnusable(
            "these files are not a whole language model: weights are missing",
            name,
            some_of(missing, 1),
            "use a model with its output layer; a backbone or a model of text embeddings generates no text",
        )
    return model


def _check_head(config: Any, where: str) -> None:
    """Raise :class:`RecipeError` for a model that gives embeddings, labels or numbers to texts."""
    directory = Path(where)
    hint = f'use transformers.pipeline("text-classification", model={where!r})'
    kinds = [
        name
        for name in getattr(config, "architectures", None) or ()
        if name.endswith("ForSequenceClassification")
    ]
    if computes_embeddings(directory):
        kinds = ["modules.json, the file of sentence-transformers"]
        hint = f"use {try_command(directory)}"
    if kinds:
        raise RecipeError(
            "this model computes embeddings, labels or numbers of texts, and generates none",
            where,
            kinds[0],
            hint,
        )


def _takes_images(config: Any) -> bool:
    """Whether the model of a config takes images; a few (Fuyu, Chameleon, Emu3) have no ``vision_config``."""
    # Private in transformers 5.17 to 5.24.
    mapping: Any = AutoModelForImageTextToText._model_mapping
    if type(config) not in mapping:
        return False
    if getattr(config, "vision_config", None) is not None:
        return True
    return mapping[type(config)].__name__ in (getattr(config, "architectures", None) or ())


def _preprocessor_of(model: Any, found: _Files) -> Any:
    """The tokenizer or processor next to the adapter, if there is one, or else next to the model."""
    auto: Any = transformers.AutoTokenizer
    if _takes_images(model.config):
        auto = transformers.AutoProcessor
    places = [found.model]
    if found.adapter is not None and any(found.adapter.glob("tokenizer*")):
        places.insert(0, str(found.adapter))
    revision = found.revision if places[0] == found.model else None
    try:
        found = auto.from_pretrained(places[0], trust_remote_code=False, revision=revision)
        # Without files, transformers may return a tokenizer that has no tokens.
        return check_vocabulary_file(found, places[0])
    except Exception as error:
        absent = absent_tokenizer(places[0], places[0])
        if absent is None:
            raise
        hint = (
            "copy the files of the original model there; `ckpt import SOURCE RUN --config DIR` adds those in DIR to "
            "weights of another program"
        )
        what = "there is no tokenizer beside the model"
        problems = [replace(problem, what=what, hint=hint) for problem in absent.problems]
        raise CheckpointUnusable.all_of(problems) from error
