"""Models whose config.json ties weights that their files contain twice, with different values."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def note_untied(model: Any, name: str) -> None:
    """Let the config of a *model* that was read from *name* state that its weights are not tied, where they are not.

    transformers does not tie weights whose values differ in the files, whatever the config states, and other programs
    that read the config would lose one of them. If only some of the weights of a model differ, the config stays as it
    is: it has one setting for all.
    """
    expected = model.get_expanded_tied_weights_keys(all_submodels=True)
    apart = {
        alias: source
        for alias, source in expected.items()
        if alias not in model.all_tied_weights_keys
    }
    if not apart:
        return
    outcome = "they are trained and exported as two tensors"
    if not model.all_tied_weights_keys:
        for config in {
            id(each): each for each in (model.config, model.config.get_text_config())
        }.values():
            config.tie_word_embeddings = False
        outcome += ", and config.json of exports has tie_word_embeddings: false"
    pairs = ", ".join(f"{alias} and {source}" for alias, source in apart.items())
    log.warning(
        "%s: config.json ties %s, but the files have different values: %s", name, pairs, outcome
    )
