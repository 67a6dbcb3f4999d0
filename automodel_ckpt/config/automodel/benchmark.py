"""NeMo AutoModel's recipes that measure speed: the section ``benchmark``, and what their class leaves out or sets.

The class trains on samples without text for ``max_steps`` steps, and neither validates nor saves.
"""

from __future__ import annotations

from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Degraded,
    Key,
    NoEffect,
    Section,
    Steps,
    apply_rows,
    value_of,
)
from automodel_ckpt.config.tree.yaml_tree import Node

CLASS = "BenchmarkingRecipeForNextTokenPrediction"
_TRACE = "the steps are not traced; the section profile writes a trace"

BENCHMARK = (
    Key("warmup_steps", where="throughput.warmup_steps"),
    Key("json_output_path", where="throughput.file"),
    Key("peak_tflops", where="logging.peak_tflops"),
    Degraded("nsys_start", _TRACE, when=lambda node: _is_step(node)),
    NoEffect("nsys_end", "nsys_ranks", "num_nodes"),
)
IGNORED = NoEffect("validation_dataset", "validation_dataloader")


def _is_step(node: Node) -> bool:
    """Whether a node is the number of a step, which counts from 0; -1 means none."""
    value = value_of(node)
    return isinstance(value, int | float) and value >= 0


def benchmark(section: Section) -> None:
    """Translate the section benchmark. In recipes of other classes, AutoModel ignores it."""
    top = section.work.section("")
    if section.work.their_class != CLASS:
        NoEffect("benchmark").apply(top)
        return
    IGNORED.apply(top)
    # A benchmark without settings is one too.
    top.put("throughput", Node({}, section.origin or AUTOMODEL_DEFAULT))
    apply_rows(BENCHMARK, section)


def not_saved(section: Section) -> None:
    """Disable checkpoints, unless a flag of the command enables them."""
    if section.work.their_class != CLASS:
        return
    enabled = section.work.result.at("checkpoint.enabled")
    if enabled is None or not enabled.is_flag:
        section.put_default("enabled", "false")


def samples(section: Section) -> None:
    """Take the random tokens from the model's vocabulary, as the class does for a model from its configuration."""
    work = section.work
    target = work.result.at("dataset._target_")
    is_random = target is not None and target.value == "automodel_ckpt.data.mock.random_tokens"
    if work.their_class != CLASS or not is_random:
        return
    size = work.result.at("dataset.vocab_size")
    is_fresh = work.result.at("model.from_config") is not None
    if size is None or (is_fresh and not size.is_flag):
        section.put_default("vocab_size", "model")
    if not work.source.at("tokenizer"):
        work.section("").put_default("tokenizer", "null")


ROWS = (("benchmark", Steps(benchmark)),)
"""Before the other sections, which would translate what is ignored."""
LAST_ROWS = (("checkpoint", Steps(not_saved)), ("dataset", Steps(samples)))
"""After the other sections."""
