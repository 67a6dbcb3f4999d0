"""``init_from``: the weights of a new run, from a checkpoint or files of any program, or from several of them."""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.distributed import ProcessGroup

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.files.layout import RankLayout
from automodel_ckpt.checkpoint.parts.verify import Level
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.state.fill_modules import (
    Filling,
    NewRows,
    fill_module,
    module_shapes,
    whole_shapes,
)
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.keys.model import InitFromConfig, InitFromSource
from automodel_ckpt.convert.names.registry import model_types
from automodel_ckpt.convert.open import Weights, open_weights
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from automodel_ckpt.models.inspect.repository import (
    base_directory,
    check_revision,
    fetched_directory,
    require_local,
)
from automodel_ckpt.models.weight_matching import (
    Names,
    Verdict,
    compare,
    copies_of_tied,
    ignored_by,
)
from automodel_ckpt.parallel.ranks.agree import raise_on_all_ranks
from automodel_ckpt.training.parts.init_checks import (
    Difference,
    adapter_hint,
    check_scales,
    check_tied,
    other_configs,
    shared_modules,
    side_directory,
)

log = logging.getLogger("automodel_ckpt")


@contextlib.contextmanager
def config_directory(modules: Mapping[str, nn.Module]) -> Iterator[Path | None]:
    """Yield a temporary directory with the config.json of the module ``model``; None if no names are converted to it.

    Weights of Megatron and torchtitan do not always state which model they are for. The model of the recipe does.
    """
    config: Any = None
    if "model" in modules:
        config = getattr(unwrap(modules["model"]), "config", None)
    if getattr(config, "model_type", None) not in model_types():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="automodel_ckpt-config-") as directory:
        content = json.loads(config.to_json_string(use_diff=False))
        Path(directory, "config.json").write_text(json.dumps(content))
        yield Path(directory)


MODEL = "model"
_MAX_NAMED = 3


Section = InitFromConfig | Sequence[InitFromSource]


