"""``ckpt-train --show-samples N``: print samples as they are trained, and how long the samples are."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from automodel_ckpt.base.terminal import colored, printable_lines
from automodel_ckpt.base.units import counted
from automodel_ckpt.config.load import LoadedRecipe

if TYPE_CHECKING:
    from automodel_ckpt.training.recipe import Recipe
    from automodel_ckpt.training.sample_preview import PreviewSample

BEGIN, END = ">>>", "<<<"
"""Text around trained tokens where there is no color."""
# The placeholders of an image: hundreds of the same token.
_REPEATED = re.compile(r"(<[^<>\s]{2,40}>|\[[A-Z_]{2,40}\])\1{7,}")


def report(loaded: LoadedRecipe, recipe_class: type[Recipe], num_samples: int) -> Iterator[str]:
    """Yield the lines about the first *num_samples* samples of a recipe, and about all of them.

    Raises :class:`RecipeError` if the data cannot be built.
    """
    from automodel_ckpt.training.sample_preview import built_data, first_samples, spans, summary

    recipe = built_data(recipe_class, {"config": loaded.config, "config_yaml": loaded.to_yaml()})
    has_colors = colored("x", "green", sys.stdout) != "x"
    trained = "green" if has_colors else f"between {BEGIN} and {END}"
    samples = list(first_samples(recipe, num_samples))
    if not any(sample.label for sample in samples):
        yield f"trained tokens are {trained}"
    for sample in samples:
        yield ""
        yield from _sample_lines(sample, spans(recipe.preprocessor, sample), has_colors=has_colors)
    yield ""
    yield from (f"{title:10} {text}" for title, text in summary(recipe))


def _sample_lines(
    sample: PreviewSample, spans: Iterable[tuple[str, bool]], *, has_colors: bool
) -> Iterator[str]:
    labeled = f"{sample.num_labels:,} trained" if not sample.label else f"label {sample.label}"
    title = f"sample {sample.number}: {counted(len(sample.tokens), 'token')}, {labeled}"
    yield colored(title, "bold", sys.stdout)
    parts = []
    for span, is_trained in spans:
        text = printable_lines(_REPEATED.sub(_shortened, span))
        if is_trained and has_colors:
            # Colored line by line, because a pager forgets colors at the end of a line.
            text = "\n".join([colored(line, "green", sys.stdout) for line in text.split("\n")])
        elif is_trained:
            text = f"{BEGIN}{text}{END}"
        parts.append(text)
    yield "".join(parts)


def _shortened(match: re.Match[str]) -> str:
    """A repeated token with the number of its repetitions."""
    return f"{match[1]}x{len(match[0]) // len(match[1])}"
