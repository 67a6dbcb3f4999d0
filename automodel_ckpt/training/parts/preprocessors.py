"""Reading a recipe's tokenizer or processor, the chat template of its data, and where text that it generates ends."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from automodel_ckpt.base.hub_access import explained
from automodel_ckpt.base.other_weights import LFS_HINT
from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.checkpoint.sources.model_files import GENERATION_CONFIG, read_files
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.config.callables.trust import trusts_remote_code
from automodel_ckpt.config.keys.data import PROCESSOR_SETTINGS
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.samples.encoder import encode_one
from automodel_ckpt.data.samples.samples import RowStream
from automodel_ckpt.data.samples.tokenized import TokenizedDataset
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import first_line
from automodel_ckpt.models.inspect.repository import (
    RepositoryOptions,
    asks_for_code,
    check_revision,
    code_not_trusted,
    damaged_config,
    lfs_pointer,
    reject_other_weights,
    require_local,
)
from automodel_ckpt.training.model.sections import preprocessor_options, text_tokenizer

if TYPE_CHECKING:
    from automodel_ckpt.data.conversations.chat_renderer import ChatRenderer

log = logging.getLogger("automodel_ckpt")

_BASE = "model.from_pretrained"
_VOCABULARY = (
    r"^(tokenizer\.json|tekken\.json|(vocab|bpe|merges)\b.*)$|\.(model|tiktoken|spm|vocab|bpe)$"
)
"""The names of files with the vocabulary of a tokenizer, by any of the libraries that transformers reads."""
_NUM_SHOWN = 8


def find_preprocessor(
    config: RecipeConfig, key: Literal["tokenizer", "processor"]
) -> tuple[str | None, str]:
    """(directory or Hub name, dotted key that gives it) of the section *key*, else of the pretrained model.

    The name is None when neither gives one. Raises :class:`RecipeError` for a path that does not exist, and
    :class:`CheckpointUnusable` for an export with damaged files.
    """
    name, where = getattr(config, key).from_pretrained, f"{key}.from_pretrained"
    if name is None and isinstance(config.model, ModelConfig):
        name, where = config.model.from_pretrained, _BASE
    if name is not None:
        require_local(name, where)
        revision = preprocessor_options(config, name, where).revision
        if where != _BASE:
            check_revision(name, revision, f"{key}.revision", where)
        from automodel_ckpt.training.model.pretrained_files import verify_side_files

        verify_side_files(name, config.checkpoint.verify, revision)
    return name, where


def check_vocabulary_file(preprocessor: Any, where: str) -> Any:
    """Return *preprocessor*, a tokenizer or processor that the key *where* gives.

    Raises :class:`RecipeError` if it was read from a directory without a vocabulary: transformers returns a tokenizer
    without tokens then. Tokenizers of bytes have no such file.
    """
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    names = (getattr(tokenizer, "vocab_files_names", None) or {}).values()
    directory = Path(getattr(tokenizer, "name_or_path", None) or "")
    has_one = not names or any((directory / str(name)).exists() for name in names)
    absent = None if has_one else absent_tokenizer(str(directory), where)
    if absent is not None:
        raise absent
    return preprocessor


def absent_tokenizer(name: str, where: str) -> RecipeError | None:
    """Return the error to raise if the directory *name*, which the key *where* gives, lacks a tokenizer's vocabulary.

    None for a Hub name, and for a directory that has one: the library's own error describes what is wrong with it.
    """
    directory = Path(name).expanduser()
    if not directory.is_dir():
        return None
    files = sorted(path.name for path in directory.iterdir())
    if any(re.search(_VOCABULARY, file) for file in files):
        return None
    listed = ", ".join(files[:_NUM_SHOWN])
    more = ", ..." if len(files) > _NUM_SHOWN else ""
    if where == _BASE:
        reject_other_weights(name, where)
    if where == _BASE and "config.json" not in files:
        return RecipeError(
            "the directory has no model: config.json is not there",
            where=where,
            value=f"{name} has {listed or 'no files'}{more}",
        )
    return RecipeError(
        "the directory has no tokenizer",
        where=where,
        value=f"{name} has {listed or 'no files'}{more}",
        hint="copy the tokenizer's files of the original model there; or set tokenizer.from_pretrained (for images: "
        "processor.from_pretrained) to a directory with tokenizer.json, or to a Hub name; for data that is tokenized "
        "already: tokenizer: null",
    )


_PROCESSOR_HINT = (
    "name a directory with processor files, and install the libraries that its processor asks for "
    "(pip install 'automodel_ckpt[vision]', and torchvision where it is named)"
)


@contextmanager
def reading(
    kind: str, name: str, where: str, repository: RepositoryOptions, hint: str
) -> Iterator[None]:
    """Raise :class:`RecipeError` for what fails when a tokenizer or processor, the *kind*, is read from *name*.

    The key *where* gives the name. *hint* is what to do if the cause is not known.
    """
    try:
        yield
    except Exception as error:  # for damaged files, libraries raise anything
        if asks_for_code(error):
            raise code_not_trusted(kind, name, where, repository) from error
        known = explained(error, name, where) or damaged_config(name, where, repository.revision)
        if known is None and kind == "tokenizer":
            known = absent_tokenizer(name, where)
            pointer = lfs_pointer(name, "tokenizer*", "*.json")
            if known is None and pointer is not None:
                what = "a file of the tokenizer is damaged"
                known = RecipeError(what, where=where, value=pointer, hint=LFS_HINT)
        what, value = f"the {kind} cannot be read", f"{name} ({first_line(error, 3)})"
        raise known or RecipeError(what, where=where, value=value, hint=hint) from error


_AUTO_PROCESSOR = "transformers.AutoProcessor.from_pretrained"


def build_processor(config: RecipeConfig) -> Any:
    """Build the ``processor`` section, else the pretrained model's own processor.

    A callable of a trusted package is called as it is. ``transformers.AutoProcessor.from_pretrained`` is the same as
    ``processor.from_pretrained`` with ``processor.kwargs``. Raises :class:`RecipeError` if it cannot be read, lacks a
    setting, or does not take text with images or audio.
    """
    from automodel_ckpt.models.processor import read_processor, unknown_settings

    section: Any = config.processor
    is_target, settings, where = isinstance(section, Target), dict(section.kwargs), "processor"
    if is_target and section._target_ != _AUTO_PROCESSOR:
        processor = build(section)
        check_processor(processor, where)
        return check_vocabulary_file(processor, where)
    if is_target:
        where = "processor.pretrained_model_name_or_path"
        name = str(settings.pop("pretrained_model_name_or_path", ""))
        require_local(name, where)
        repository = RepositoryOptions(
            settings.pop("revision", None),
            requests_code=settings.pop("trust_remote_code", False) is True,
            trusts_code=trusts_remote_code(),
        )
    else:
        found, where = find_preprocessor(config, "processor")
        if found is None:
            hint = "give processor.from_pretrained, or a builder in processor._target_"
            raise RecipeError("there is no processor", where="processor", value=None, hint=hint)
        name, repository = found, preprocessor_options(config, found, where)
    with reading("processor", name, where, repository, _PROCESSOR_HINT):
        processor = read_processor(os.path.expanduser(name), repository, settings)
    check_processor(processor, where)
    unknown = unknown_settings(processor, set(settings) & PROCESSOR_SETTINGS)
    if unknown:
        raise RecipeError(
            "this processor does not have these settings",
            where="processor",
            value=f"{', '.join(unknown)}; {type(processor).__name__}",
        )
    return check_vocabulary_file(processor, where)


def check_processor(processor: Any, where: str) -> None:
    """Raise :class:`RecipeError` unless *processor*, which the key *where* gives, takes text and media."""
    from automodel_ckpt.data.media.media_files import AUDIO, media_of, takes_audio_with_text

    media = media_of(processor)
    what = "this processor does not take both text and images or audio"
    hint = "name the processor of a model of images or audio; a language model is trained by recipe: llm_finetune"
    if media == {AUDIO} and not takes_audio_with_text(processor):
        what = "this processor does not take text and audio in one call"
        hint = "give a function in processor._target_ that returns a subclass with __call__(text, audio, ...)"
    elif media and hasattr(processor, "tokenizer"):
        return
    raise RecipeError(what, where=where, value=type(processor).__name__, hint=hint)


_NUM_EXAMINED = 64
"""How many samples of a data set show where an answer ends."""


def set_generation(recipe: Any) -> list[int]:
    """Let text that *recipe*'s model generates have the chat template of the data, and end where its answers do.

    Returns the tokens that end it in addition to the base's end tokens.
    """
    section, preprocessor = recipe.config.dataset, getattr(recipe, "preprocessor", None)
    use_chat_template(section, preprocessor)
    loader = getattr(recipe, "dataloader", None)
    if loader is None:
        return []
    return add_stop_tokens(section, loader.dataset, preprocessor, unwrap(recipe.model))


def use_chat_template(section: Any, preprocessor: Any) -> None:
    """Give *preprocessor* the chat template that the data *section* of the recipe gives, which the model is trained on.

    Text is then generated with it, and exports contain it. Logs a warning if the sections of several data sets give
    different ones.
    """
    sections = list(_with_template(section))
    if not sections or preprocessor is None:
        return
    from automodel_ckpt.data.conversations.template_choice import read_template

    given = {read_template(each.kwargs["chat_template"]) for each in sections}
    if len(given) > 1:
        log.warning(
            "the data sets of this recipe have %d chat templates: exports keep the tokenizer's own",
            len(given),
        )
        return
    [template] = given
    for part in {id(part): part for part in (preprocessor, text_tokenizer(preprocessor))}.values():
        part.chat_template = template


def add_stop_tokens(section: Any, dataset: Any, preprocessor: Any, model: Any) -> list[int]:
    """Let text that *model* generates end with the tokens that end the answers of *dataset*, which *section* describes.

    Returns the tokens that its generation config did not have. Logs them, or a warning if answers that the recipe's
    chat template writes end with none.
    """
    config = getattr(model, "generation_config", None)
    tokenizer = text_tokenizer(preprocessor)
    if config is None or tokenizer is None:
        return []
    ends = {end for part in _parts(dataset) for end in _ends_of(part, tokenizer)}
    targets = list(_with_template(section))
    for target in targets:
        from automodel_ckpt.data.conversations.chat_renderer import ChatRenderer
        from automodel_ckpt.data.conversations.template_choice import read_template

        template = read_template(target.kwargs["chat_template"])
        variables = target.kwargs.get("template_kwargs") or {}
        ends.update(_ends_of_template(ChatRenderer(preprocessor, template, variables), tokenizer))
    known = config.eos_token_id
    before = list(known) if isinstance(known, list) else [known] * (known is not None)
    added = sorted(ends.difference(before))
    if added:
        config.eos_token_id = [*before, *added] if len(before + added) > 1 else added[0]
        names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(added)))
        log.debug("generated text also ends with %s, as the answers of the data do", names)
    elif targets and not ends:
        log.warning(
            "no special token ends the answers that dataset.chat_template writes: text that the trained model "
            "generates will not end with them"
        )
    return added


def generation_file(model: Any, base_dir: Path | None) -> dict[str, bytes]:
    """Return generation_config.json of *model*, by its name: the base's own with other end tokens, if it has one."""
    config = model.generation_config
    content = config.to_diff_dict()
    if base_dir is not None:
        for raw in read_files(base_dir, (GENERATION_CONFIG,)).values():
            content = {**parse_json(raw), "eos_token_id": config.eos_token_id}
    return {GENERATION_CONFIG: (json.dumps(content, indent=2) + "\n").encode()}


