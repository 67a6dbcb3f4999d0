"""The training state of a run as items of a DCP directory, named as in torch's own state dicts. Imports no torch.

``torch.distributed.checkpoint.state_dict.get_state_dict`` (torch 2.13) returns the optimizer's state under the names of
the parameters, in one of two layouts. With ``dcp.save({"model": ..., "optimizer": ...})``, the items are called:

* ``nested``: ``optimizer.state.<name>.exp_avg`` and ``optimizer.param_groups.0.lr``;
* ``flattened`` (``StateDictOptions(flatten_optimizer_state_dict=True)``, which is independent of groups):
  ``optimizer.state.<name>.exp_avg`` and ``optimizer.param_groups.<name>.lr``.

``dcp.load`` needs the items that the state dict of its caller has, and ignores others.
"""

from __future__ import annotations

from automodel_ckpt.convert.formats.torch.run_state import RunState
from automodel_ckpt.convert.targets.dcp_files import DcpWriter
from automodel_ckpt.convert.targets.torch_file import archive_tensor

NESTED = "nested"
FLATTENED = "flattened"
_OPTIMIZER = "optimizer"
_STATE = "state"
_GROUPS = "param_groups"
_SCHEDULE = "lr_scheduler"


def add_training_state(writer: DcpWriter, run: RunState, layout: str) -> None:
    """Write the optimizer, the LR schedule (``lr_scheduler``), ``step`` and ``epoch`` (finished epochs) of *run*.

    *layout* is that of the optimizer. Can raise OSError. Memory: one block of a tensor.
    """
    is_flat = layout == FLATTENED
    for group in run.groups:
        for name in group.parameters:
            for entry, value in run.values.get(name, {}).items():
                writer.add_value(_state_path(name, entry, is_flat), value)
            for entry, tensor in run.tensors.get(name, {}).items():
                content = archive_tensor(run.root, tensor, tensor.dtype)
                writer.add_tensor(_state_path(name, entry, is_flat), content)
    if is_flat:
        _add_flat_groups(writer, run)
    else:
        _add_groups(writer, run)
    for key, value in (run.schedule or {}).items():
        writer.add_value((_SCHEDULE, key), value)
    writer.add_value(("step",), run.step)
    writer.add_value(("epoch",), run.epochs_done)


def _state_path(name: str, entry: str, is_flat: bool) -> tuple[str, ...]:
    if is_flat:
        return (_OPTIMIZER, f"{_STATE}.{name}.{entry}")
    return (_OPTIMIZER, _STATE, name, entry)


def _add_groups(writer: DcpWriter, run: RunState) -> None:
    for number, group in enumerate(run.groups):
        for option, value in group.options.items():
            writer.add_value((_OPTIMIZER, _GROUPS, number, option), value)
        writer.add_value((_OPTIMIZER, _GROUPS, number, "params"), list(group.parameters))


def _add_flat_groups(writer: DcpWriter, run: RunState) -> None:
    for group in run.groups:
        for name in group.parameters:
            for option, value in group.options.items():
                writer.add_value((_OPTIMIZER, f"{_GROUPS}.{name}.{option}"), value)
