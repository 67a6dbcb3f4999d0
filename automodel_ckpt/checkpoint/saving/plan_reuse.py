"""Reuse of the plan of the previous asynchronous save: it applies while names, shapes, dtypes and placements are equal.

PyTorch makes a state dict, and a save is planned, in milliseconds per hundred tensors. A save first inspects the live
objects instead (:func:`inspect_state`), and the ranks agree by one exchange that all of them can reuse their plans.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.formats.description import local_tensor
from automodel_ckpt.checkpoint.jobs.jobs import FileJob
from automodel_ckpt.checkpoint.jobs.reuse import Previous
from automodel_ckpt.checkpoint.parts.discovery import Item, classify
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.checkpoint.pickles.pickle_values import saved
from automodel_ckpt.checkpoint.saving.agreement import digest_of_all, present_digests
from automodel_ckpt.checkpoint.saving.forecast import Forecast, free_bytes
from automodel_ckpt.checkpoint.saving.host_memory import MemoryLayout
from automodel_ckpt.checkpoint.saving.planner import Planner
from automodel_ckpt.checkpoint.saving.save import Proposal, Save
from automodel_ckpt.checkpoint.state.module_tensors import (
    stored_layout,
    stored_names,
    stored_values,
    unwrap,
)
from automodel_ckpt.checkpoint.state.optimizer_names import trained_by_all
from automodel_ckpt.checkpoint.state.optimizer_state import (
    check_consistent,
    digests_of_own,
    has_digests_of_own,
)
from automodel_ckpt.checkpoint.state.storable import check_safe, check_safe_values
from automodel_ckpt.errors import AutomodelError
from automodel_ckpt.parallel.ranks import agree

_SCALARS = (type(None), bool, int, float, complex, str)


@dataclass(slots=True)
class _ReuseProposal:
    """What a rank reports to the others before a save with the plan of the previous save.

    *digests* are as in :class:`~automodel_ckpt.checkpoint.saving.save.Proposal`, None where the plan does not
    match that rank's state; *replicated* has a digest by tree of what one rank stores; *staging*
    is the path of the directory that rank 0 created; *failed*, whether rank 0 could not create it; *previous*, the
    checkpoint that files are shared with.
    """

    digests: dict[str, str] | None = None
    staging: str = ""
    failed: bool = False
    previous: Previous | None = None
    replicated: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Kept:
    """The plan of *save*, for later saves while the state has the same *signature*.

    *values* are the planned values that are not tensors, and *pickled* what they were; *nbytes* is what a save takes on
    disk. *compared* are the optimizers with state that must be the same on all ranks.
    """

    signature: list[Any]
    save: Save
    dp_ranks: list[int]
    values: MemoryLayout
    nbytes: int
    compared: frozenset[str]
    pickled: dict[tuple[str, str], bytes] = field(default_factory=dict)


class PlanReuse:
    """The plan that all ranks of *group* keep for the next save, if there is one."""

    def __init__(self, planner: Planner, group: ProcessGroup | None) -> None:
        self._planner, self._group = planner, group
        self._kept: _Kept | None = None

    def forget(self) -> None:
        """Plan the next save anew."""
        self._kept = None

    def live_state(self, save: Save) -> LiveState | None:
        """The live state that a later save can compare; None where it differs from what was planned."""
        # A custom state_dict may do anything. The save itself has succeeded with it: only the plan is not reused.
        with contextlib.suppress(Exception):
            live = inspect_state(save.items, save_optimizer=self._planner.settings.save_optimizer)
            planned = {name: tree.flat() for name, tree in save.plan.trees.items()}
            if live.matches(planned):
                return live
        return None

    def keep(
        self,
        save: Save,
        live: LiveState | None,
        proposals: Sequence[Proposal],
        values: MemoryLayout,
    ) -> None:
        """Keep the plan of *save*. Its state was *live* (see :meth:`live_state`). Collective."""
        # All ranks keep the plan, or none does: `agree` calls a collective only with a plan, so that
        # a rank without one would leave the others waiting.
        is_reusable = agree.gather_objects(self._group, live is not None)
        if live is not None and all(is_reusable):
            dp_ranks = [proposal.dp_rank for proposal in proposals]
            nbytes = self._planner.expected_bytes
            # With the same signature, later saves have such state in the same optimizers.
            digests = proposals[self._planner.settings.ranks.rank].digests
            compared = {item.name for item in save.items if has_digests_of_own(item.name, digests)}
            self._kept = _Kept(live.signature, save, dp_ranks, values, nbytes, frozenset(compared))

    def agree(self, save: Save, state: Mapping[str, Any]) -> Callable[[], list[FileJob]] | None:
        """Agree to save with the kept plan; return None, with no effect, where there is none or it does not match on
        some rank.

        Collective. Raises on all ranks what prevented rank 0 from creating the staging directory, and
        :class:`RecipeError` where state of an optimizer differs that must not. The result takes the
        present values, and returns the jobs of objects. The plan has the jobs of the trees.
        """
        kept = self._kept
        if kept is None:
            return None
        settings = self._planner.settings
        save.plan = kept.save.plan
        live, proposal = LiveState(), _ReuseProposal()
        failure: AutomodelError | None = None
        # Whatever fails here fails again, and is reported, when the save is planned anew.
        with contextlib.suppress(Exception):
            save.items = classify(state)
            live = inspect_state(save.items, save_optimizer=settings.save_optimizer)
            if live.signature == kept.signature and self._update_values(kept, live):
                digests_here = self._digests(kept, live, save)
                for name, values in save.replicated.items():
                    proposal.replicated[name] = digest_of_all(values)
                proposal.digests = digests_here
        if proposal.digests is not None and settings.ranks.rank == 0:
            try:
                forecast = Forecast(kept.nbytes, free_bytes(settings.run.path))
                proposal.staging = self._planner.reserve(save, forecast)
                proposal.previous = save.previous
            except Exception as error:
                failure = as_failure(error, f"saving {save.name}", settings.run.path)
                proposal.failed = True
        proposals = agree.gather_objects(self._group, proposal)
        # All ranks see rank 0's flag, so that all of them enter this collective, or none does.
        if proposals[0].failed:
            agree.all_or_nothing(self._group, failure)
        digests = [proposal.digests for proposal in proposals if proposal.digests is not None]
        # Rank 0 may have created its directory before it sees that another rank's state differs.
        if len(digests) < len(proposals):
            self._kept = None
            save.staging.remove()
            return None
        check_consistent(digests)
        # The plan may be of a time when the ranks had the same values.
        replicated = [proposal.replicated for proposal in proposals]
        self._planner.replica_warnings.compare(self._group, save.replicated, replicated)
        save.staging.path = Path(proposals[0].staging)
        save.previous = proposals[0].previous

        def prepare() -> list[FileJob]:
            for name, tree in save.plan.trees.items():
                tree.set_values(live.trees[name])
            return self._planner.object_jobs(save, digests, kept.dp_ranks)

        return prepare

    def _digests(self, kept: _Kept, live: LiveState, save: Save) -> dict[str, str]:
        """The digests of this rank's state that is small, which is read into *save*."""
        for item in save.items:
            if item.kind == "object":
                save.objects[item.name] = item.value.state_dict()
        digests = {key: check_safe(key, value) for key, value in save.objects.items()}
        for item in save.items:
            if item.name in kept.compared:
                digests |= digests_of_own(item.name, item.value)
        save.replicated = present_digests(kept.save.replicated, live.trees)
        return digests

    def _update_values(self, kept: _Kept, live: LiveState) -> bool:
        """Update the values that are not tensors in the plan; return False where one no longer has its size."""
        for name in kept.values.values:
            tree_name, key = name
            value = live.trees[tree_name][key]
            pickled = pickle.dumps(value)
            if kept.pickled.get(name) == pickled:
                continue
            check_safe_values(tree_name, {key: value})
            # All later data would move, in memory and in the file: a new size requires a new plan.
            if not kept.values.replace(name, bytes(saved(value))):
                return False
            kept.pickled[name] = pickled
        return True


