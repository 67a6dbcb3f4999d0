"""The repository that a model is read from: its revision, and code that it contains.

A repository of the Hub, or a directory, can contain Python files that transformers imports instead of a class of the
library (``auto_map`` in config.json). Such code runs only for a type of model that transformers does not include, and
only if the recipe requests it *and* the user trusts it outside of the recipe.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import HF_MODULES_CACHE, cached_file, get_checkpoint_shard_files

from automodel_ckpt.base.durable_io import flock
from automodel_ckpt.base.other_weights import POINTER, weights_of_another_program
from automodel_ckpt.checkpoint.files.safe_open import parse_json, read_model_file
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.sources.model_files import check_directory
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import CORRECT_FILE

log = logging.getLogger("automodel_ckpt")

CODE_PACKAGE = "transformers_modules"
"""The package that transformers imports the code of repositories into."""
_CODE_KEY = "model.trust_remote_code"
_RANGES = (
    (r"(layers?|blocks?|depths?)$", -math.inf, 10_000),
    (
        r"(vocab_size|hidden_size|intermediate_size|d_model|d_ff|n_embd|dim|heads)$",
        -math.inf,
        1 << 28,
    ),
    (r"(positions?|position_embeddings|experts)$", -math.inf, 1 << 32),
    (r"num_labels$", -math.inf, 1 << 24),
    (r"(dropout|pdrop|dropout_rate|dropout_prob)$", 0, 1),
)
"""The least and the largest values of settings by the ends of their names. Models have far smaller sizes."""


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Let the loggers of these *names* report only errors in the context."""
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, former in levels.items():
            logging.getLogger(name).setLevel(former)


@dataclass(frozen=True)
class RepositoryOptions:
    """How a model's repository is read. The default is its main revision, without its code."""

    revision: str | None = None
    """A branch, tag or commit of the Hub; None: the main branch, or a local directory."""
    requests_code: bool = False
    """Whether the recipe asks for the repository's code (``model.trust_remote_code``)."""
    trusts_code: bool = False
    """Whether the user trusts such code outside of the recipe (``--trust trust_remote_code``)."""

    @property
    def runs_code(self) -> bool:
        """Whether code of the repository may run."""
        return self.requests_code and self.trusts_code

    @property
    def hint(self) -> str:
        """What to do if a model needs the code of its repository."""
        if self.requests_code:
            return f"{_CODE_KEY} alone runs no code: if you trust this code, add --trust trust_remote_code"
        return f"if you trust this code, set {_CODE_KEY}: true and add --trust trust_remote_code"


def code_directory(model: Any, revision: str | None) -> Path | None:
    """The local directory of the Python files that define the class of *model* or of its config.

    None when transformers or an installed package defines them. *revision* is the revision of a repository of the Hub.
    """
    config = getattr(model, "config", None)
    modules = {type(part).__module__.partition(".")[0] for part in (model, config)}
    # fully_shard puts a subclass in the place of the model's class. The subclass's module is
    # torch's.
    modules |= {base.__module__.partition(".")[0] for base in type(model).__mro__}
    name = str(getattr(config, "name_or_path", "") or "")
    if CODE_PACKAGE not in modules or not name:
        return None
    path = Path(name).expanduser()
    if path.is_file():
        return path.parent
    return base_directory(name, revision)


def lfs_pointer(name: str, *patterns: str) -> str | None:
    """The first of a model's files that a clone of a repository has without its content. None when there is none."""
    directory = base_directory(name) or Path(name)
    for file in sorted(file for pattern in patterns for file in directory.glob(pattern)):
        with suppress(OSError), file.open("rb") as opened:
            if opened.read(len(POINTER)) == POINTER:
                return str(file)
    return None


