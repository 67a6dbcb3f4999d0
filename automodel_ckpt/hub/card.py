"""The model card: README.md of a repository, written from the run that trained the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import measure_text
from automodel_ckpt.base.version import __version__
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.errors import printable
from automodel_ckpt.hub.bundle import README, Bundle
from automodel_ckpt.hub.facts import Facts, facts_of
from automodel_ckpt.hub.push import CURVES
from automodel_ckpt.hub.snippets import snippet
from automodel_ckpt.logs.charts import charts_of
from automodel_ckpt.logs.svg import document

_PIPELINES = {
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
_NUM_CHARTS = 3
_MAX_ROWS = 12
_PACKAGES = ("automodel-ckpt", "torch", "transformers", "peft", "datasets")


@dataclass(frozen=True, slots=True)
class License:
    """The license of the base model as its card states it: identifier, and for ``other`` its name and link."""

    identifier: str
    name: str | None = None
    link: str | None = None


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
    """Return README.md, and the picture that it shows, for a model in the repository *repo*.

    *readme* is the text of the user's own card; without it, that of a README.md beside the files is used, and without
    both a card is written. *license_name* replaces the license of the base. With *is_online*, the card of the base may
    be downloaded for it.
    """
    own = readme if readme is not None else bundle.readme
    if own is not None:
        return {README: own.encode()}
    facts = facts_of(bundle, base_model)
    files: dict[str, bytes] = {}
    picture = _picture(facts)
    if picture:
        files[CURVES] = picture
    found = License(license_name) if license_name else None
    if found is None and facts.base is not None:
        found = base_license(facts.base, facts.base_commit, is_online=is_online)
    lines = _lines(bundle, facts, repo, revision, found, evaluation)
    text = "\n".join(map(printable, lines))
    header = _metadata(bundle, facts, repo, found, evaluation).to_yaml()
    header = "\n".join(map(printable, header.split("\n")))
    files[README] = f"---\n{header}\n---\n\n{text}\n".encode()
    return files


def pipeline_tag(facts: Facts, bundle: Bundle) -> str:
    """The task of the Hub's pipelines that the model is for."""
    if _SENTENCES in bundle.files:
        return "sentence-similarity"
    task = _PIPELINES.get(facts.kind, "text-generation")
    config = bundle.read("config.json")
    if task == "image-text-to-text" and "audio_config" in config and "vision_config" not in config:
        return "audio-text-to-text"
    return task


def library_name(bundle: Bundle) -> str:
    """The library that loads the model."""
    if bundle.is_adapter:
        return "peft"
    return "sentence-transformers" if _SENTENCES in bundle.files else "transformers"


def base_license(base: str, commit: str | None, *, is_online: bool) -> License | None:
    """Read the license in the card of a base model; None if unknown. With *is_online*, the card may be downloaded."""
    from huggingface_hub import ModelCard, hf_hub_download

    try:
        path = hf_hub_download(base, README, revision=commit, local_files_only=not is_online)
        data = ModelCard(Path(path).read_text("utf-8"), ignore_metadata_errors=True).data
    except Exception:  # whatever is wrong with the card of another model
        return None
    identifier = getattr(data, "license", None)
    if not isinstance(identifier, str) or not identifier:
        return None
    name, link = getattr(data, "license_name", None), getattr(data, "license_link", None)
    return License(identifier, name, _absolute_link(link, base))


def _absolute_link(link: object, base: str) -> str | None:
    if not isinstance(link, str) or not link:
        return None
    return link if "://" in link else f"https://huggingface.co/{base}/blob/main/{link}"


# ---------------------------------------------------------------- the metadata


def _metadata(
    bundle: Bundle,
    facts: Facts,
    repo: str,
    found: License | None,
    evaluation: Sequence[Metric],
) -> Any:
    from huggingface_hub import ModelCardData

    tags = ["automodel_ckpt"]
    if facts.kind:
        tags.append(_TAGS.get(facts.kind, facts.kind.replace("_", "-")))
    if bundle.is_adapter:
        tags.append("lora")
    more: dict[str, Any] = {}
    if facts.base is not None:
        more["base_model"] = facts.base
        more["base_model_relation"] = "adapter" if bundle.is_adapter else "finetune"
    identifier = found.identifier if found else ("other" if facts.has_base else None)
    names = dict.fromkeys(name for _, name, is_on_hub in facts.data_sets() if is_on_hub)
    return ModelCardData(
        library_name=library_name(bundle),
        pipeline_tag=pipeline_tag(facts, bundle),
        license=identifier,
        license_name=found.name if found else None,
        license_link=found.link if found else None,
        datasets=list(names) or None,
        tags=tags,
        model_name=repo.rpartition("/")[2],
        eval_results=list(_results(bundle, facts, evaluation)) or None,
        **more,
    )


def _results(bundle: Bundle, facts: Facts, evaluation: Sequence[Metric]) -> Iterator[Any]:
    from huggingface_hub import EvalResult

    task = pipeline_tag(facts, bundle)
    sets = list(facts.data_sets())
    for name, value in facts.measures.items():
        if name.startswith("eval_"):
            data, metric = name.removeprefix("eval_"), name.removeprefix("eval_")
        else:
            data, metric = _validation_name(sets), name
        yield EvalResult(
            task_type=task,
            dataset_type=data,
            dataset_name=data,
            metric_type=metric,
            metric_name=metric,
            metric_value=round(value, 6),
        )
    for each in evaluation:
        yield EvalResult(
            task_type=task,
            dataset_type=each.task,
            dataset_name=each.task,
            metric_type=each.metric,
            metric_name=each.metric,
            metric_value=round(each.value, 6),
        )


