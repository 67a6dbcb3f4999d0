"""``init_from``: the weights of a new run, from a checkpoint or files of any program, or from several of them."""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig

from automodel_ckpt.base.store_url import is_url, public
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.layout import RankLayout
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, ValueDict, Values
from automodel_ckpt.checkpoint.options import Level
from automodel_ckpt.checkpoint.sources.source import MODEL, Tensors
from automodel_ckpt.checkpoint.state.fill_modules import (
    Filling,
    NewRows,
    fill_module,
    module_shapes,
)
from automodel_ckpt.checkpoint.state.mismatch import first_lines
from automodel_ckpt.checkpoint.state.model_config import CONFIG as _CONFIG
from automodel_ckpt.checkpoint.state.model_config import config_changes
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.keys.model import InitFromConfig, InitFromSource
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.merging.merge_rules import scale_of
from automodel_ckpt.convert.names.registry import model_types
from automodel_ckpt.convert.open import Weights, open_weights
from automodel_ckpt.convert.targets.tensor_blocks import is_copy
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

log = logging.getLogger("automodel_ckpt")


Section = InitFromConfig | Sequence[InitFromSource]
Modules = Mapping[str, nn.Module]


class Start:
    """The weights that a run starts from, of one source or several, and how they match its *modules*."""

    def __init__(self, section: Section, modules: Modules) -> None:
        """*section* is ``init_from`` of the recipe."""
        self.is_single = isinstance(section, InitFromConfig)
        self._sections = sections_of(section)
        self._modules = modules
        self.sources: list[Weights] = []
        self.tensors: dict[str, tuple[Tensors, str]] = {}
        """{name in the model: (module of a source, name there)}."""
        self.differences: list[Difference] = []
        """How the configs of sources for the whole model differ from the model's."""
        self.unused: list[str] = []
        """The names without the prefix of ``strip``."""
        self._tied: TextDict = {}
        self._directories: dict[int, Path | None] = {}
        """The directory with the side files of each module of a source, by id."""
        self._whole: list[Weights] = []
        self._scopes: list[str] = []
        """The modules of the model that get weights. Empty text is the whole model."""
        self._allow_unexpected: list[str] = []
        self.verdict: Verdict

    @property
    def paths(self) -> str:
        """The paths of all sources, in words."""
        return ", ".join(str(weights.path) for weights in self.sources)

    def open(self, *, fetches: bool) -> bool:
        """Open all sources. Returns False if one is not on this machine.

        Raises :class:`RecipeError` if no name of one begins with its ``strip``.
        """
        with _config_directory(self._modules) as config:
            for one, where in self._sections:
                # The names of a part of the model are not the names of its config.
                is_part = isinstance(one, InitFromSource) and bool(one.strip or one.into)
                weights = _open(one, where, None if is_part else config, fetches=fetches)
                if weights is None:
                    return False
                self._add(one, weights, where)
        return True

    def _add(self, section: InitFromConfig, weights: Weights, where: str) -> None:
        """Add a source. Its tensors replace the tensors of earlier sources."""
        strip, into = "", ""
        if isinstance(section, InitFromSource):
            strip, into = (
                f"{name.removesuffix('.')}." if name else ""
                for name in (section.strip, section.into)
            )
        named: dict[str, tuple[Tensors, str]] = {}
        for attribute, module in weights.modules.items():
            self._directories[id(module)] = side_directory(weights, module)
            if attribute == MODEL and not strip and not into:
                self._whole.append(weights)
            for fqn in module.tensors:
                full = _qualified(attribute, fqn)
                if not full.startswith(strip):
                    self.unused.append(full)
                    continue
                name = into + full.removeprefix(strip)
                named[name] = (module, fqn)
                # The patterns are for names in the source: here the names of the model are compared.
                if any(fnmatchcase(full, pattern) for pattern in section.allow_unexpected):
                    self._allow_unexpected.append(glob.escape(name))
            for pair in module.tied.items():
                names = [_qualified(attribute, name) for name in pair]
                if all(name.startswith(strip) for name in names):
                    alias, stored = (into + name.removeprefix(strip) for name in names)
                    self._tied[alias] = stored
        if not named:
            raise RecipeError(
                "no name of a tensor begins with this prefix",
                where=f"{where}.strip",
                value=f"{strip}; the names there: {', '.join(sorted(self.unused)[:5])}",
            )
        replaced = named.keys() & self.tensors.keys()
        if replaced:
            log.info(
                "%s replaces %s of earlier sources", weights.path, counted(len(replaced), "tensor")
            )
        self.tensors |= named
        self.sources.append(weights)
        self._scopes.append(into)

    def compare(self, resizable: Iterable[str]) -> None:
        """Compare the tensors of the sources with the tensors of the modules.

        Raises :class:`RecipeError` for differences that the section does not allow.
        """
        shapes: ValueDict = {}
        tied: TextDict = {}
        for name, module in self._modules.items():
            own_shapes, own_tied = module_shapes(module)
            shapes |= {_qualified(name, fqn): shape for fqn, shape in own_shapes.items()}
            for pair in own_tied.items():
                alias, kept = (_qualified(name, each) for each in pair)
                tied[alias] = kept
        self._check_scopes(shapes)
        shapes = {
            name: shape for name, shape in shapes.items() if name.startswith(tuple(self._scopes))
        }
        there = {name: module.tensors[fqn].shape for name, (module, fqn) in self.tensors.items()}
        self._prefix = ""
        if MODEL in self._modules:
            model = unwrap(self._modules[MODEL])
            self._prefix = getattr(model, "base_model_prefix", "")
            for name in ignored_by(model, there.keys() - shapes.keys()):
                del there[name]
        self._here, self._there = Names(shapes, tied), Names(there, self._tied)
        self.verdict = compare(
            self._here,
            self._there,
            prefix=self._prefix,
            resizable=set(resizable),
            allow_missing=[each for one, _ in self._sections for each in one.allow_missing],
            allow_unexpected=self._allow_unexpected,
        )
        self._check_allowed()
        if MODEL in self._modules:
            for weights in self._whole:
                self.differences += other_configs(self._modules[MODEL], weights)
            check_scales(self._modules[MODEL], self.tensors, self._directories)

    def check_tied(self) -> None:
        """Raise :class:`RecipeError` if tensors that are one in the model have different values in the sources."""
        aliases = dict(self._here.tied)
        if MODEL in self._modules:
            aliases |= shared_modules(self._modules[MODEL])
        copies = copies_of_tied(Names(self._here.shapes, aliases), self._there, self._prefix)
        check_tied(copies, self.tensors)

    def fillings(self, name: str, module: nn.Module) -> dict[str, Filling]:
        """What fills the module *name*, by its own names."""
        found, verdict = {}, self.verdict
        for fqn in module_shapes(module)[0]:
            full = _qualified(name, fqn)
            if full in verdict.matches:
                stored = self.tensors[verdict.matches[full]]
                found[fqn] = Filling(*stored, full in verdict.resized)
        return found

    def _check_allowed(self) -> None:
        where, section = (
            ("init_from.path", "init_from") if self.is_single else ("init_from", "init_from.N")
        )
        value = ", ".join(one.path for one, _ in self._sections)
        try:
            self.verdict.check_allowed(where, value, section)
        except RecipeError as error:
            hint = self._hint() if self.is_single else ""
            if not hint:
                raise
            problems = [replace(each, hint=hint) for each in error.problems]
            raise RecipeError.all_of(problems) from None

    def _hint(self) -> str:
        """What to do about adapters or a whole model in its place, or about names that all have a prefix there."""
        verdict = self.verdict
        if any(".lora_" in name for name in [*self._here.shapes, *self._there.shapes]):
            return _ADAPTERS
        missing = next((name for name in verdict.new if name not in verdict.allowed), None)
        for name in verdict.unexpected if missing is not None else ():
            if name.endswith(f".{missing}"):
                strip = name.removesuffix(f".{missing}")
                path = self.sources[0].path
                return f"the names there have a prefix; remove it with init_from: [{{path: {path}, strip: {strip}}}]"
        return ""

    def _check_scopes(self, names: Iterable[str]) -> None:
        """Raise :class:`RecipeError` for a module in ``into`` that the model does not have."""
        known = list(names)
        for number, scope in enumerate(self._scopes):
            if not any(name.startswith(scope) for name in known):
                modules = sorted({name.rpartition(".")[0] for name in known})
                raise RecipeError(
                    "the model has no such module",
                    where=f"init_from.{number}.into",
                    value=f"{scope.removesuffix('.')}; modules of the model: {', '.join(modules[:5])}, ...",
                )