def base_directory(name: str, revision: str | None = None) -> Path | None:
    """The local directory of a pretrained model's files: *name*, or its directory in the Hub's cache, or None.

    *revision* is a branch, tag or commit of a Hub name; None: the main branch.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if len(path.parts) > 2:
        # A local directory that does not exist (yet): transformers raises for names that the Hub cannot have.
        return None
    found = cached_file(
        name,
        "config.json",
        revision=revision,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
    )
    return Path(found).parent if found else None


def damaged_config(name: str, where: str, revision: str | None = None) -> RecipeError | None:
    """Return the error to raise if the config.json of a pretrained model is not a JSON object. None when it is or is
    missing.

    *name* is a directory, its config file, or a Hub name in the cache, which the key *where* gives. The libraries read
    the file also for a tokenizer or a processor, so that their own errors describe it as one of these.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        try:
            directory = base_directory(name, revision)
        except (OSError, ValueError):
            return None
        if directory is None:
            return None
        path = directory / "config.json"
    reason = "not a JSON object"
    try:
        if isinstance(parse_json(path.read_bytes()), dict):
            return None
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = str(error) or reason
    return RecipeError(
        "the model's config.json cannot be read",
        where=where,
        value=f"{path} ({reason})",
        hint=CORRECT_FILE,
    )


def check_revision(
    name: str,
    revision: str | None,
    where: str = "model.revision",
    name_key: str = "model.from_pretrained",
) -> None:
    """Raise :class:`RecipeError` if *name* is a local path, which has no revisions, and a *revision* is given.

    *where* and *name_key* are the keys of both.
    """
    if revision is not None and os.path.exists(os.path.expanduser(name)):
        raise RecipeError(
            "a local directory has no revisions",
            where=where,
            value=revision,
            hint=f"remove the key, or name a repository of the Hugging Face Hub in {name_key}",
        )


def config_needs_code(content: Values) -> bool:
    """Whether the class of a config is in the repository: *content* is the content of config.json."""
    references = content.get("auto_map")
    is_included = content.get("model_type") in CONFIG_MAPPING
    return not is_included and isinstance(references, Mapping) and "AutoConfig" in references


def model_needs_code(config: PreTrainedConfig, auto_class: Any) -> bool:
    """Whether *auto_class* of transformers finds the class of the model in the repository only."""
    # Private in transformers 5.17 to 5.24. Custom classes may have no mapping.
    included = getattr(auto_class, "_model_mapping", None)
    references = getattr(config, "auto_map", None) or {}
    return (
        included is not None and type(config) not in included and auto_class.__name__ in references
    )


def check_code(name: str, where: str, content: Values, options: RepositoryOptions) -> None:
    """Check that the repository *name* may run its code, which is needed, and log that it runs.

    *content* is the content of its config.json. Raises :class:`RecipeError` if the recipe does not request it or the
    user does not trust it.
    """
    if not options.runs_code:
        kind = content.get("model_type")
        raise RecipeError(
            "this model needs code from its repository, which is not trusted",
            where=where,
            value=f"{name} (model type {kind}, which transformers does not include)",
            hint=options.hint,
        )
    log.warning("running code from the repository %s: %s", name, content.get("auto_map"))


def from_library_first(
    from_pretrained: Callable[..., Any], name: str, repository: RepositoryOptions
) -> Any:
    """Call ``from_pretrained(name)`` for a tokenizer or a processor, with a class of transformers.

    If that fails and *repository* allows it, call it again with the classes of the repository. Raises what
    ``from_pretrained`` raises.
    """
    options: ValueDict = {}
    if repository.revision is not None:
        options["revision"] = repository.revision
    try:
        # For a model that transformers does not include, it warns that the config has another type than its base class.
        with quiet("transformers.configuration_utils"):
            return from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:
        if not repository.runs_code:
            raise
        first_error = error
    try:
        with importing_code(is_needed=True):
            found = from_pretrained(name, trust_remote_code=True, **options)
    except Exception as error:
        raise error from first_error
    if type(found).__module__.startswith(CODE_PACKAGE):
        log.warning("running code from the repository %s: %s", name, type(found).__name__)
    return found


def asks_for_code(error: BaseException) -> bool:
    """Whether transformers raised *error* because a repository's code may not run."""
    return "trust_remote_code" in str(error)


def code_not_trusted(
    kind: str, name: str, where: str, repository: RepositoryOptions
) -> RecipeError:
    """The error for a *kind* of object (a tokenizer) that needs untrusted code of the repository *name*."""
    hint = repository.hint
    if where.partition(".")[0] != "model":
        hint = f"name its Auto class in {kind}._target_ with trust_remote_code: true, and add --trust trust_remote_code"
    return RecipeError(
        f"this {kind} needs code from its repository, which is not trusted",
        where=where,
        value=name,
        hint=hint,
    )


