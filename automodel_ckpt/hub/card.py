"""The model card: README.md of a repository, written from the run that trained the model.

It has no paths of this machine. ``card.md.jinja`` has the text.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from automodel_ckpt.base.hub_access import cached_commit, is_hub_name
from automodel_ckpt.base.units import counted, measure_text
from automodel_ckpt.base.version import __version__
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import (
    FileDict,
    Metrics,
    TextDict,
    Texts,
    ValueDict,
    Values,
)
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.run.notes import recall_losses
from automodel_ckpt.config.changes import saved_recipe
from automodel_ckpt.errors import AutomodelError, printable
from automodel_ckpt.hub.bundle import README, Bundle
from automodel_ckpt.hub.repository import HubAddress
from automodel_ckpt.logs.history import BENCHMARK, VALIDATED, read_history

# Task of the Hub's pipelines -> the class of transformers that loads the model, after ``AutoModel``.
_CLASSES = {
    "text-generation": "ForCausalLM",
    "image-text-to-text": "ForImageTextToText",
    "audio-text-to-text": "ForMultimodalLM",
    "text2text-generation": "ForSeq2SeqLM",
    "text-classification": "ForSequenceClassification",
    "text-ranking": "ForSequenceClassification",
    "feature-extraction": "",
    "sentence-similarity": "",
}
_TASKS = {
    "vlm_finetune": "image-text-to-text",
    "vlm_distill": "image-text-to-text",
    "seq2seq": "text2text-generation",
    "sequence_classification": "text-classification",
    "reward_model": "text-classification",
    "embedding": "feature-extraction",
    "reranker": "text-ranking",
}
_TAGS = {
    "llm_finetune": "sft",
    "vlm_finetune": "sft",
    "seq2seq": "sft",
    "vlm_distill": "distill",
    "pretrain": "pretraining",
}
_SENTENCES = "modules.json"
_MAX_ROWS = 12
_PACKAGES = ("automodel-ckpt", "torch", "transformers", "peft", "datasets")
_UNSET = frozenset({"null", "[]", "{}", "''", "", "auto", "false"})
_DATA = re.compile(r"((?:validation_)?dataset|validation_datasets\.[\w-]+)\.(?:.*\.)?path")
_SETTINGS = re.compile(
    r"seed|clip_grad_norm|model\.dtype|dataset\.seq_length|(optimizer|lr_scheduler|peft|packed_sequence|qat|fp8|ema"
    r"|dpo|kto|orpo|distill|embedding|classification|reward_model|reranker|pretrain)\..+"
    r"|step_scheduler\.(global_batch_size|local_batch_size|num_epochs|max_steps)"
    r"|distributed\.(strategy|\w+_size|mixed_precision)"
)
_DEFAULTS = frozenset({"distributed.dp_replicate_size=1", "optimizer.on_resume=checkpoint"}) | {
    f"distributed.{name}_size=1" for name in ("tp", "pp", "cp", "ep")
}


@dataclass(frozen=True)
class Metric:
    """A result of ``ckpt eval --json``."""

    task: str
    metric: str
    value: float
    stderr: float | None = None


def card_files(
    bundle: Bundle,
    address: HubAddress,
    *,
    base_model: str | None = None,
    license_name: str | None = None,
    evaluation: Sequence[Metric] = (),
    readme: str | None = None,
    is_online: bool = False,
) -> FileDict:
    """Return README.md for a model in the repository *address*.

    *readme* is the text of the user's own card. Without it, a README.md next to the files is used, and without
    both a card is written. *license_name* replaces the license of the base. With *is_online*, the card of the base may
    be downloaded for it.
    """
    from jinja2 import Environment, FileSystemLoader

    own = readme if readme is not None else bundle.readme
    if own is not None:
        return {README: own.encode()}
    facts = _facts_of(bundle, base_model)
    terms: dict[str, str | None] = {}
    if license_name:
        terms = {"license": license_name}
    elif facts.base is not None:
        terms = _base_license(facts.base, facts.base_commit, is_online=is_online)
    # Names come from files: none may begin a line, or end a cell of a table.
    environment = Environment(
        finalize=lambda value: printable(value) if type(value) is str else value,
        loader=FileSystemLoader(Path(__file__).parent),
    )
    environment.filters.update(measure=measure_text, counted=counted)
    name = address.repo.rpartition("/")[2]
    tag = _pipeline_tag(facts, bundle)
    text = environment.get_template("card.md.jinja").render(
        name=name,
        facts=facts,
        evaluation=evaluation,
        is_adapter=bundle.is_adapter,
        has_license=bool(terms),
        address=address,
        files=bundle.files,
        tag=tag,
        auto_class=f"AutoModel{_CLASSES[tag]}",
        model_config=layout.ADAPTER_MODEL_CONFIG,
        export_manifest=layout.EXPORT_MANIFEST,
    )
    header = _metadata(bundle, facts, name, tag, terms, evaluation).to_yaml()
    header = "\n".join(map(printable, header.split("\n")))
    return {README: f"---\n{header}\n---\n\n{text}\n".encode()}


def _pipeline_tag(facts: Facts, bundle: Bundle) -> str:
    """The task of the Hub's pipelines that the model is for."""
    if _SENTENCES in bundle.files:
        return "sentence-similarity"
    task = _TASKS.get(facts.kind, "text-generation")
    config = bundle.read("config.json")
    if task == "image-text-to-text" and "audio_config" in config and "vision_config" not in config:
        return "audio-text-to-text"
    return task


