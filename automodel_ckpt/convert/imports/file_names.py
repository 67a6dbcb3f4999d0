"""Steps, epochs and metrics in the names of checkpoints of other programs. Pure functions: no file is opened.

Names that programs give (sources: ModelCheckpoint of lightning 2.6; NeMo-Aligner's checkpoint callback; training
scripts):

* ``epoch=3-step=100.ckpt``, ``last.ckpt``;
* ``megatron_gpt--val_loss=0.432-step=1000-consumed_samples=32000.0.ckpt``, and the same with ``-last``;
* ``checkpoint_step_10000_loss_2.3456.pt``, ``model_epoch_3_acc_0.91.pth``;
* ``checkpoint-500``, ``global_step1000``, ``iter_0000020``: a number of steps.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from automodel_ckpt.checkpoint.files.type_aliases import Metrics, Strings
from automodel_ckpt.convert.formats.format import Counters

_SUFFIX = re.compile(r"\.(ckpt|pt|pth|bin|nemo|tar|safetensors)$")
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|nan|inf|-inf"
# "key=value": the key is what precedes the sign, back to a character that no key contains.
_PAIR = re.compile(rf"([A-Za-z][A-Za-z0-9_./@]*)=({_NUMBER})(?![A-Za-z0-9])")
# "word_word_value", with underscores or hyphens; a version such as v2 is not a number.
_WORDS = re.compile(
    rf"(?:^|[_-])((?:[A-Za-z][A-Za-z0-9]*[_-])*?[A-Za-z]+)[_-]({_NUMBER})(?=[_-]|$)"
)
_STEP_ONLY = re.compile(r"^(?:checkpoint|ckpt|step|global_?step|iter)[-_]?(\d+)$")
_LAST = re.compile(r"(?:^|[-_])last(?:-v\d+)?$")
_MAX_COUNT = 2**62
_COUNTERS = {
    "step": "step",
    "steps": "step",
    "global_step": "step",
    "iter": "step",
    "epoch": "epoch",
    "consumed_samples": "consumed_samples",
}
_LOWER_IS_BETTER = ("loss", "ppl", "perplexity", "error", "wer", "cer", "mse", "mae", "rmse")
_HIGHER_IS_BETTER = ("acc", "accuracy", "bleu", "f1", "rouge", "reward", "score", "auc")
# Words before the name of a metric that do not belong to it.
_SPLITS = frozenset(["val", "valid", "validation", "eval", "test", "train", "best", "mean", "avg"])


@dataclass(frozen=True)
class NameMetadata(Counters):
    """What the name of a checkpoint states: None or no metric for what it does not state.

    *is_last* means that the program marked it as its last checkpoint.
    """

    metrics: Metrics = field(default_factory=dict)
    is_last: bool = False


@dataclass(frozen=True)
class Ranking:
    """Checkpoints by the metric that their names state, the best one first."""

    metric: str
    names: Strings

    @property
    def label(self) -> str:
        """The best one in words, for example ``lowest val_loss``."""
        return f"{'lowest' if is_lower_better(self.metric) else 'highest'} {self.metric}"


def parse_name(name: str) -> NameMetadata:
    """Return what the name of a file or directory states. Never raises."""
    stem = _SUFFIX.sub("", name)
    is_last = _LAST.search(stem) is not None
    stem = _LAST.sub("", stem)
    pairs = _PAIR.findall(stem)
    if not pairs:
        pairs = _pairs_of_words(stem)
    counters: dict[str, int] = {}
    metrics = {}
    for key, text in pairs:
        counter = _COUNTERS.get(key)
        if counter is None:
            metrics[key] = float(text)
        elif (count := _count(text)) is not None:
            counters.setdefault(counter, count)
    return NameMetadata(**counters, metrics=metrics, is_last=is_last)


def _pairs_of_words(stem: str) -> list[tuple[str, str]]:
    """Return the pairs in a name with parts joined by underscores or hyphens.

    A number counts only after the name of a counter or of a usual metric: ``llama_3_8b`` states nothing.
    """
    step_only = _STEP_ONLY.match(stem)
    if step_only is not None:
        return [("step", step_only.group(1))]
    pairs = []
    for text, number in _WORDS.findall(stem):
        words = re.split("[_-]", text)
        last = words[-1]
        before = words[-2] if len(words) > 1 else ""
        if f"{before}_{last}" in _COUNTERS:
            pairs.append((f"{before}_{last}", number))
        elif last in _COUNTERS:
            pairs.append((last, number))
        elif last in (*_LOWER_IS_BETTER, *_HIGHER_IS_BETTER):
            pairs.append((f"{before}_{last}" if before in _SPLITS else last, number))
    return pairs


def _count(text: str) -> int | None:
    """Return a count, which some programs write as a float (``32000.0``), or None for any other number."""
    value = float(text)
    if not math.isfinite(value) or not 0 <= value <= _MAX_COUNT or not value.is_integer():
        return None
    # Not int(value): a float loses digits of large counts.
    return int(text) if text.isdigit() else int(value)


def is_lower_better(metric: str) -> bool:
    """Whether a lower value of the metric is better, by its name; for unknown names False."""
    return metric.lower().endswith(_LOWER_IS_BETTER)


def rank(metadata: Mapping[str, NameMetadata]) -> Ranking | None:
    """Rank checkpoints, by name, by the metric that most of them state; one of validation first. None without one.

    Values that are not numbers are last. A checkpoint without the metric is not in the ranking.
    """
    counts = Counter(metric for found in metadata.values() for metric in found.metrics)
    if not counts:
        return None
    metric = max(counts, key=lambda name: (counts[name], name.startswith("val"), name))
    sign = 1.0 if is_lower_better(metric) else -1.0
    ranked = []
    for name, found in metadata.items():
        value = found.metrics.get(metric)
        if value is not None:
            is_nan = math.isnan(value)
            ranked.append((is_nan, 0.0 if is_nan else sign * value, name))
    return Ranking(metric, tuple(name for _, _, name in sorted(ranked)))


def last_of(metadata: Mapping[str, NameMetadata]) -> Sequence[str]:
    """Return the checkpoints that are marked as last; if none is, those with the highest step."""
    marked = [name for name, found in metadata.items() if found.is_last]
    if marked:
        return marked
    steps = {name: found.step for name, found in metadata.items() if found.step is not None}
    newest = max(steps.values(), default=None)
    return [name for name, step in steps.items() if step == newest]