@contextmanager
def importing_code(is_needed: bool) -> Iterator[None]:
    """Import code of a repository in this context; only one process of a machine at a time, if code *is_needed*.

    transformers copies the files to a directory that all processes share, and does not lock it: another rank could
    import a file that is only partly written.
    """
    if not is_needed:
        yield
        return
    directory = Path(HF_MODULES_CACHE)
    directory.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(directory / ".automodel_ckpt.lock", flags, 0o600)
    try:
        flock(descriptor, waits=True)
        yield
    finally:
        os.close(descriptor)


def require_local(name: str, where: str) -> None:
    """Raise :class:`RecipeError` if *name* looks like a path, not like a name of the Hub, and does not exist.

    Also for a file in place of a pretrained model's directory, and for a directory with files that may not be read, or
    that are links to files elsewhere, which a library would follow.
    """
    path = Path(name).expanduser()
    if where == "model.from_pretrained" and path.is_file():
        hint = f"name the directory of the model, such as {path.parent}"
        what = "a pretrained model is a directory, not a file"
        raise RecipeError(what, where=where, value=name, hint=hint)
    if path.is_dir():
        check_directory(path)
        # Reading the tokenizer already creates the model's configuration.
        with suppress(OSError, ValueError, AttributeError):
            settings = parse_json(read_model_file(path, "config.json"))
            check_sizes(settings, f"config.json of {name}")
    if path.exists():
        return
    looks_local = name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    if looks_local or ("/" in name and path.parent.is_dir()):
        hint = "name a directory with a config.json, or a model of the Hugging Face Hub"
        if "://" in name:
            hint = "download it: `ckpt pull URL DIRECTORY` for a checkpoint of ours, or the tools of its store"
        raise RecipeError("no such directory", where=where, value=name, hint=hint)


def reject_other_weights(name: str, where: str) -> None:
    """Raise :class:`RecipeError` if the directory *name* has only weights of a program that this one does not read."""
    found = weights_of_another_program(Path(name).expanduser())
    if found is not None:
        what, hint = found
        raise RecipeError(
            f"the directory has {what}, which cannot be trained", where=where, value=name, hint=hint
        )


def fetched_directory(name: str, revision: str | None = None) -> Path | None:
    """Fetch the weights of a Hub name into the cache, if necessary, and return their local directory.

    *revision* is a branch, tag or commit of a Hub name; None: the main branch. Returns None when they are not
    available as safetensors. If several ranks of a node fetch, they wait for each other.
    """
    if Path(name).expanduser().is_dir():
        return base_directory(name, revision)
    try:
        # If the files are not in the cache, they cannot be read in parts, and each rank would build
        # the complete model.
        index = _fetched(name, SAFE_WEIGHTS_INDEX_NAME, revision)
        if index is not None:
            get_files: Any = get_checkpoint_shard_files
            get_files(name, index, revision=revision)
        elif _fetched(name, SAFE_WEIGHTS_NAME, revision) is None:
            return None
    except (OSError, ValueError):
        return None
    return base_directory(name, revision)


def _fetched(name: str, file: str, revision: str | None) -> str | None:
    """The path of a *file* of a Hub name in the cache, fetched if necessary. None when the model has no such file."""
    return cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)


def check_sizes(settings: Values, where: str) -> None:
    """Check the *settings* of a model in the config.json *where*, also of its parts.

    Raises :class:`RecipeError` for a size with which building the model would not end, and for a rate of dropout that
    is none, which only fails in training.
    """
    for key, value in settings.items():
        if isinstance(value, Mapping):
            check_sizes(value, where)
        if not isinstance(value, int | float):
            continue
        for pattern, least, most in _RANGES:
            if re.search(pattern, key) and not least <= value <= most:
                raise RecipeError(
                    "no model has this value",
                    where=where,
                    value=f"{key}: {str(value)[:40]}",
                    hint=CORRECT_FILE,
                )