def _with_template(section: Any) -> Iterator[Target]:
    """Yield *section* and those below it, for a mixture, that give a chat template of the user."""
    if isinstance(section, Mapping):
        section = Target(kwargs=dict(section))
    if not isinstance(section, Target):
        return
    if section.kwargs.get("chat_template") not in (None, "original", "training"):
        yield section
    sources = section.kwargs.get("sources")
    for source in sources.values() if isinstance(sources, Mapping) else ():
        yield from _with_template(source)


def _parts(dataset: Any) -> Iterator[Any]:
    """Yield the data sets that *dataset* consists of: the sources of a mixture, the samples of packs."""
    sources = getattr(dataset, "sources", None)
    inner = list(sources.values()) if isinstance(sources, Mapping) else []
    if hasattr(dataset, "dataset"):
        inner.append(dataset.dataset)
    if not inner:
        yield dataset
    for part in inner:
        yield from _parts(part)


def _ends_of(dataset: Any, tokenizer: Any) -> set[int]:
    """The special tokens that end samples of *dataset* and have labels, without what is blank after them."""
    template = getattr(dataset, "template", None)
    renderer = getattr(template, "renderer", None)
    if renderer is None and isinstance(dataset, RowStream) and template:
        from automodel_ckpt.data.conversations.chat_renderer import ChatRenderer

        renderer = ChatRenderer(tokenizer, str(tokenizer.get_chat_template()), {})
    if renderer is not None:
        return _ends_of_template(renderer, tokenizer)
    if not isinstance(dataset, TokenizedDataset) or not len(dataset.ends):
        return set()
    special = _special(tokenizer)
    found: Counter[int] = Counter()
    for number in np.linspace(0, len(dataset.ends) - 1, _NUM_EXAMINED, dtype=np.int64):
        span = dataset.span(number)
        tokens, labelled = dataset.tokens[span].tolist(), dataset.labelled[span]
        while tokens and tokens[-1] not in special and not tokenizer.decode(tokens[-1:]).strip():
            tokens.pop()
        if tokens and labelled[len(tokens) - 1]:
            found[tokens[-1]] += 1
    # A sample that was truncated can end with any token.
    return special.intersection(end for end, count in found.items() if count >= _NUM_EXAMINED / 10)


def _ends_of_template(renderer: ChatRenderer, tokenizer: Any) -> set[int]:
    """The special token that *renderer* writes after an answer. Empty if it writes text first."""
    end = renderer.end_of_turn.strip()
    first = encode_one(tokenizer, end)[:1] if end else []
    return set(first) & _special(tokenizer)


def _special(tokenizer: Any) -> set[int]:
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