@dataclass(slots=True)
class Start:
    """The weights that a run starts from: those of one source, or of several.

    *tensors* maps names in the model to the module of a source and the name there, *tied* maps aliases to such names.
    *directories* has the directory with the side files of each module of a source, by id, and *whole* those of sources
    for the whole model. *differences* are those to the model's config.
    *scopes* are the modules of the model that get weights; empty text is the whole model. *unused* are the names
    without the prefix of ``strip``. The patterns are those of all sources.
    """

    sources: list[Weights] = field(default_factory=list)
    tensors: dict[str, tuple[Tensors, str]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    directories: dict[int, Path | None] = field(default_factory=dict)
    whole: list[Weights] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    allow_missing: list[str] = field(default_factory=list)
    allow_unexpected: list[str] = field(default_factory=list)

    @property
    def paths(self) -> str:
        """The paths of all sources, in words."""
        return ", ".join(str(weights.path) for weights in self.sources)

    def add(self, section: InitFromConfig, weights: Weights, where: str) -> None:
        """Add a source, whose tensors replace those of earlier ones. *where* is the key of its section.

        Raises :class:`RecipeError` if none of its names begins with ``strip``.
        """
        strip, into = "", ""
        if isinstance(section, InitFromSource):
            strip, into = _prefix(section.strip), _prefix(section.into)
        named: dict[str, tuple[Tensors, str]] = {}
        for attribute, module in weights.modules.items():
            directory = side_directory(weights, module)
            self.directories[id(module)] = directory
            if attribute == MODEL and not strip and not into:
                self.whole.append(weights)
            for fqn in module.tensors:
                full = _qualified(attribute, fqn)
                if full.startswith(strip):
                    named[into + full.removeprefix(strip)] = (module, fqn)
                    self._allow(section, full, into + full.removeprefix(strip))
                else:
                    self.unused.append(full)
            for alias, stored in module.tied.items():
                names = [_qualified(attribute, name) for name in (alias, stored)]
                if all(name.startswith(strip) for name in names):
                    renamed = [into + name.removeprefix(strip) for name in names]
                    self.tied[renamed[0]] = renamed[1]
        if not named:
            raise RecipeError(
                "no name of a tensor begins with this prefix",
                where=f"{where}.strip",
                value=strip,
                hint=f"the names there: {', '.join(sorted(self.unused)[:5])}",
            )
        replaced = named.keys() & self.tensors.keys()
        if replaced:
            log.info(
                "%s replaces %s of earlier sources", weights.path, counted(len(replaced), "tensor")
            )
        self.tensors |= named
        self.sources.append(weights)
        self.scopes.append(into)
        self.allow_missing += section.allow_missing

    def _allow(self, section: InitFromConfig, own_name: str, name: str) -> None:
        # The patterns are those of names in the source: here the names of the model are compared.
        if any(fnmatchcase(own_name, pattern) for pattern in section.allow_unexpected):
            self.allow_unexpected.append(glob.escape(name))

    def covers(self, name: str) -> bool:
        """Whether *name* of the model is in one of the modules that get weights."""
        return name.startswith(tuple(self.scopes))


class _Pair(NamedTuple):
    """The tensors of the modules that get weights, and those of the sources.

    Names on either side may lack *prefix*.
    """

    here: Names
    there: Names
    prefix: str


def start_from(
    section: Section,
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
        compared = _compared(section, modules, resizable, fetches=True)
        assert compared is not None
        start, pair, verdict = compared
        for weights in start.sources:
            weights.verify(verify, ranks.rank, ranks.world_size)
        if ranks.rank == 0:
            _check_tied(start, modules, pair)
            _warn_of_differences(start)
    # From here on weights are overwritten: all ranks have compared and verified the files above.
    log.info("Starting from the weights in %s", start.paths)
    verdict.log_differences("they and the model")
    if start.unused:
        names = "\n    ".join(sorted(start.unused))
        log.info("Tensors without the prefix that is removed are not used:\n    %s", names)

    with raise_on_all_ranks(group):
        for name, module in modules.items():
            fill_module(module, _fillings(name, module, verdict, start), new_rows)
    return verdict


def inspect_start(
    section: Section, modules: Mapping[str, nn.Module], *, resizable: Iterable[str] = ()
) -> tuple[Start, Verdict] | None:
    """The weights that :func:`start_from` would read, and how they match *modules*, from manifests and headers alone.

    No value is read and nothing is fetched: None for a Hub name whose weights are not in the cache. Raises as
    :func:`start_from`, except for damage that only a digest shows.
    """
    compared = _compared(section, modules, resizable, fetches=False)
    if compared is None:
        return None
    start, _, verdict = compared
    for weights in start.sources:
        weights.verify("size", 0, 1)
    return start, verdict


def _compared(
    section: Section,
    modules: Mapping[str, nn.Module],
    resizable: Iterable[str],
    *,
    fetches: bool,
) -> tuple[Start, _Pair, Verdict] | None:
    """Open all sources, and compare their tensors with those of the *modules*; None if one is not on this machine.

    Raises :class:`RecipeError` for differences that the section does not allow.
    """
    start = Start()
    with config_directory(modules) as config:
        for one, where in _sections(section):
            # The names of a part of the model are not those of its config.
            is_part = isinstance(one, InitFromSource) and bool(one.strip or one.into)
            weights = _open(one, where, None if is_part else config, fetches=fetches)
            if weights is None:
                return None
            start.add(one, weights, where)
    pair = _names_of(start, modules)
    verdict = compare(
        pair.here,
        pair.there,
        prefix=pair.prefix,
        resizable=set(resizable),
        allow_missing=start.allow_missing,
        allow_unexpected=start.allow_unexpected,
    )
    _check_allowed(section, start, pair, verdict)
    if MODEL in modules:
        for weights in start.whole:
            start.differences += other_configs(modules[MODEL], weights)
        check_scales(modules[MODEL], start.tensors, start.directories, "init_from.path")
    return start, pair, verdict


def paths_of(section: Section) -> str:
    """The paths that ``init_from`` names, in words."""
    return ", ".join(one.path for one, _ in _sections(section))


def _sections(section: Section) -> list[tuple[InitFromConfig, str]]:
    """Each source, with the key of its section."""
    if isinstance(section, InitFromConfig):
        return [(section, "init_from")]
    return [(one, f"init_from.{number}") for number, one in enumerate(section)]


def _prefix(name: str) -> str:
    return name if not name or name.endswith(".") else f"{name}."


def verify_base(
    name: str,
    level: Level,
    ranks: RankLayout,
    group: ProcessGroup | None,
    revision: str | None = None,
) -> None:
    """Compare a base model that is an export with its manifest, before anything is read from it; other bases have none.

    *revision* is a branch, tag or commit of a Hub name. Called on all ranks, each of which reads its share. Raises
    :class:`CheckpointUnusable`, the same on all ranks.
    """
    with raise_on_all_ranks(group):
        directory = base_directory(name, revision)
        _verify_export(directory, level, rank=ranks.rank, num_ranks=ranks.world_size)


def verify_side_files(name: str, level: Level, revision: str | None = None) -> None:
    """Compare the small files of a directory that is an export (config, tokenizer, processor) with its manifest, before
    they are read. Every rank reads them all. Raises :class:`CheckpointUnusable`."""
    directory = None
    with contextlib.suppress(OSError, ValueError):  # no name of the Hub, which its reader reports
        directory = base_directory(name, revision)
    _verify_export(directory, level, are_weights_read=False)


def _verify_export(
    directory: Path | None, level: Level, *, are_weights_read: bool = True, **share: int
) -> None:
    export = find_export_manifest(directory, follow_links=True) if directory is not None else None
    if directory is None or export is None:
        return
    # Side files that training does not read may be missing from a copy.
    present = {file for file in export.files if (directory / file).exists()}
    if not are_weights_read:
        present = {file for file in present if not file.endswith(".safetensors")}
    if problems := export.problems(only=present, level=level, **share):
        raise CheckpointUnusable.all_of(problems)


def _open(
    section: InitFromConfig, where: str, config: Path | None, *, fetches: bool
) -> Weights | None:
    """The weights of a path or of a Hub name. Without *fetches*, None for a URL and a name that is not in the cache.

    *config* is the directory of the config.json to whose names weights of other programs are converted.
    """
    path = section.path
    if not fetches and is_url(path):
        return None
    local = Path(path).expanduser()
    # A path in an existing directory is never a Hub name: a typo must not become a download.
    if local.exists() or local.is_symlink() or local.parent.is_dir():
        check_revision(path, section.revision, f"{where}.revision", f"{where}.path")
        return open_weights(local, config)
    require_local(path, f"{where}.path")
    if not fetches:
        cached = base_directory(path, section.revision)
        has_weights = cached is not None and any(cached.glob("*.safetensors"))
        return open_weights(cached) if cached is not None and has_weights else None
    if (fetched := fetched_directory(path, section.revision)) is None:
        raise RecipeError(
            "the weights of this name cannot be fetched from the Hub, or are no safetensors",
            where=f"{where}.path",
            value=path,
            hint="check the name (of a directory: that it is there); a Hub name needs the network or a filled cache, "
            "and for a model that asks for it a login (hf auth login)",
        )
    return open_weights(fetched)


def _names_of(start: Start, modules: Mapping[str, nn.Module]) -> _Pair:
    """The tensors of the *modules* that get weights, and those of the sources."""
    shapes: dict[str, Any] = {}
    tied: dict[str, str] = {}
    for name, module in modules.items():
        own_shapes, own_tied = whole_shapes(module)
        shapes |= {_qualified(name, fqn): shape for fqn, shape in own_shapes.items()}
        tied |= {
            _qualified(name, alias): _qualified(name, kept) for alias, kept in own_tied.items()
        }
    _check_scopes(start, shapes)
    shapes = {name: shape for name, shape in shapes.items() if start.covers(name)}
    there_shapes = {
        name: module.tensors[fqn].shape for name, (module, fqn) in start.tensors.items()
    }
    prefix = ""
    if MODEL in modules:
        model = unwrap(modules[MODEL])
        prefix = getattr(model, "base_model_prefix", "")
        for name in ignored_by(model, there_shapes.keys() - shapes.keys()):
            del there_shapes[name]
    return _Pair(Names(shapes, tied), Names(there_shapes, start.tied), prefix)


def _warn_of_differences(start: Start) -> None:
    for found in start.differences:
        lines = "".join(f"\n    {line}" for line in found.lines)
        log.warning("the weights in %s fit, but %s:%s", found.path, found.text, lines)


def _check_tied(start: Start, modules: Mapping[str, nn.Module], pair: _Pair) -> None:
    aliases = dict(pair.here.tied)
    if MODEL in modules:
        aliases |= shared_modules(modules[MODEL])
    copies = copies_of_tied(Names(pair.here.shapes, aliases), pair.there, pair.prefix)
    check_tied(copies, start.tensors, "init_from.path")


def _check_allowed(section: Section, start: Start, pair: _Pair, verdict: Verdict) -> None:
    paths = paths_of(section)
    if isinstance(section, InitFromConfig):
        if not (section.allow_missing or section.allow_unexpected):
            _check_both_given(
                paths, ours=_adapted(pair.here.shapes), theirs=_adapted(pair.there.shapes)
            )
        hint = _hint(start, pair, verdict)
        try:
            verdict.check_allowed("init_from.path", paths, "init_from")
        except RecipeError as error:
            if not hint:
                raise
            problems = [replace(each, hint=hint) for each in error.problems]
            raise RecipeError.all_of(problems) from None
    else:
        verdict.check_allowed("init_from", paths, "init_from.N")


def _hint(start: Start, pair: _Pair, verdict: Verdict) -> str:
    """What to do about adapters that the model does not have, or about names that all have a prefix there."""
    if _adapted(pair.here.shapes) and _adapted(pair.there.shapes):
        return adapter_hint(start.directories.values())
    missing = next((name for name in verdict.new if name not in verdict.allowed), None)
    for name in verdict.unexpected if missing is not None else ():
        if name.endswith(f".{missing}"):
            strip = name.removesuffix(f".{missing}")
            path = start.sources[0].path
            return f"the names there have a prefix; remove it with init_from: [{{path: {path}, strip: {strip}}}]"
    return ""


def _check_scopes(start: Start, names: Iterable[str]) -> None:
    """Raise :class:`RecipeError` for a module in ``into`` that the model does not have."""
    known = list(names)
    for number, scope in enumerate(start.scopes):
        if not any(name.startswith(scope) for name in known):
            modules = sorted({name.rpartition(".")[0] for name in known})
            raise RecipeError(
                "the model has no such module",
                where=f"init_from.{number}.into",
                value=scope.removesuffix("."),
                hint=f"modules of the model: {', '.join(modules[:5])}, ...",
            )


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


def _fillings(name: str, module: nn.Module, verdict: Verdict, start: Start) -> dict[str, Filling]:
    """What fills the module *name*, by its own names."""
    names = {fqn: _qualified(name, fqn) for fqn in module_shapes(module)[0]}
    return {
        fqn: Filling(*start.tensors[verdict.matches[full]], full in verdict.resized)
        for fqn, full in names.items()
        if full in verdict.matches
    }


def _qualified(attribute: str, fqn: str) -> str:
    return fqn if attribute == MODEL else f"{attribute}.{fqn}"
