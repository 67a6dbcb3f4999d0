"""A checkpoint's model as a plain directory of PyTorch DCP: verified, streamed, staged, published. Imports no torch.

``torch.distributed.checkpoint.load(state_dict, checkpoint_id=DIR)`` fills a state dict from it, sharded in any way.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.checkpoint.export.export_leftovers import Log
from automodel_ckpt.checkpoint.export.plan import parse_cast_dtype
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.sources.opening import MODEL, is_checkpoint
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.torch.run_state import RunState, first_renamed, read_run_state
from automodel_ckpt.convert.names.torchtitan import TORCHTITAN_LLAMA, required_torchtitan_conversion
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.convert.publishing import published_directory
from automodel_ckpt.convert.targets.dcp_files import DcpWriter
from automodel_ckpt.convert.targets.dcp_training_state import add_training_state
from automodel_ckpt.convert.targets.output_paths import directory_output, nbytes_below
from automodel_ckpt.convert.targets.report import ExportReport
from automodel_ckpt.convert.targets.source_checks import check_digests, check_files
from automodel_ckpt.convert.targets.torch_file import state_dict_of
from automodel_ckpt.errors import CheckpointUnusable

log_default = logging.getLogger("automodel_ckpt")

_SUFFIX = "-dcp"
TORCHTITAN = "torchtitan"


def export_dcp(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    prefix: str = "",
    cast_dtype: str | None = None,
    names: str | None = None,
    optimizer: str | None = None,
    log: Log = log_default.info,
) -> ExportReport:
    """Write the model in *source* (anything that ``open_source`` of ``convert/open.py`` accepts) as a DCP directory.

    *output* defaults to the source's name with ``-dcp``, next to it. *prefix* is added to all names: with ``model.``,
    ``dcp.load({"model": model.state_dict()}, ...)`` finds them. Tensors keep the dtype of the checkpoint, unless
    *cast_dtype* (bf16, fp16, fp32, fp64) casts the floating-point ones. With *names* ``torchtitan``, a Llama has the
    names, and the rows of queries and keys the order, of torchtitan's Llama 3.

    With *optimizer* (``nested`` or ``flattened``, see ``dcp_training_state.py``), the directory also has the training
    state of a run, and the model is under ``model``, unless there is another prefix.

    Raises :class:`CheckpointUnusable` for a damaged source, :class:`SaveFailed` if the directory cannot be written, and
    :class:`RecipeError` for a wrong argument. In each case nothing was written. Memory: one block of a tensor.
    """
    started = time.monotonic()
    cast_code = parse_cast_dtype(cast_dtype)
    opened = open_source(Path(source))
    run = None
    if optimizer is not None:
        run = _run_state(opened, names)
        prefix = prefix or MODEL
    target = directory_output(opened, output, _SUFFIX)
    check_files(opened)
    for text in opened.notes:
        log(f"warning: {text}")
    if names == TORCHTITAN:
        opened = _in_torchtitan_names(opened)
    state_dict = state_dict_of(opened, "", cast_code, log)
    outer = tuple(part for part in prefix.split(".") if part)
    with (
        published_directory(target, log, what="the DCP directory") as directory,
        DcpWriter(directory) as writer,
    ):
        for fqn, tensor in state_dict.items():
            writer.add_tensor((*outer, fqn), tensor)
        if run is not None and optimizer is not None:
            add_training_state(writer, run, optimizer)
        writer.finish()
    nbytes = nbytes_below(target)
    seconds = time.monotonic() - started
    return ExportReport(
        target, len(state_dict), nbytes, seconds, opened.has_digests, tuple(opened.notes)
    )


def _run_state(opened: Source, names: str | None) -> RunState:
    """Return the training state of the run that *opened* is a checkpoint of. Raises :class:`CheckpointUnusable`."""
    if not is_checkpoint(opened.root):
        raise _no_training_state(opened, "not a checkpoint of a run")
    if os.path.lexists(opened.model_directory / layout.ADAPTER_MODEL):
        raise _no_training_state(opened, "an adapter")
    if names is not None:
        raise _no_training_state(opened, f"--names {names}")
    run = read_run_state(opened.root)
    if run is None:
        raise _no_training_state(opened, "weights only")
    renamed = first_renamed(run, {*opened.tensors, *opened.tied})
    if renamed is not None:
        raise _no_training_state(opened, f"{renamed} has another name in the model's files")
    return run


def _no_training_state(opened: Source, value: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        "there is no training state that can be exported in this way",
        where=str(opened.root),
        value=value,
        hint="export the weights without --optimizer",
    )


def _in_torchtitan_names(opened: Source) -> Source:
    """Return *opened* with torchtitan's names. Its digests are compared first: parts of its slices have none."""
    check_digests(opened)
    side = opened.config_directory
    conversion = required_torchtitan_conversion(side, model_types=TORCHTITAN_LLAMA.model_types)
    tensors = conversion.to_torchtitan(opened.tensors, str(opened.model_directory))
    return replace(opened, tensors=tensors, tied={})