def _base_license(base: str, commit: str | None, *, is_online: bool) -> dict[str, str | None]:
    """Read the license in the card of a base model. Empty if unknown. With *is_online*, the card may be downloaded."""
    from huggingface_hub import ModelCard, hf_hub_download

    try:
        path = hf_hub_download(base, README, revision=commit, local_files_only=not is_online)
        data = vars(ModelCard(Path(path).read_text("utf-8"), ignore_metadata_errors=True).data)
    except Exception:  # whatever is wrong with the card of another model
        return {}
    if not isinstance(data.get("license"), str) or not data["license"]:
        return {}
    link = data.get("license_link")
    if isinstance(link, str) and link and "://" not in link:
        link = f"https://huggingface.co/{base}/blob/main/{link}"
    return {
        "license": data["license"],
        "license_name": data.get("license_name"),
        "license_link": link if isinstance(link, str) else None,
    }


def _metadata(
    bundle: Bundle,
    facts: Facts,
    name: str,
    task: str,
    terms: Mapping[str, str | None],
    evaluation: Sequence[Metric],
) -> Any:
    from huggingface_hub import EvalResult, ModelCardData

    tags = ["automodel_ckpt"]
    if facts.kind:
        tags.append(_TAGS.get(facts.kind, facts.kind.replace("_", "-")))
    library = "sentence-transformers" if _SENTENCES in bundle.files else "transformers"
    if bundle.is_adapter:
        tags.append("lora")
        library = "peft"
    more: ValueDict = dict(terms)
    if not terms and facts.has_base:
        more["license"] = "other"
    if facts.base is not None:
        more["base_model"] = facts.base
        more["base_model_relation"] = "adapter" if bundle.is_adapter else "finetune"
    sets = [data for section, data, _ in facts.data_sets if section.startswith("validation")]
    found = [(each.task, each.metric, each.value) for each in evaluation]
    for measure, value in facts.measures.items():
        benchmark = measure.removeprefix(BENCHMARK)
        data = benchmark if benchmark != measure else [*sets, "validation"][0]
        found.append((data, benchmark, value))
    results = [
        EvalResult(task, data, data, metric, round(value, 6), metric_name=metric)
        for data, metric, value in found
    ]
    names = dict.fromkeys(name for _, name, is_on_hub in facts.data_sets if is_on_hub)
    return ModelCardData(
        library_name=library,
        pipeline_tag=task,
        datasets=list(names) or None,
        tags=tags,
        model_name=name,
        eval_results=results or None,
        **more,
    )


# ---------------------------------------------------------------- what is known of a run


