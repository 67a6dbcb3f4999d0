"""``init_from``: the weights of a new run, from a checkpoint or from Hugging Face files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.layout import RankLayout
from automodel_ckpt.checkpoint.module_tensors import unwrap
from automodel_ckpt.checkpoint.state.fill_modules import (
    Filling,
    NewRows,
    fill_module,
    module_shapes,
    whole_shapes,
)
from automodel_ckpt.checkpoint.verify import Level
from automodel_ckpt.config.schema import InitFromConfig
from automodel_ckpt.convert.open import Weights, open_weights
from automodel_ckpt.distributed.agree import raise_on_all_ranks
from automodel_ckpt.errors import CheckpointUnusable, Problem, RecipeError
from automodel_ckpt.models.build import base_directory, fetched_directory, require_local
from automodel_ckpt.models.weight_matching import Names, Verdict, compare

log = logging.getLogger("automodel_ckpt")

MODEL = "model"


def start_from(
    section: InitFromConfig,
    modules: Mapping[str, nn.Module],
    *,
    ranks: RankLayout,
    group: ProcessGroup | None,
    resizable: Iterable[str] = (),
    new_rows: NewRows = "mean",
    verify: Level = "digest",
) -> Verdict:
    """Fill the recipe's *modules* (by attribute name) with the weights that ``init_from`` names.

    Names of the module ``model`` are as they are, those of others follow their attribute's name and a dot. *resizable*
    names those of ``model`` that may have another number of rows. Called on all ranks, each of which reads its part.
    Raises, the same on all ranks, :class:`RecipeError` for other weights than those of the modules, and
    :class:`CheckpointUnusable` for damaged ones.
    """
    with raise_on_all_ranks(group):
        weights, verdict = _found(section, modules, resizable, ranks, verify)
    # From here on weights are overwritten: all ranks have compared and verified the files above.
    log.info("Starting from the weights in %s", weights.path)
    verdict.log_differences("they and the model")

    with raise_on_all_ranks(group):
        for name, module in modules.items():
            fill_module(module, _fillings(name, module, verdict, weights), new_rows)
    return verdict


def inspect_start(
    section: InitFromConfig, modules: Mapping[str, nn.Module], *, resizable: Iterable[str] = ()
) -> tuple[Weights, Verdict] | None:
    """The weights that :func:`start_from` would read, and how they match *modules*, from manifests and headers alone.

    No value is read and nothing is fetched: None for a Hub name whose weights are not in the cache. Raises as
    :func:`start_from`, except for damage that only a digest shows.
    """
    weights = _open_local(section.path)
    if weights is None:
        return None
    verdict = _compare(section, weights, modules, resizable)
    weights.verify("size", 0, 1)
    return weights, verdict


def verify_base(name: str, level: Level, ranks: RankLayout, group: ProcessGroup | None) -> None:
    """Compare a base model that is an export with its manifest, before anything is read from it; other bases have none.

    Called on all ranks, each of which reads its share. Raises :class:`CheckpointUnusable`, the same on all ranks.
    """

    with raise_on_all_ranks(group):
        problems = _base_problems(name, level, ranks)
        if problems:
            raise CheckpointUnusable.all_of(problems)


def _base_problems(name: str, level: Level, ranks: RankLayout) -> list[Problem]:
    directory = base_directory(name)
    if directory is None:
        return []
    export = find_export_manifest(directory, follow_links=True)
    if export is None:
        return []
    # Side files that training does not read may be missing from a copy.
    present = {file for file in export.files if (directory / file).exists()}
    return export.problems(only=present, level=level, rank=ranks.rank, num_ranks=ranks.world_size)


def verify_side_files(name: str, level: Level) -> None:
    """Compare the small files of a directory that is an export (config, tokenizer, processor) with its manifest, before
    they are read. Every rank reads them all. Raises :class:`CheckpointUnusable`."""
    directory = None
    with contextlib.suppress(OSError, ValueError):  # no name of the Hub, which its reader reports
        directory = base_directory(name)
    export = find_export_manifest(directory, follow_links=True) if directory is not None else None
    if directory is None or export is None:
        return
    small = {
        file
        for file in export.files
        if not file.endswith(".safetensors") and (directory / file).exists()
    }
    if problems := export.problems(only=small, level=level):
        raise CheckpointUnusable.all_of(problems)


def _found(
    section: InitFromConfig,
    modules: Mapping[str, nn.Module],
    resizable: Iterable[str],
    ranks: RankLayout,
    level: Level,
) -> tuple[Weights, Verdict]:
    weights = _open(section.path)
    verdict = _compare(section, weights, modules, resizable)
    weights.verify(level, ranks.rank, ranks.world_size)
    return weights, verdict


def _open_local(path: str) -> Weights | None:
    """The weights of a path, or of a Hub name that is in the cache; None for any other Hub name."""
    local = Path(path).expanduser()
    # A path in an existing directory is never a Hub name: a typo must not become a download.
    if local.exists() or local.is_symlink() or local.parent.is_dir():
        return open_weights(local)
    require_local(path, "init_from.path")
    cached = base_directory(path)
    if cached is None or not any(cached.glob("*.safetensors")):
        return None
    return open_weights(cached)


def _open(path: str) -> Weights:
    local = Path(path).expanduser()
    if local.exists() or local.is_symlink() or local.parent.is_dir():
        return open_weights(local)
    require_local(path, "init_from.path")
    if (fetched := fetched_directory(path)) is None:
        raise RecipeError(
            "the weights of this name cannot be fetched from the Hub, or are no safetensors",
            where="init_from.path",
            value=path,
            hint="check the name (of a directory: that it is there); a Hub name needs the network or a filled cache, "
            "and for a model that asks for it a login (hf auth login)",
        )
    return open_weights(fetched)


def _compare(
    section: InitFromConfig,
    weights: Weights,
    modules: Mapping[str, nn.Module],
    resizable: Iterable[str],
) -> Verdict:
    shapes: dict[str, Any] = {}
    tied: dict[str, str] = {}
    for name, module in modules.items():
        own_shapes, own_tied = whole_shapes(module)
        shapes |= {_qualified(name, fqn): shape for fqn, shape in own_shapes.items()}
        tied |= {
            _qualified(name, alias): _qualified(name, kept) for alias, kept in own_tied.items()
        }
    there = Names(
        {
            _qualified(n, fqn): t.shape
            for n, module in weights.modules.items()
            for fqn, t in module.tensors.items()
        },
        {
            _qualified(n, a): _qualified(n, kept)
            for n, m in weights.modules.items()
            for a, kept in m.tied.items()
        },
    )
    verdict = compare(
        Names(shapes, tied),
        there,
        prefix=getattr(unwrap(modules[MODEL]), "base_model_prefix", "") if MODEL in modules else "",
        resizable=set(resizable),
        allow_missing=section.allow_missing,
        allow_unexpected=section.allow_unexpected,
    )
    if not (section.allow_missing or section.allow_unexpected):
        _check_both_given(section.path, ours=_adapted(shapes), theirs=_adapted(there.shapes))
    verdict.check_allowed("init_from.path", section.path, "init_from")
    return verdict


def _adapted(names: Iterable[str]) -> bool:
    """Whether these are the weights of adapters."""
    return any(".lora_" in name for name in names)


def _check_both_given(path: str, *, ours: bool, theirs: bool) -> None:
    """Adapters alone are no whole model, and a whole model has no adapters."""
    if theirs and not ours:
        raise RecipeError(
            "these are adapters, and this recipe trains a whole model",
            where="init_from.path",
            value=path,
            hint="make one model of base and adapters, by ckpt export --merge, and name that; or give the recipe the "
            "peft section of the adapters",
        )
    if ours and not theirs:
        raise RecipeError(
            "this is a whole model, and the recipe trains adapters on one",
            where="init_from.path",
            value=path,
            hint="name it in model.from_pretrained (of a checkpoint of ours its model/consolidated directory, which "
            "ckpt consolidate makes), and leave init_from out",
        )


def _fillings(
    name: str, module: nn.Module, verdict: Verdict, weights: Weights
) -> dict[str, Filling]:
    """What fills the module *name*, by its own names."""
    sources = {
        _qualified(n, fqn): (there, fqn)
        for n, there in weights.modules.items()
        for fqn in there.tensors
    }
    names = {fqn: _qualified(name, fqn) for fqn in module_shapes(module)[0]}
    return {
        fqn: Filling(*sources[verdict.matches[full]], full in verdict.resized)
        for fqn, full in names.items()
        if full in verdict.matches
    }


def _qualified(attribute: str, fqn: str) -> str:
    return fqn if attribute == MODEL else f"{attribute}.{fqn}"
