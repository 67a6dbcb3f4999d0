"""Modules that users' recipes import or name in ``_target_``, and that have moved since: both names work."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = "automodel_ckpt."
FORMER = {
    "checkpoint.module_tensors": "checkpoint.state.module_tensors",
    "checkpoint.parts.collective_errors": "checkpoint.parts.failures",
    "checkpoint.state.optimizer_state": "checkpoint.state.module_tensors",
    "checkpoint.tensors.stored": "checkpoint.tensors.box_reader",
    "config.rules": "config.tree.rules",
    "data.batches.sampler": "data.batches.micro_batches",
    "data.media.media": "data.media.media_files",
    "data.mock": "examples.data.mock",
    "data.pairs.joint_pairs": "data.text_pairs",
    "data.pairs.preference_rows": "data.preference",
    "data.rows.arguments": "data.collate",
    "data.rows.cache": "data.samples.samples",
    "data.samples.truncation": "data.samples.tokenized",
    "distributed.agree": "parallel.ranks.agree",
    "loss.contrastive": "loss.ranking",
    "loss.label_measures": "recipes.sequence_classification",
    "loss.listwise": "loss.ranking",
    "models.inspect.error_texts": "models.inspect.interface",
    "models.inspect.forward": "models.inspect.interface",
    "models.inspect.vision": "models.inspect.interface",
    "models.layers.freezing": "models.model_checks",
    "models.loss.loss_inputs": "models.loss.fused_cross_entropy",
    "models.loss.z_loss": "models.loss.fused_cross_entropy",
    "optim.lr": "optim.build",
    "parallel.gradient_norm": "parallel.gradients",
    "parallel.precision": "training.model.sections",
    "recipes.base": "training.base",
    "recipes.loop": "training.loop",
    "recipes.objective": "training.parts.objective",
    "recipes.pairs": "recipes.preference",
    "recipes.recipe": "training.recipe",
    "training.adam8bit": "optim.adam8bit",
    "training.kinds.embedding_checks": "training.kinds.embedding",
    "training.kinds.embedding_pairs": "training.kinds.embedding",
    "training.measure.evaluation": "training.values.records",
    "training.model.row_sharing": "training.model.probes",
    "training.muon": "optim.muon",
    "training.rng": "base.rng",
    "training.start.start_rank": "training.recipe",
    "training.unsupported": "config.recipe_rules",
    "training.watch.batch_errors": "training.gradients",
}


def current_name(name: str) -> str:
    """Return the present dotted name of an object that has *name*, of a module of ``FORMER`` or of any other."""
    module, _, attribute = name.removeprefix(_PACKAGE).rpartition(".")
    if not name.startswith(_PACKAGE) or module not in FORMER:
        return name
    return f"{_PACKAGE}{FORMER[module]}.{attribute}"


class _FormerModules(MetaPathFinder, Loader):
    """Imports a module of ``FORMER`` as the present one; their packages, if they are gone, as empty ones."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(_PACKAGE)
        if name in FORMER:
            return ModuleSpec(fullname, self)
        if any(former.startswith(f"{name}.") for former in FORMER):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        present = FORMER.get(module.__name__.removeprefix(_PACKAGE))
        if present is not None:
            found = vars(importlib.import_module(_PACKAGE + present))
            module.__dict__.update({key: value for key, value in found.items() if key[:2] != "__"})
            module.__doc__ = found["__doc__"]


def keep_former_names() -> None:
    """Let imports of former names work. They are looked up last, only where there is no such module."""
    sys.meta_path.append(_FormerModules())
