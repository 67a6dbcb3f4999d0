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
from automodel_ckpt.hub.bundle import README, Bundle
from automodel_ckpt.hub.facts import Facts, facts_of

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
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
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
    repo: str,
    *,
    revision: str | None = None,
    base_model: str | None = None,
    license_name: str | None = None,
    evaluation: Sequence[Metric] = (),
    readme: str | None = None,
    is_online: bool = False,
) -> dict[str, bytes]:
    """Return README.md for a model in the repository *repo*.

    *readme* is the text of the user's own card; without it, that of a README.md beside the files is used, and without
    both a card is written. *license_name* replaces the license of the base. With *is_online*, the card of the base may
    be downloaded for it.
    """
    own = readme if readme is not None else bundle.readme
    if own is not None:
        return {README: own.encode()}
    facts = facts_of(bundle, base_model)
    terms: dict[str, str | None] = {}
    if license_name:
        terms = {"license": license_name}
    elif facts.base is not None:
        terms = _base_license(facts.base, facts.base_commit, is_online=is_online)
    name = repo.rpartition("/")[2]
    text = _rendered(
        name=name,
        facts=facts,
        is_adapter=bundle.is_adapter,
        has_license=bool(terms),
        sections=list(_sections(facts, evaluation)),
        **_loading(bundle, facts, repo, revision),
    )
    header = _metadata(bundle, facts, name, terms, evaluation).to_yaml()
    header = "\n".join(map(printable, header.split("\n")))
    return {README: f"---\n{header}\n---\n\n{text}\n".encode()}


def _rendered(**values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader

    # Names come from files: none may begin a line, or end a cell of a table.
    environment = Environment(
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
        loader=FileSystemLoader(Path(__file__).parent),
    )
    return environment.get_template("card.md.jinja").render(values)


def pipeline_tag(facts: Facts, bundle: Bundle) -> str:
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
    terms: Mapping[str, str | None],
    evaluation: Sequence[Metric],
) -> Any:
    from huggingface_hub import ModelCardData

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
    names = dict.fromkeys(name for _, name, is_on_hub in facts.data_sets() if is_on_hub)
    return ModelCardData(
        library_name=library,
        pipeline_tag=pipeline_tag(facts, bundle),
        datasets=list(names) or None,
        tags=tags,
        model_name=name,
        eval_results=list(_results(pipeline_tag(facts, bundle), facts, evaluation)) or None,
        **more,
    )


def _results(task: str, facts: Facts, evaluation: Sequence[Metric]) -> Iterator[Any]:
    from huggingface_hub import EvalResult

    validation = "validation"
    for section, name, _ in reversed(list(facts.data_sets())):
        if section.startswith("validation"):
            validation = name
    found = [(each.task, each.metric, each.value) for each in evaluation]
    for name, value in facts.measures.items():
        measure = name.removeprefix("eval_")
        found.append((validation if measure == name else measure, measure, value))
    for data, metric, value in found:
        yield EvalResult(
            task_type=task,
            dataset_type=data,
            dataset_name=data,
            metric_type=metric,
            metric_name=metric,
            metric_value=round(value, 6),
        )


# ---------------------------------------------------------------- the values of the text


def _loading(bundle: Bundle, facts: Facts, repo: str, revision: str | None) -> dict[str, Any]:
    """What the code that loads the model names."""
    tag = pipeline_tag(facts, bundle)
    at = "" if revision is None else f', revision="{revision}"'
    preprocessor = "AutoTokenizer" if "tokenizer_config.json" in bundle.files else None
    if any(name in bundle.files for name in _PROCESSORS):
        preprocessor = "AutoProcessor"
    loader = f"AutoModel{_CLASSES[tag]}"
    if tag == "sentence-similarity" and not bundle.is_adapter:
        loader = "SentenceTransformer"
    # The head of a classifier is among the adapter's weights. Its size is in this config, not in that of the base.
    has_config = bundle.is_adapter and layout.ADAPTER_MODEL_CONFIG in bundle.files
    config = "AutoConfig" if has_config else None
    return {
        "place": f'"{repo}"{at}',
        "loader": loader,
        "preprocessor": preprocessor,
        "model_config": f'"{repo}", "{layout.ADAPTER_MODEL_CONFIG}"{at}' if has_config else None,
        "imports": list(filter(None, (config, loader, preprocessor))),
    }