@dataclass(slots=True)
class LiveState:
    """The values of a rank's state without copies.

    *trees* has, by tree, every value under the flat name that it has in DCP's plan. *signature* is what a plan depends
    on, to be compared with ``==``.
    """

    trees: dict[str, dict[str, Any]] = field(default_factory=dict)
    signature: list[Any] = field(default_factory=list)

    def matches(self, trees: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether the live state equals *trees*, the planned flat state dicts, in names, values and memory."""
        if self.trees.keys() != trees.keys():
            return False
        for name, planned in trees.items():
            live = self.trees[name]
            if live.keys() != planned.keys():
                return False
            if not all(_is_same(live[key], planned[key]) for key in live):
                return False
        return True


@torch.no_grad()
def inspect_state(items: Iterable[Item], *, save_optimizer: bool) -> LiveState:
    """Inspect the present state of *items* without copying.

    Raises what their state dicts raise, and :class:`KeyError` where an optimizer trains parameters of no module in
    *items*.
    """
    found = LiveState()
    fqns: dict[int, str] = {}
    items = list(items)
    for item in items:
        found.signature.append((item.name, item.kind, item.scope, item.aliases, item.owner))
        if item.kind == "module":
            # keep_vars: without it, the values are detached copies. Their ids are not the
            # parameters'.
            state = unwrap(item.value).state_dict(keep_vars=True)
            layout = stored_layout(item.value)
            names, tied = stored_names(item.value, state, state.items(), layout)
            found.trees[item.name] = stored_values(state, names, layout)
            found.signature += (names, tied, [_spec(value) for value in state.values()])
            # As in Owners: module names may not contain dots.
            prefix = item.name.replace(".", "%")
            for key, value in state.items():
                # A tied parameter keeps its first name, which named_parameters gives it in Owners.
                fqns.setdefault(id(value), f"{prefix}.{key}")
    for item in items:
        if item.kind == "optimizer" and save_optimizer:
            tree = dict(_optimizer_tree(item, fqns))
            for other in items:
                if other.owner == item.name:
                    # In a tuple, as in `optimizer_tree`: the names and values are compared with
                    # that tree.
                    tree[other.name] = (other.value.state_dict(),)
            found.trees[item.name] = tree
            specs = [(name, _spec(value, nested=True)) for name, value in tree.items()]
            found.signature.append(specs)
    return found


def _optimizer_tree(item: Item, fqns: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """The values of an optimizer by flat name; *fqns* has the FQN of each parameter by its id."""
    for parameter, entry in item.value.state.items():
        path = f"{item.name}.state.{fqns[id(parameter)]}"
        for key, value in entry.items():
            yield f"{path}.{key}", value
    trained = trained_by_all(item.value)
    for index, group in enumerate(item.value.param_groups):
        names = [fqns[id(parameter)] for parameter in group["params"]]
        if trained is not None:
            names = list(trained[index])
        for key, value in {**group, "params": names}.items():
            yield f"{item.name}.param_groups.{index}.{key}", value


def _spec(value: Any, *, nested: bool = False) -> Any:
    """Return what a plan depends on; for a value that DCP would flatten (*nested*), an object that equals no other."""
    if isinstance(value, DTensor):
        return (
            type(value),
            value.dtype,
            value.shape,
            local_tensor(value).shape,
            value.placements,
            value.device_mesh,
            value.requires_grad,
        )
    if isinstance(value, torch.Tensor):
        # Frozen parameters are stored in other files.
        return type(value), value.dtype, value.shape, value.requires_grad
    if not nested:
        return type(value)
    if isinstance(value, list) and all(isinstance(element, str) for element in value):
        return tuple(value)
    if isinstance(value, (*_SCALARS, tuple)):
        return type(value)
    return object()


def _is_same(live: Any, planned: Any) -> bool:
    """Whether two values are equal; for tensors, whether they are the same memory."""
    if not isinstance(live, torch.Tensor):
        return bool(live == planned)
    if not isinstance(planned, torch.Tensor):
        return False
    if isinstance(live, DTensor) != isinstance(planned, DTensor):
        return False
    one, other = local_tensor(live), local_tensor(planned)
    same_memory = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return same_memory and one.dtype == other.dtype and one.shape == other.shape
