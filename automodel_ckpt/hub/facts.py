"""What a model card states about a run, from the checkpoint and the logs beside it, without paths of this machine."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.base.hub_access import cached_commit, is_hub_name
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.run.late_validations import recall
from automodel_ckpt.config.help.changes import saved_recipe
from automodel_ckpt.errors import AutomodelError
from automodel_ckpt.hub.bundle import Bundle
from automodel_ckpt.logs.history import BENCHMARK, VALIDATED, Series, read_history

_UNSET = frozenset({"null", "[]", "{}", "''", "", "auto", "false"})
_DATA = re.compile(
    r"((?:validation_)?dataset|validation_datasets\.[\w-]+)\.(?:.*\.)?path(?:\.\d+)?"
)
_SETTINGS = re.compile(
    r"seed|clip_grad_norm|model\.dtype|dataset\.seq_length|(optimizer|lr_scheduler|peft|packed_sequence|qat|fp8|ema"
    r"|dpo|kto|orpo|distill|embedding|classification|reward_model|reranker|pretrain)\..+"
    r"|step_scheduler\.(global_batch_size|local_batch_size|num_epochs|max_steps)"
    r"|distributed\.(strategy|\w+_size|mixed_precision)"
)
_DEFAULTS = frozenset({"distributed.dp_replicate_size=1", "optimizer.on_resume=checkpoint"}) | {
    f"distributed.{name}_size=1" for name in ("tp", "pp", "cp", "ep")
}
_LIST_INDEX = re.compile(r"(.+)\.\d+")


@dataclass(frozen=True)
class Facts:
    """A run as a model card describes it. Everything may be unknown, for a model without its checkpoint.

    *recipe* maps dotted keys to values as text. *base* is the name of the base model on the Hub, and *base_commit* its
    commit. *has_base*: the model was not trained from scratch. *measures* are the results of validations and benchmarks
    at the checkpoint's step.
    """

    recipe: Mapping[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None
    series: Mapping[str, Series] = field(default_factory=dict)
    base: str | None = None
    base_commit: str | None = None
    has_base: bool = False
    measures: Mapping[str, float] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name of the recipe; empty for a custom one, whose name may be a path."""
        name = self.recipe.get("recipe", "")
        return name if re.fullmatch(r"\w+", name) else ""

    def data_sets(self) -> Iterator[tuple[str, str, bool]]:
        """Yield (section, name, whether it is on the Hub) of the data; a local file has only the name of the file."""
        seen = set()
        for key, value in self.recipe.items():
            found = _DATA.fullmatch(key)
            if found and value not in _UNSET:
                seen.add(found[1])
                path = _unquoted(value)
                is_on_hub = is_hub_name(path) and "/" in path and not os.path.splitext(path)[1]
                # The last part of a local path does not contain the name of a user or a machine.
                name = path if is_on_hub else path.rstrip("/").rpartition("/")[2]
                yield found[1], name or "local data", is_on_hub
        for section in ("dataset", "validation_dataset"):
            target = self.recipe.get(f"{section}._target_")
            if target is not None and section not in seen:
                yield section, _unquoted(target).rpartition(".")[2], False

    def settings(self) -> dict[str, str]:
        """The hyperparameters of the recipe, by dotted key."""
        found: dict[str, str] = {}
        for key, value in self.recipe.items():
            if value in _UNSET or not _SETTINGS.fullmatch(key) or f"{key}={value}" in _DEFAULTS:
                continue
            text = _unquoted(value)
            # It may be a path of this machine, or a reference to its environment.
            if any(part in text for part in ("/", "\\", "~", "${")):
                continue
            item = _LIST_INDEX.fullmatch(key)
            name = item[1] if item else key
            found[name] = f"{found[name]}, {text}" if item and name in found else text
        return found


def facts_of(bundle: Bundle, base_model: str | None = None) -> Facts:
    """Read what is known of the model in *bundle*. *base_model* is the name of its base on the Hub, if given."""
    checkpoint = bundle.checkpoint
    if checkpoint is None:
        named = base_model or _hub_base(bundle, {}, {})
        return Facts(base=named, has_base=bundle.is_adapter or named is not None)
    manifest = Manifest.read(checkpoint)
    try:
        recipe = saved_recipe(checkpoint / layout.CONFIG)
    except AutomodelError:
        recipe = {}
    base = base_model or _hub_base(bundle, recipe, manifest.environment)
    recorded, _, commit = str(manifest.environment.get("base_commit", "")).partition("@")
    starts = (recipe.get("model.from_pretrained"), recipe.get("init_from.path"))
    series = _series(checkpoint.parent, manifest.step)
    return Facts(
        recipe=recipe,
        manifest=manifest,
        series=series,
        base=base,
        base_commit=commit if base is not None and recorded == base else None,
        has_base=bundle.is_adapter or any(name and name not in _UNSET for name in starts),
        measures=_measures(checkpoint, manifest, series),
    )


def _hub_base(
    bundle: Bundle, recipe: Mapping[str, str], environment: Mapping[str, Any]
) -> str | None:
    """The name of the base on the Hub; None for a local directory, or if it is not certain."""
    recorded = str(environment.get("base_commit", "")).partition("@")[0]
    if recorded:
        return recorded
    if bundle.base is not None:
        return None
    if bundle.is_adapter:
        name = str(bundle.read(layout.ADAPTER_CONFIG).get("base_model_name_or_path") or "")
        return name if is_hub_name(name) else None
    name = _unquoted(recipe.get("model.from_pretrained", ""))
    # A relative path looks the same, if this is another directory than that of the run.
    return name if name and is_hub_name(name) and cached_commit(name) else None


def _series(run: Path, step: int) -> dict[str, Series]:
    """The values in the run's logs up to *step*."""
    try:
        history = read_history(run, "run")
    except (AutomodelError, OSError):
        return {}
    series = {}
    for name, each in history.series.items():
        count = sum(at <= step for at in each.steps)
        series[name] = Series(each.steps[:count], each.values[:count])
    return series


def _measures(
    checkpoint: Path, manifest: Manifest, series: Mapping[str, Series]
) -> dict[str, float]:
    """The results of validations and benchmarks at the step of the checkpoint."""
    found: dict[str, Any] = {**manifest.losses, **recall(checkpoint, manifest.digest)}
    for name, each in series.items():
        if each.steps and each.steps[-1] == manifest.step:
            found.setdefault(name, each.values[-1])
    measures = {}
    for name, value in found.items():
        is_measure = name.startswith((VALIDATED, BENCHMARK))
        if is_measure and isinstance(value, int | float) and math.isfinite(value):
            measures[name] = float(value)
    return measures


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] == "'"
    return text[1:-1] if is_quoted else text