def _validation_name(sets: Sequence[tuple[str, str, bool]]) -> str:
    for section, name, _ in sets:
        if section.startswith("validation"):
            return name
    return "validation"


# ---------------------------------------------------------------- the text


def _lines(
    bundle: Bundle,
    facts: Facts,
    repo: str,
    revision: str | None,
    found: License | None,
    evaluation: Sequence[Metric],
) -> Iterator[str]:
    yield f"# {repo.rpartition('/')[2]}"
    yield ""
    yield _summary(bundle, facts)
    if facts.has_base and found is None:
        yield ""
        yield "The license of the base model was not found. It applies to this model, too: see the base's card."
    yield ""
    yield "## How to load it"
    yield ""
    tag = pipeline_tag(facts, bundle)
    yield from snippet(bundle, repo, revision, tag, facts.base)
    yield from _data_lines(facts)
    yield from _result_lines(facts, evaluation)
    yield from _curve_lines(facts)
    settings = facts.settings()
    if settings:
        yield from _section("Hyperparameters")
        yield from _table(("key", "value"), [(f"`{key}`", text) for key, text in settings.items()])
    yield from _origin_lines(facts)


def _summary(bundle: Bundle, facts: Facts) -> str:
    base = "a base model in a local directory"
    if facts.base is not None:
        base = f"[{facts.base}](https://huggingface.co/{facts.base})"
        if facts.base_commit is not None:
            base += f" (commit `{facts.base_commit[:12]}`)"
    program = "automodel_ckpt"
    recipe = f", recipe `{facts.kind}`" if facts.kind else ""
    if bundle.is_adapter:
        return f"An adapter (LoRA) of {base}, trained with {program}{recipe}."
    if facts.has_base:
        return f"A fine-tuned version of {base}, trained with {program}{recipe}."
    return f"A model trained from scratch with {program}{recipe}."


def _data_lines(facts: Facts) -> Iterator[str]:
    rows = []
    for section, name, is_on_hub in facts.data_sets():
        link = (
            f"[{name}](https://huggingface.co/datasets/{name})" if is_on_hub else f"{name} (local)"
        )
        rows.append((f"`{section}`", link))
    if rows:
        yield from _section("Data")
        yield from _table(("section", "data set"), rows)
    progress = facts.manifest.progress if facts.manifest is not None else {}
    seen = [
        f"{value:,} {name.removeprefix('consumed_')}"
        for name, value in progress.items()
        if name.startswith("consumed_") and isinstance(value, int)
    ]
    if seen and facts.manifest is not None:
        yield ""
        step = facts.manifest.step
        steps = "1 step" if step == 1 else f"{step:,} steps"
        yield f"Training saw {' and '.join(seen)} in {steps} (epoch {facts.manifest.epoch})."


def _result_lines(facts: Facts, evaluation: Sequence[Metric]) -> Iterator[str]:
    rows = [(f"`{name}`", measure_text(value)) for name, value in facts.measures.items()]
    for each in evaluation:
        error = "" if each.stderr is None else f" ± {measure_text(each.stderr)}"
        rows.append((f"`{each.task}` {each.metric}", f"{measure_text(each.value)}{error}"))
    if rows:
        yield from _section("Results")
        yield from _table(("measure", "value"), rows)


def _curve_lines(facts: Facts) -> Iterator[str]:
    if facts.history is None or not _picture(facts):
        return
    yield from _section("Training")
    yield f"![Curves of the training]({CURVES})"
    losses = dict(_points(facts.history.series.get("loss")))
    validations = dict(_points(facts.history.series.get("val_loss")))
    steps = sorted(validations or losses)
    # The last one is that of the checkpoint.
    chosen = steps[:: -(-len(steps) // _MAX_ROWS)] if steps else []
    if steps and steps[-1] not in chosen:
        chosen.append(steps[-1])
    rows = [
        (str(step), _number(losses.get(step)), _number(validations.get(step))) for step in chosen
    ]
    if rows:
        yield ""
        yield from _table(("step", "training loss", "validation loss"), rows)


def _points(series: Any) -> Iterator[tuple[int, float]]:
    if series is not None:
        yield from zip(series.steps, series.values, strict=True)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _origin_lines(facts: Facts) -> Iterator[str]:
    manifest = facts.manifest
    if manifest is None:
        return
    yield from _section("Origin")
    environment = manifest.environment
    packages = environment.get("packages")
    versions = dict(packages) if isinstance(packages, Mapping) else {}
    versions.setdefault("automodel-ckpt", __version__)
    rows = [
        ("step", f"{manifest.step} (epoch {manifest.epoch})"),
        ("ranks", str(manifest.world_size)),
    ]
    rows.append(("digest of the checkpoint", f"`{manifest.digest}`"))
    commit = environment.get("git_commit")
    if isinstance(commit, str) and commit:
        rows.append(("git commit of the code", f"`{commit}`"))
    if isinstance(environment.get("precision"), str):
        rows.append(("precision", str(environment["precision"])))
    if "python" in environment:
        rows.append(("Python", str(environment["python"])))
    rows += [(name, str(versions[name])) for name in _PACKAGES if name in versions]
    yield from _table(("", ""), rows)
    yield ""
    yield f"`{layout.EXPORT_MANIFEST}` has the digests of all files: `ckpt pull` compares them."


def _picture(facts: Facts) -> bytes:
    """The curves as a standalone SVG; empty if the run has no logs."""
    if facts.history is None:
        return b""
    charts = [
        chart
        for chart in charts_of([facts.history])
        if any(len(line.series) > 1 for line in chart.lines)
    ]
    return document(charts[:_NUM_CHARTS]).encode() if charts else b""


def _section(title: str) -> tuple[str, ...]:
    return ("", f"## {title}", "")


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        yield f"| {' | '.join(cells)} |"
