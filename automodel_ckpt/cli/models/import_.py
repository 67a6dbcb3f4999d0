"""``ckpt import``: import another program's checkpoint into a run directory: weights, or a run to continue."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.base.terminal import colored, print_path
from automodel_ckpt.base.units import counted, size_text, some_of
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.cli.common.adapter_models import adapter_builder
from automodel_ckpt.cli.common.arguments import CHECKPOINT_NAME, without_effect
from automodel_ckpt.cli.common.model_parameters import compare_names, parameters_in
from automodel_ckpt.cli.common.output import table
from automodel_ckpt.errors import EXIT_DONE, printable

if TYPE_CHECKING:
    from automodel_ckpt.convert.imports.new_checkpoint import NewCheckpoint

_MAX_NAMES = 5
USAGE = f"""
Import the weights of another program's checkpoint, in any format that ckpt reads, into a run directory, as a checkpoint
that a recipe can start from. With --training-state, a recipe continues the other program's run. The source is neither
executed nor modified. State that is not imported is listed.

source SOURCE       | a directory or a file of the other program
run ? =checkpoints RUN | run directory (default: checkpoints)
{CHECKPOINT_NAME.format("that in the files or the name of the source, else 0")}
--training-state    | also import the optimizer, learning-rate schedule, step and epoch, to continue the run
--names FILE        | YAML or JSON mapping of names in the source to names in the checkpoint; {{i}} is any number, and
  an empty name leaves a tensor out
--config DIR        | directory of the Hugging Face model's config.json and tokenizer, for a source without them; the
  names of Megatron, and of torchtitan's Llama, are converted to those of this model
--base DIR          | base model of an adapter: a directory, or a name on the Hub (default: the one that the adapter
  names)
--dry-run           | only print what would be imported
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt import``: print what will be imported, then import it."""
    from automodel_ckpt.convert.imports.import_checkpoint import ImportOptions, prepare

    options = ImportOptions(
        step=arguments.step,
        epoch=arguments.epoch,
        parameters=parameters_in if arguments.training_state else None,
        names=None if arguments.names is None else Path(arguments.names),
        config=None if arguments.config is None else Path(arguments.config).expanduser(),
        adapters=adapter_builder(arguments.base, Path(arguments.run)),
        compare_names=compare_names,
    )
    planned = prepare(Path(arguments.source), Path(arguments.run), options)
    if arguments.base is not None and planned.adapter is None:
        raise without_effect("import", "--base", arguments.base, "with a complete model")
    finish(arguments, planned, _lines(planned), _document(planned), _start_line)
    return EXIT_DONE


def finish(
    arguments: Namespace,
    planned: NewCheckpoint,
    lines: Iterable[str],
    document: Values,
    start_line: Callable[[NewCheckpoint], str],
) -> None:
    """Describe the *planned* checkpoint in *lines* or a *document*, and write it unless it is a dry run.

    *start_line* returns how to start a run from it.
    """
    from automodel_ckpt.convert.imports.new_checkpoint import write_checkpoint

    if not arguments.json:
        title, *rows = map(printable, lines)
        print("\n".join([colored(title, "bold", sys.stdout), *rows]))
    if not arguments.dry_run:
        write_checkpoint(planned)
    if arguments.json:
        target, dry_run = str(planned.target), arguments.dry_run
        print(json.dumps({**document, "checkpoint": target, "dry_run": dry_run}, indent=2))
        return
    # Not before it is written, which can fail.
    print(printable(start_line(planned)))
    if not arguments.dry_run:
        print_path(planned.target)


def _document(planned: NewCheckpoint) -> ValueDict:
    adapter = planned.adapter
    return {
        "source": str(planned.source),
        "kind": planned.kind,
        "num_tensors": len(planned.weights.tensors),
        "nbytes": planned.nbytes,
        "files": [file.name for file in planned.plan.files],
        "side_files": list(planned.side_files),
        "has_config": planned.has_config,
        "training_state": planned.training.contents if planned.training is not None else [],
        "step": planned.name.step,
        "epoch": planned.name.epoch,
        "position_from": planned.position_from,
        "has_training_state": planned.has_training_state,
        "names": list(planned.name_notes),
        "absent": list(planned.absent),
        "left_out": list(planned.left_out),
        "base": adapter and str(adapter.base),
        "peft": adapter and dict(adapter.section),
        "vocab_size": adapter and adapter.vocab_size,
    }


def _lines(planned: NewCheckpoint) -> Iterator[str]:
    """Describe what will be imported."""
    from automodel_ckpt.convert.imports.source_files import quantization_of

    yield f"{planned.source} -> {planned.target}"
    num_tensors, size = len(planned.weights.tensors), size_text(planned.plan.nbytes)
    checked = "digests verified" if planned.has_digests else "unverified"
    kind, settings = planned.kind, quantization_of(planned.side_files)
    if settings:
        kind += f", quantized ({settings['quant_method']})"
    weights = f"{counted(num_tensors, 'tensor')}, {size}, {checked}: {kind}"
    rows = [("weights", weights), ("other files", side_files_text(planned))]
    if planned.name_notes:
        rows.append(("names", "; ".join(planned.name_notes)))
    if planned.training is None and planned.position_from:
        position = f"step {planned.name.step}, epoch {planned.name.epoch}"
        rows.append(("position", f"{position} ({planned.position_from})"))
    if planned.training is not None:
        rows.append(("training state", ", ".join(planned.training.contents)))
    elif planned.has_training_state:
        rows.append(("training state", "not imported: add --training-state to continue the run"))
    elif planned.training_left:
        rows.append(("training state", f"not imported: {planned.training_left}"))
    rows.append(("not included", ", ".join(planned.absent)))
    if planned.left_out:
        rows.append(("not imported", ", ".join(planned.left_out)))
    if planned.adapter is not None:
        rows.append(("base", str(planned.adapter.base)))
        model = "model.from_pretrained: the base"
        if planned.adapter.vocab_size is not None:
            model += f"; model.vocab_size: {planned.adapter.vocab_size}"
        rows.append(("recipe", f"{model}; peft: {json.dumps(planned.adapter.section)}"))
    yield from table(rows)


def _start_line(planned: NewCheckpoint) -> str:
    """How to start a run from what was imported, or to continue the imported one."""
    from automodel_ckpt.convert.imports.source_files import quantization_of

    run = shlex.quote(str(planned.run))
    if planned.training is not None:
        command = f"ckpt-train RECIPE.yaml --checkpoint.checkpoint_dir {run}"
        if not planned.is_newest:
            command += f" --checkpoint.restore_from {planned.name}"
        return f"to continue the run: {command}"
    if not quantization_of(planned.side_files):
        return start_from(planned)
    # init_from reads only weights that are not quantized.
    source = shlex.quote(str(planned.source))
    return f"to start from it, dequantized: ckpt-train RECIPE.yaml --model.from_pretrained {source}"


def start_from(planned: NewCheckpoint) -> str:
    """How to start a run from the weights of a checkpoint."""
    start = shlex.quote(str(planned.run if planned.is_newest else planned.target))
    return f"to start from it: ckpt-train RECIPE.yaml --init_from.path {start}"


def side_files_text(planned: NewCheckpoint) -> str:
    """The names of the files next to the weights."""
    return some_of(list(planned.side_files), _MAX_NAMES) or "none: no config.json"