_ADAPTERS = (
    "give the recipe the section peft of these adapters, as in their adapter_config.json; make one model of base and "
    "adapters with ckpt export --merge; or name a whole model, which a recipe trains adapters on, in "
    "model.from_pretrained (a checkpoint of ours has one in model/consolidated) and leave init_from out"
)


def start_from(
    section: Section,
    modules: Modules,
    *,
    ranks: RankLayout,
    group: ProcessGroup | None,
    resizable: Iterable[str] = (),
    new_rows: NewRows = "mean",
    verify: Level = "digest",
) -> Verdict:
    """Fill the recipe's *modules* (by attribute name) with the weights that ``init_from`` names.

    Tensor names of the module ``model`` have no prefix. Names of other modules have their attribute's name and a dot as
    a prefix. *resizable* names the tensors of ``model`` that may have another number of rows. Called on all ranks, and
    each reads its part. Raises, the same on all ranks, :class:`RecipeError` for weights that do not match the modules,
    and :class:`CheckpointUnusable` for damaged weights.
    """
    start = Start(section, modules)
    with raise_on_all_ranks(group):
        start.open(fetches=True)
        start.compare(resizable)
        for weights in start.sources:
            weights.verify(verify, ranks.rank, ranks.world_size)
        if ranks.rank == 0:
            start.check_tied()
            for found in start.differences:
                lines = "".join(f"\n    {line}" for line in found.lines)
                log.warning("the weights in %s fit, but %s:%s", found.path, found.text, lines)
    # From here on weights are overwritten: all ranks have compared and verified the files above.
    log.info("Starting from the weights in %s", start.paths)
    start.verdict.log_differences("they and the model")
    if start.unused:
        names = "\n    ".join(sorted(start.unused))
        log.info("Tensors without the prefix that is removed are not used:\n    %s", names)
    with raise_on_all_ranks(group):
        for name, module in modules.items():
            fill_module(module, start.fillings(name, module), new_rows)
    return start.verdict