def _sections(facts: Facts, evaluation: Sequence[Metric]) -> Iterator[tuple[Any, ...]]:
    """Yield (title, heads of the columns, rows, a note below) of each section with a table."""
    data = [_data_row(*each) for each in facts.data_sets()]
    yield "Data", ("section", "data set"), data, _progress_text(facts)
    yield "Results", ("measure", "value"), _result_rows(facts, evaluation), ""
    yield "Training", ("step", "training loss", "validation loss"), _loss_rows(facts), ""
    settings = [(f"`{key}`", text) for key, text in facts.settings().items()]
    yield "Hyperparameters", ("key", "value"), settings, ""
    if facts.manifest is not None:
        note = (
            f"`{layout.EXPORT_MANIFEST}` has the digests of all files: `ckpt pull` compares them."
        )
        yield "Origin", ("", ""), _origin_rows(facts.manifest), note


def _progress_text(facts: Facts) -> str:
    seen = []
    for name, value in (facts.manifest.progress if facts.manifest else {}).items():
        if name.startswith("consumed_") and isinstance(value, int):
            seen.append(f"{value:,} {name.removeprefix('consumed_')}")
    if facts.manifest is None or not seen:
        return ""
    steps = counted(facts.manifest.step, "step")
    return f"Training saw {' and '.join(seen)} in {steps} (epoch {facts.manifest.epoch})."


def _data_row(section: str, name: str, is_on_hub: bool) -> tuple[str, str]:
    link = f"[{name}](https://huggingface.co/datasets/{name})" if is_on_hub else f"{name} (local)"
    return f"`{section}`", link


def _result_rows(facts: Facts, evaluation: Sequence[Metric]) -> list[tuple[str, str]]:
    rows = [(f"`{name}`", measure_text(value)) for name, value in facts.measures.items()]
    for each in evaluation:
        error = "" if each.stderr is None else f" ± {measure_text(each.stderr)}"
        rows.append((f"`{each.task}` {each.metric}", f"{measure_text(each.value)}{error}"))
    return rows


def _loss_rows(facts: Facts) -> list[tuple[str, ...]]:
    if facts.history is None:
        return []
    found: list[dict[int, float]] = []
    for field in ("loss", "val_loss"):
        series = facts.history.series[field]
        found.append(dict(zip(series.steps, series.values, strict=True)))
    steps = sorted(found[1] or found[0])
    # The last one is that of the checkpoint.
    chosen = sorted({*steps[:: -(-len(steps) // _MAX_ROWS) or 1], *steps[-1:]})
    rows = []
    for step in chosen:
        losses = [f"{of[step]:.4f}" if step in of else "" for of in found]
        rows.append((str(step), *losses))
    return rows


def _origin_rows(manifest: Manifest) -> list[tuple[str, str]]:
    environment = manifest.environment
    packages = environment.get("packages")
    versions = {"automodel-ckpt": __version__}
    versions |= dict(packages) if isinstance(packages, Mapping) else {}
    rows = [
        ("step", f"{manifest.step} (epoch {manifest.epoch})"),
        ("ranks", str(manifest.world_size)),
        ("digest of the checkpoint", f"`{manifest.digest}`"),
    ]
    if environment.get("git_commit"):
        rows.append(("git commit of the code", f"`{environment['git_commit']}`"))
    for key, title in (("precision", "precision"), ("python", "Python")):
        if environment.get(key):
            rows.append((title, str(environment[key])))
    return rows + [(name, str(versions[name])) for name in _PACKAGES if name in versions]
