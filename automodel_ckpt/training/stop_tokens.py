"""Where text that the trained model generates ends, and the chat template that it was trained with."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.checkpoint.sources.model_files import GENERATION_CONFIG, read_files
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.samples.encoder import encode_one
from automodel_ckpt.data.samples.samples import RowStream
from automodel_ckpt.data.samples.tokenized import TokenizedDataset
from automodel_ckpt.training.model.sections import text_tokenizer

if TYPE_CHECKING:
    from automodel_ckpt.data.conversations.chat_renderer import ChatRenderer

log = logging.getLogger("automodel_ckpt")

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
    """The tokens that end samples of *dataset* and have labels, without what is blank after them."""
    template = getattr(dataset, "template", None)
    renderer = getattr(template, "renderer", None)
    if renderer is not None:
        return _ends_of_template(renderer, tokenizer)
    if isinstance(dataset, RowStream) and template:
        from automodel_ckpt.data.conversations.chat_renderer import ChatRenderer

        renderer = ChatRenderer(tokenizer, str(tokenizer.get_chat_template()), {})
        return _ends_of_template(renderer, tokenizer)
    if not isinstance(dataset, TokenizedDataset) or not len(dataset.ends):
        return set()
    found: Counter[int] = Counter()
    added = _special(tokenizer)
    for number in np.linspace(0, len(dataset.ends) - 1, _NUM_EXAMINED, dtype=np.int64):
        span = dataset.span(number)
        tokens, labelled = dataset.tokens[span].tolist(), dataset.labelled[span]
        last = len(tokens) - 1
        while (
            last > 0 and tokens[last] not in added and not tokenizer.decode([tokens[last]]).strip()
        ):
            last -= 1
        if last >= 0 and labelled[last] and tokens[last] in added:
            found[tokens[last]] += 1
    # A sample that was truncated can end with any token.
    return {end for end, count in found.items() if count >= _NUM_EXAMINED / 10}


def _ends_of_template(renderer: ChatRenderer, tokenizer: Any) -> set[int]:
    """The special token that *renderer* writes after an answer. Empty if it writes text first."""
    end = renderer.end_of_turn.strip()
    first = encode_one(tokenizer, end)[:1] if end else []
    return set(first) & _special(tokenizer)


def _special(tokenizer: Any) -> set[int]:
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
