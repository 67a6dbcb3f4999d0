"""``ckpt export``: export the model of a checkpoint to another program's format. ``ckpt consolidate`` is an alias of
``ckpt export --to hf``. The formats are in ``cli/targets/table.py``."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Manifest, has_manifest
from automodel_ckpt.cli.common.arguments import WHERE, without_effect
from automodel_ckpt.cli.common.paths import find_checkpoint
from automodel_ckpt.cli.targets.table import (
    TARGETS,
    Target,
    attribute,
    options_of,
    run_hf,
    unused_option,
)
from automodel_ckpt.errors import EXIT_DONE, CheckpointUnusable, RecipeError

_EMA = "--ema"

# The targets that have a rule for each tensor of their models, and report others themselves.
_WITH_OWN_RULES = ("gguf", "megatron", "qnemo")
_TARGETS: Mapping[str, Target] = {target.name: target for target in TARGETS}
_AVERAGE = f"{_EMA} | export the average of the weights (section ema of the recipe)"
USAGE_EXPORT = f"""
Export the model of a checkpoint to: {"; ".join(f"{each.name} ({each.summary})" for each in TARGETS)}.

path DIR        | {WHERE}, its model/ directory, a directory of shards, or a model of another program
--to {{{",".join(_TARGETS)}}} =hf | output format (default: hf)
{_AVERAGE}
--output -o OUT | output path (default for {"; ".join(f"{each.name}: {each.output}" for each in TARGETS)})
{options_of(TARGETS)}
"""
USAGE_CONSOLIDATE = f"""
Alias of `ckpt export --to hf`: export the model of a checkpoint to Hugging Face files, and verify its digests.

path DIR        | {WHERE}, its model/ directory, or a directory of shards without a manifest
--output -o OUT | output directory (default: consolidated/ in the model's directory)
{_AVERAGE}
{options_of(TARGETS[:1])}
"""


def run(arguments: Namespace) -> int:
    """Run either command. The path of the export is the only line on standard output."""
    target = _TARGETS[getattr(arguments, "to", "hf")]
    if (flag := unused_option(arguments, target)) is not None:
        given = getattr(arguments, attribute(flag))
        raise without_effect(arguments.command, flag, given, f"with --to {target.name}")
    source = find_checkpoint(Path(arguments.path))
    is_average = source.name == layout.AVERAGE and has_manifest(source.parent)
    if target.resumes and (arguments.ema or is_average):
        what = "the average of the weights has no optimizer state, and a run cannot be continued from it"
        where = f"ckpt export {_EMA}" if arguments.ema else arguments.path
        raise RecipeError(what, where, f"--to {target.name}")
    if not any(has_manifest(each) for each in (source, source.parent)):
        _check_external(source, target.name)
    chosen = _average_in(source) if arguments.ema else source
    report = run_hf(arguments, chosen) if target.name == "hf" else target.run(arguments, chosen)
    if arguments.json:
        print(json.dumps(report, indent=2))
    return EXIT_DONE


def _check_external(source: Path, target: str) -> None:
    """Raise :class:`CheckpointUnusable` if a model of another program is an adapter, which most targets would write as
    a model, lacks a tensor of the class that its config.json names, or has one that the class lacks.

    Checkpoints of this program list their tensors. ``hf`` checks adapters itself: ``--merge`` accepts other ones.
    """
    from automodel_ckpt.checkpoint.export.consolidate import adapter_of_another_program
    from automodel_ckpt.cli.common.model_parameters import compare_names
    from automodel_ckpt.convert.open import open_source

    if target != "hf" and os.path.lexists(source / layout.ADAPTER_MODEL):
        raise adapter_of_another_program(source)
    if target in _WITH_OWN_RULES:
        return
    opened = open_source(source)
    config = opened.config_directory / "config.json"
    if not config.is_file() or layout.ADAPTER_MODEL in opened.files:
        return
    found = compare_names(config.read_bytes(), [*opened.tensors, *opened.tied])
    is_quantized = b'"quantization_config"' in config.read_bytes()
    if found is None or is_quantized or not (found.unknown or found.missing):
        return
    raise CheckpointUnusable(
        f"these are not the tensors of a {found.model}, the class that config.json names",
        source,
        "\n    " + "\n    ".join(found.lines()),
        "name the class with these tensors in config.json (architectures), or take the files from another copy",
    )


def _average_in(source: Path) -> Path:
    """Return the directory of the average in the checkpoint *source*, or in the one that *source* is a directory of.

    Raises :class:`CheckpointUnusable` if there is none.
    """
    from automodel_ckpt.checkpoint.sources.source import is_average

    checkpoint = source if has_manifest(source) else source.parent
    if has_manifest(checkpoint) and is_average(Manifest.read(checkpoint), layout.AVERAGE):
        return checkpoint / layout.AVERAGE
    raise CheckpointUnusable(
        "this checkpoint has no average of the weights",
        source,
        f"no directory {layout.AVERAGE}: the section ema of a recipe keeps an average",
    )
