"""The model card: README.md of a repository, written from the run that trained the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted, measure_text
from automodel_ckpt.base.version import __version__
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.errors import printable
from automodel_ckpt.hub.address import HubAddress
from automodel_ckpt.hub.bundle import README, Bundle
from automodel_ckpt.hub.facts import Facts, facts_of
from automodel_ckpt.logs.history import Series

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
"""Task of the Hub's pipelines -> the class of transformers that loads the model, after ``AutoModel``."""
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


@dataclass(frozen=True, slots=True)
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
) -> dict[str, bytes]:
    """Return README.md for a model in the repository *address*.

    *readme* is the text of the user's own card; without it, that of a README.md beside the files is used, and without
    both a card is written. *license_name* replaces the license of the base. With *is_online*, the card of the base may
    be downloaded for it.
    """
    from jinja2 import Environment, FileSystemLoader

    own = readme if readme is not None else bundle.readme
    if own is not None:
        return {README: own.encode()}
    facts = facts_of(bundle, base_model)
    terms: dict[str, str | None] = {}
    if license_name:
        terms = {"license": license_name}
    elif facts.base is not None:
        terms = _base_license(facts.base, facts.base_commit, is_online=is_online)
    # Names come from files: none may begin a line, or end a cell of a table.
    environment = Environment(
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
        loader=FileSystemLoader(Path(__file__).parent),
    )
    name = address.repo.rpartition("/")[2]
    tag = _pipeline_tag(facts, bundle)
    text = environment.get_template("card.md.jinja").render(
        name=name,
        facts=facts,
        is_adapter=bundle.is_adapter,
        has_license=bool(terms),
        sections=list(_sections(facts, evaluation)),
        address=address,
        files=bundle.files,
        tag=tag,
        auto_class=f"AutoModel{_CLASSES[tag]}",
        model_config=layout.ADAPTER_MODEL_CONFIG,
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
    """Read the license in the card of a base model; empty if unknown. With *is_online*, the card may be downloaded."""
    from huggingface_hub import ModelCard, hf_hub_download

    try:
        path = hf_hub_download(base, README, revision=commit, local_files_only=not is_online)
        card = ModelCard(Path(path).read_text("utf-8"), ignore_metadata_errors=True)
        data: Mapping[str, Any] = vars(card.data)
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
    more: dict[str, Any] = dict(terms)
    if not terms and facts.has_base:
        more["license"] = "other"
    if facts.base is not None:
        more["base_model"] = facts.base
        more["base_model_relation"] = "adapter" if bundle.is_adapter else "finetune"
    results = []
    for data, metric, value in _results(facts, evaluation):
        results.append(EvalResult(task, data, data, metric, round(value, 6), metric_name=metric))
    names = dict.fromkeys(name for _, name, is_on_hub in facts.data_sets() if is_on_hub)
    return ModelCardData(
        library_name=library,
        pipeline_tag=task,
        datasets=list(names) or None,
        tags=tags,
        model_name=name,
        eval_results=results or None,
        **more,
    )


def _results(facts: Facts, evaluation: Sequence[Metric]) -> Iterator[tuple[str, str, float]]:
    """Yield (data set, metric, value) of all results."""
    for each in evaluation:
        yield each.task, each.metric, each.value
    sets = [name for section, name, _ in facts.data_sets() if section.startswith("validation")]
    for name, value in facts.measures.items():
        measure = name.removeprefix("eval_")
        yield measure if measure != name else [*sets, "validation"][0], measure, value


# ---------------------------------------------------------------- the values of the text


def _sections(facts: Facts, evaluation: Sequence[Metric]) -> Iterator[tuple[Any, ...]]:
    """Yield (title, heads of the columns, rows, a note below) of each section with a table."""
    data = []
    for section, name, is_on_hub in facts.data_sets():
        link = f"[{name}](https://huggingface.co/datasets/{name})"
        data.append((f"`{section}`", link if is_on_hub else f"{name} (local)"))
    yield "Data", ("section", "data set"), data, _progress_text(facts)
    results = [(f"`{name}`", measure_text(value)) for name, value in facts.measures.items()]
    for each in evaluation:
        error = "" if each.stderr is None else f" ± {measure_text(each.stderr)}"
        results.append((f"`{each.task}` {each.metric}", f"{measure_text(each.value)}{error}"))
    yield "Results", ("measure", "value"), results, ""
    yield "Training", ("step", "training loss", "validation loss"), _loss_rows(facts), ""
    settings = [(f"`{key}`", text) for key, text in facts.settings().items()]
    yield "Hyperparameters", ("key", "value"), settings, ""
    if facts.manifest is not None:
        note = (
            f"`{layout.EXPORT_MANIFEST}` has the digests of all files: `ckpt pull` compares them."
        )
        yield "Origin", ("", ""), _origin_rows(facts.manifest), note


def _progress_text(facts: Facts) -> str:
    manifest = facts.manifest
    seen = []
    for name, value in (manifest.progress if manifest else {}).items():
        if name.startswith("consumed_") and isinstance(value, int):
            seen.append(f"{value:,} {name.removeprefix('consumed_')}")
    if manifest is None or not seen:
        return ""
    steps = counted(manifest.step, "step")
    return f"Training saw {' and '.join(seen)} in {steps} (epoch {manifest.epoch})."


def _loss_rows(facts: Facts) -> list[tuple[str, ...]]:
    found: list[dict[int, float]] = []
    for name in ("loss", "val_loss"):
        series = facts.series.get(name, Series())
        found.append(dict(zip(series.steps, series.values, strict=True)))
    steps = sorted(found[1] or found[0])
    # The last one is that of the checkpoint.
    chosen = sorted({*steps[:: -(-len(steps) // _MAX_ROWS) or 1], *steps[-1:]})
    return [
        (str(step), *(f"{of[step]:.4f}" if step in of else "" for of in found)) for step in chosen
    ]


def _origin_rows(manifest: Manifest) -> list[tuple[str, str]]:
    environment = manifest.environment
    packages = environment.get("packages")
    versions = {"automodel-ckpt": __version__}
    versions |= dict(packages) if isinstance(packages, Mapping) else {}
    commit = environment.get("git_commit")
    rows = {
        "step": f"{manifest.step} (epoch {manifest.epoch})",
        "ranks": manifest.world_size,
        "digest of the checkpoint": f"`{manifest.digest}`",
        "git commit of the code": f"`{commit}`" if commit else None,
        "precision": environment.get("precision"),
        "Python": environment.get("python"),
        **{name: versions.get(name) for name in _PACKAGES},
    }
    return [(title, str(value)) for title, value in rows.items() if value]
