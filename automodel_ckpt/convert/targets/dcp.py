"""A checkpoint's model as a plain directory of PyTorch DCP: verified, streamed, staged, published. Imports no torch.

``torch.distributed.checkpoint.load(state_dict, checkpoint_id=DIR)`` fills a state dict from it, sharded in any way.
"""

from __future__ import annotations

import os
from dataclasses import replace

from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.names.torchtitan import (
    TORCHTITAN_LLAMA,
    required_torchtitan_conversion,
    to_torchtitan,
)
from automodel_ckpt.convert.targets.dcp_files import DcpWriter
from automodel_ckpt.convert.targets.flow import LOG, Export, ExportReport, Log
from automodel_ckpt.convert.targets.torch_file import state_dict_of

_SUFFIX = "-dcp"
TORCHTITAN = "torchtitan"


def export_dcp(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    prefix: str = "",
    cast_dtype: str | None = None,
    names: str | None = None,
    log: Log = LOG,
) -> ExportReport:
    """Write the model in *source* (anything that ``open_source`` of ``convert/open.py`` accepts) as a DCP directory.

    *output* defaults to the source's name with ``-dcp``, next to it. *prefix* is added to all names: with ``model.``,
    ``dcp.load({"model": model.state_dict()}, ...)`` finds them. Tensors keep the dtype of the checkpoint, unless
    *cast_dtype* (bf16, fp16, fp32, fp64) casts the floating-point ones. With *names* ``torchtitan``, a Llama has the
    names, and the rows of queries and keys the order, of torchtitan's Llama 3.

    Raises :class:`CheckpointUnusable` for a damaged source, :class:`SaveFailed` if the directory cannot be written, and
    :class:`RecipeError` for a wrong argument. In each case nothing was written. Memory: one block of a tensor.
    """
    export = Export(source, cast_dtype, log)
    opened = export.source
    target = export.directory(output, _SUFFIX)
    export.check_files()
    export.warn(*opened.notes)
    if names == TORCHTITAN:
        # Its digests are compared first: parts of its slices have none.
        export.check_digests()
        opened = _in_torchtitan_names(opened)
    state_dict = state_dict_of(export, opened, "")
    outer = tuple(part for part in prefix.split(".") if part)
    with (
        export.published_directory(target, "the DCP directory") as directory,
        DcpWriter(directory) as writer,
    ):
        for fqn, tensor in state_dict.items():
            writer.add_tensor((*outer, fqn), tensor)
        writer.finish()
    return export.report(target, len(state_dict))


def _in_torchtitan_names(opened: Source) -> Source:
    """Return *opened* with torchtitan's names."""
    side = opened.config_directory
    conversion = required_torchtitan_conversion(side, model_types=TORCHTITAN_LLAMA.model_types)
    tensors = to_torchtitan(conversion, opened.tensors, str(opened.model_directory))
    return replace(opened, tensors=tensors, tied={})