@dataclass(frozen=True)
class Facts:
    """A run as a model card describes it. Everything may be unknown, for a model without its checkpoint.

    *recipe* maps dotted keys to values as text. *base* is the name of the base model on the Hub, and *base_commit* its
    commit. *has_base*: the model was not trained from scratch. *measures* are the results of validations and benchmarks
    at the checkpoint's step.
    """

    recipe: Texts = field(default_factory=dict)
    manifest: Manifest | None = None
    series: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    base: str | None = None
    base_commit: str | None = None
    has_base: bool = False
    measures: Metrics = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name of the recipe. Empty for a custom one, with a name that may be a path."""
        name = self.recipe.get("recipe", "")
        return name if re.fullmatch(r"\w+", name) else ""

    @property
    def data_sets(self) -> list[tuple[str, str, bool]]:
        """The section, the name, and whether it is on the Hub, of the data; a local file has only its own name."""
        found = []
        for key, value in self.recipe.items():
            data = _DATA.fullmatch(key)
            if data is None or value in _UNSET:
                continue
            paths = yaml.safe_load(value)
            for path in map(str, paths if isinstance(paths, list) else [paths]):
                is_on_hub = is_hub_name(path) and "/" in path and not os.path.splitext(path)[1]
                # The last part of a local path does not contain the name of a user or a machine.
                name = path if is_on_hub else path.rstrip("/").rpartition("/")[2]
                found.append((data[1], name or "local data", is_on_hub))
        named = {section for section, _, _ in found}
        for section in ("dataset", "validation_dataset"):
            target = self.recipe.get(f"{section}._target_")
            if target is not None and section not in named:
                found.append((section, _unquoted(target).rpartition(".")[2], False))
        return found

    @property
    def settings(self) -> TextDict:
        """The hyperparameters of the recipe, by dotted key."""
        found = {}
        for key, value in self.recipe.items():
            if value in _UNSET or not _SETTINGS.fullmatch(key) or f"{key}={value}" in _DEFAULTS:
                continue
            text = _unquoted(value)
            # It may be a path of this machine, or a reference to its environment.
            if any(part in text for part in ("/", "\\", "~", "${")):
                continue
            found[key] = text[1:-1] if text.startswith("[") else text
        return found

    @property
    def losses(self) -> Iterator[tuple[int, float | None, float | None]]:
        """Some steps with their training and validation loss, the last one of the checkpoint."""
        training, validation = (self.series.get(name, {}) for name in ("loss", "val_loss"))
        steps = sorted(validation or training)
        for step in sorted({*steps[:: -(-len(steps) // _MAX_ROWS) or 1], *steps[-1:]}):
            yield step, training.get(step), validation.get(step)

    @property
    def versions(self) -> ValueDict:
        """What the checkpoint was made with, and the versions of the packages."""
        environment = {} if self.manifest is None else self.manifest.environment
        packages = environment.get("packages")
        versions = {"automodel-ckpt": __version__}
        versions |= dict(packages) if isinstance(packages, Mapping) else {}
        return {
            "precision": environment.get("precision"),
            "Python": environment.get("python"),
            **{name: versions.get(name) for name in _PACKAGES},
        }


def _facts_of(bundle: Bundle, base_model: str | None) -> Facts:
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
    try:
        logged = read_history(checkpoint.parent, "run").series
    except (AutomodelError, OSError):
        logged = {}
    # A later step is of a later checkpoint.
    series = {
        name: {
            step: value
            for step, value in zip(each.steps, each.values, strict=True)
            if step <= manifest.step
        }
        for name, each in logged.items()
    }
    found = {**manifest.losses, **recall_losses(checkpoint, manifest.digest)}
    for name, values in series.items():
        if manifest.step in values:
            found.setdefault(name, values[manifest.step])
    measures = {
        name: float(value)
        for name, value in found.items()
        if name.startswith((VALIDATED, BENCHMARK))
        and isinstance(value, int | float)
        and math.isfinite(value)
    }
    return Facts(
        recipe=recipe,
        manifest=manifest,
        series=series,
        base=base,
        base_commit=commit if base is not None and recorded == base else None,
        has_base=bundle.is_adapter or any(name and name not in _UNSET for name in starts),
        measures=measures,
    )


def _hub_base(bundle: Bundle, recipe: Texts, environment: Values) -> str | None:
    """The name of the base on the Hub. Returns None for a local directory, or when it is not certain."""
    recorded = str(environment.get("base_commit", "")).partition("@")[0]
    if recorded:
        return recorded
    if bundle.base is not None:
        return None
    if bundle.is_adapter:
        name = str(bundle.read(layout.ADAPTER_CONFIG).get("base_model_name_or_path") or "")
        return name if is_hub_name(name) else None
    name = _unquoted(recipe.get("model.from_pretrained", ""))
    # A relative path looks the same, if this is another directory than the run's.
    return name if name and is_hub_name(name) and cached_commit(name) else None


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] == "'"
    return text[1:-1] if is_quoted else text