def inspect_start(
    section: Section, modules: Modules, *, resizable: Iterable[str] = ()
) -> Start | None:
    """The weights that :func:`start_from` would read, compared with *modules* by manifests and headers alone.

    No value is read and nothing is fetched. Returns None for a Hub name if its weights are not in the cache. Raises as
    :func:`start_from`, except for damage that only a digest shows.
    """
    start = Start(section, modules)
    if not start.open(fetches=False):
        return None
    start.compare(resizable)
    for weights in start.sources:
        weights.verify("size", 0, 1)
    return start


def sections_of(section: Section) -> list[tuple[InitFromConfig, str]]:
    """Each source, with the key of its section."""
    if isinstance(section, InitFromConfig):
        return [(section, "init_from")]
    return [(one, f"init_from.{number}") for number, one in enumerate(section)]


def _qualified(attribute: str, fqn: str) -> str:
    return fqn if attribute == MODEL else f"{attribute}.{fqn}"


@contextlib.contextmanager
def _config_directory(modules: Modules) -> Iterator[Path | None]:
    """Yield a temporary directory with the config.json of the module ``model``.

    Yields None when no names are converted to this config.

    Weights of Megatron and torchtitan do not always state which model they are for. The model of the recipe does.
    """
    config: Any = getattr(unwrap(modules[MODEL]), "config", None) if MODEL in modules else None
    if getattr(config, "model_type", None) not in model_types():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="automodel_ckpt-config-") as directory:
        Path(directory, "config.json").write_text(config.to_json_string(use_diff=False))
        yield Path(directory)


def _open(
    section: InitFromConfig, where: str, config: Path | None, *, fetches: bool
) -> Weights | None:
    """The weights of a path or of a Hub name.

    Without *fetches*, returns None for a name that is not in the cache. *config* is the directory of a config.json:
    weights of other programs are converted to the tensor names of this config.
    """
    path = section.path
    if is_url(path):
        raise RecipeError(
            "weights in a store are not read by their URL",
            where=f"{where}.path",
            value=public(path),
            hint="download them (`ckpt pull URL DIRECTORY` for a checkpoint of ours), and name the directory",
        )
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


Stored = Mapping[str, tuple[Tensors, str]]
"""The tensors of sources: {name in the model: (module of a source, name there)}."""

_ADAPTER = "default"
_PREFIX = "base_model.model."
_TRAINED = f".modules_to_save.{_ADAPTER}."
_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?:A\.weight|embedding_A)")
# Shapes and values show the first two. Without the last, only keys that both have are compared: programs add their own.
_NOT_COMPARED = ("vocab_size", "tie_word_embeddings", "transformers_version")
_UNTIE = (
    "name the files in model.from_pretrained, which reads both; or let the model have both: model.config_overrides: "
    "{tie_word_embeddings: false}, and model.allow_missing for the one that from_pretrained does not have"
)
_UNTIE_ADAPTERS = "let the model have both: peft.ensure_weight_tying: false"
# What a GGUF file states of these is the name of its architecture.
_OF_THE_CLASS = ("model_type", "architectures")
_POSITIONS = "rope_parameters"
_DIRECTION = "is_causal"
_FLOAT32 = 2.0**-22


def side_directory(weights: Weights, module: Tensors) -> Path | None:
    """The directory of config.json or adapter_config.json of a *module* of *weights*, or None for a single file."""
    if weights.checkpoint is not None:
        # Tensors without elements are in no file.
        files = (tensor.slices[0].file for tensor in module.tensors.values() if tensor.slices)
        file = next(files, None)
        return None if file is None else (module.root / file).parent
    if not weights.path.is_dir():
        return None
    # A checkpoint of NeMo AutoModel has the model in a directory of it.
    inner = weights.path / MODEL
    names = (layout.ADAPTER_CONFIG, _CONFIG)
    return inner if any((inner / name).is_file() for name in names) else weights.path


@dataclass(frozen=True)
class Difference:
    """A difference that names and shapes do not show: *text* describes it, and *lines* list the values."""

    path: Path
    text: str
    lines: tuple[str, ...]


def other_configs(model: nn.Module, weights: Weights) -> Iterator[Difference]:
    """Yield how the config stored with *weights*, which fit *model*, describes a model that computes something else.

    Such a difference can be intended, as another base of rotary positions.
    """
    config = getattr(unwrap(model), "config", None)
    if not isinstance(config, PreTrainedConfig):
        return
    here = _complete(config)
    stated = dict(weights.stated_config)
    found: dict[str, Values] = {}
    if stated:
        found["metadata"] = _same_rounding(_as_in_class(config, stated), here)
    directory = side_directory(weights, weights.modules[MODEL])
    if directory is None and not stated:
        # What is beside a single file belongs to it, as for ckpt import, unless the file states its config itself.
        directory = weights.path.parent
    there = None
    # A damaged one is no reason not to start: the weights are complete without it.
    with contextlib.suppress(CheckpointUnusable):
        there = None if directory is None else _side_json(directory, _CONFIG)
    if there is not None:
        if there.get("model_type") == config.model_type:
            # The settings of another program may be invalid here, and are compared as they are.
            with contextlib.suppress(Exception):
                there = _complete(type(config).from_dict(there))
        # What transformers' masks do without the setting.
        there.setdefault(_DIRECTION, True)
        here.setdefault(_DIRECTION, True)
        found["config.json"] = there
    for where, settings in found.items():
        compared = {key: value for key, value in settings.items() if key not in _NOT_COMPARED}
        lines = config_changes(compared, here, there="there").function
        if lines:
            text = f"their {where} describes a model that computes something else"
            yield Difference(weights.path, text, lines)


def _as_in_class(config: PreTrainedConfig, stated: ValueDict) -> ValueDict:
    """Return the *stated* settings under the keys that *config* has, without those that are not stated.

    Other programs use other names for models: in GGUF, Mistral has the architecture ``llama`` too.
    """
    for key in _OF_THE_CLASS:
        stated.pop(key, None)
    with contextlib.suppress(Exception):
        complete = _complete(type(config).from_dict(dict(stated)))
        # Rotary positions have other keys in older versions of transformers.
        names = {_POSITIONS, *stated} if "rope_theta" in stated else set(stated)
        return {key: value for key, value in complete.items() if key in names}
    return stated


def _same_rounding(there: Values, here: Values) -> ValueDict:
    """Return *there* with the numbers of *here* that are equal in float32, which other formats store."""
    found: ValueDict = {}
    for key, value in there.items():
        own = here.get(key)
        found[key] = value
        if isinstance(value, Mapping) and isinstance(own, Mapping):
            found[key] = _same_rounding(value, own)
        elif isinstance(value, float) and isinstance(own, int | float):
            found[key] = own if math.isclose(value, own, rel_tol=_FLOAT32) else value
    return found


def _complete(config: PreTrainedConfig) -> ValueDict:
    """All settings of a config; config.json only has those that are not the default of its class."""
    settings: ValueDict = json.loads(config.to_json_string(use_diff=False))
    return settings


def _side_json(directory: Path, name: str) -> ValueDict | None:
    """The content of the JSON file *name* of the weights in *directory*, or next to shards.

    Returns None when there is no such file.
    """
    for place in (directory / layout.HF_METADATA, directory):
        # The files of the Hub's cache are links.
        path = Path(os.path.realpath(place / name))
        found = read_json(path.parent, path.name)
        if found is not None:
            return found
    return None


def check_scales(model: nn.Module, stored: Stored, directories: Mapping[int, Path | None]) -> None:
    """Raise :class:`RecipeError` if adapters were trained with another scale than the adapters of *model* have.

    The scale, alpha / r, is in no tensor but in ``adapter_config.json``. *directories* has the one with this file for
    each module of a source, by id. Without it, nothing is compared.
    """
    here = dict(_adapted_layers(unwrap(model)))
    configs: dict[int, Any] = {}
    lines = []
    for name, (module, _) in stored.items():
        match = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None or match["layer"] not in here:
            continue
        layer = match["layer"]
        if id(module) not in configs:
            directory = directories[id(module)]
            found = None if directory is None else _side_json(directory, layout.ADAPTER_CONFIG)
            configs[id(module)] = found
        rank, scale = here[layer]
        config, there = configs[id(module)], scale
        # A config that gives no scale is not compared.
        with contextlib.suppress(ValueError):
            there = scale if config is None else scale_of(config, rank, layer)
        if not math.isclose(there, scale):
            lines.append(f"{layer}: {there:g} there, {scale:g} here")
    if lines:
        raise RecipeError(
            "the adapters were trained with another scale than they have in this recipe",
            where="init_from.path",
            value=first_lines(lines),
            hint="the scale is alpha / r, or alpha / sqrt(r) with use_rslora: give the section peft the options r, "
            "alpha, alpha_pattern and use_rslora of their adapter_config.json",
        )


def shared_modules(model: nn.Module) -> TextDict:
    """{alias: name} of parameters shared by two modules that are trained in addition to adapters, as in peft's files.

    peft stores such a parameter under both names.
    """
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        if _TRAINED not in name:
            continue
        stored = name.replace(_TRAINED, ".")
        if first.setdefault(id(parameter), stored) != stored:
            aliases[stored] = first[id(parameter)]
    return aliases


def check_tied(tied: Iterable[tuple[str, list[str]]], stored: Stored) -> None:
    """Raise :class:`RecipeError` if tensors that are one in the model have different values in the sources.

    *tied* are the tensors of the model of which the sources have several copies, with their names there. The copies
    are read.
    """
    lines = []
    hint = _UNTIE
    for name, (first, *others) in tied:
        module, fqn = stored[first]
        for other in others:
            copy, copy_fqn = stored[other]
            if not is_copy(copy.root, copy.tensors[copy_fqn], module.root, module.tensors[fqn]):
                lines.append(f"{other} and {first}")
                hint = _UNTIE_ADAPTERS if name.startswith(_PREFIX) else _UNTIE
    if lines:
        what = "tensors that are tied in this model have different values there"
        raise RecipeError(what, where="init_from.path", value=first_lines(lines), hint=hint)


def _adapted_layers(model: Any) -> Iterator[tuple[str, tuple[int, float]]]:
    """The names of the layers with adapters, as peft's patterns see them, with rank and scale."""
    for name, module in model.named_modules():
        scaling = getattr(module, "scaling", None)
        if isinstance(scaling, Mapping) and _ADAPTER in scaling:
            yield name.removeprefix(_PREFIX), (int(module.r[_ADAPTER]), float(scaling[_ADAPTER]))
