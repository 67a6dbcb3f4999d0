"""What a recipe file may send, and where to, without the user's permission.

A recipe file may come from anywhere, and the environment contains credentials. Without permission from outside of the
file, no value of an environment variable gets into what leaves this machine or is used as an address, no host that the
file names gets requests with the user's credentials, and trackers get only settings that name no host. Permission is
the value itself on the command line, or ``--trust env:NAME`` and ``--trust host:NAME``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.config.callables.trust import LIBRARIES, Trust, is_within
from automodel_ckpt.config.keys.monitoring import RECIPE_OPTIONS
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import annotation_at, is_number, join
from automodel_ckpt.config.tree.convert import is_open, members
from automodel_ckpt.config.tree.references import SECRET_NAME, ReferenceFailed, resolve_with_names
from automodel_ckpt.config.tree.yaml_tree import Node, untyped
from automodel_ckpt.errors import Problem

_RUN = "checkpoint.checkpoint_dir"
_TRACKERS = "logging.trackers"
_SENT = (_TRACKERS, "hub", "checkpoint.remote")
"""Sections that are sent, whatever their values are."""
_ONLY_LOCAL = frozenset(
    {
        _RUN,
        "checkpoint.scratch_dir",
        "checkpoint.memory.directory",
        "distill.cache_dir",
        "distributed.backend",
        "profile.directory",
        "recipe",
        "step_scheduler.max_time",
    }
)
"""Keys with a text that stays on this machine, unless it is a URL."""
_PATHS = frozenset(
    {
        "checkpoint.restore_from",
        "distill.teacher.from_pretrained",
        "dpo.reference",
        "evaluation.harness.include_path",
        "init_from.path",
        "kto.reference",
        "model.from_config",
        "model.from_pretrained",
        "peft.base_dir",
        "processor.from_pretrained",
        "tokenizer.from_pretrained",
    }
)
"""Keys with a text that is a path of this machine, or else a name that is requested from the Hub or a store."""
_PATH_ARGUMENTS = frozenset(
    {
        "chat_template",
        "data_dir",
        "data_files",
        "dataset_path",
        "media",
        "path",
        "pretrained_model_name_or_path",
    }
)
"""Arguments of callables on the allowlist with a text that is such a path."""
_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(/[\w./~%-]*)?",
    re.ASCII,
)
_HOSTS = {
    "checkpoint.remote.options.endpoint_url": "AWS_ENDPOINT_URL",
    f"{_TRACKERS}.mlflow.tracking_uri": "MLFLOW_TRACKING_URI",
}
"""Keys of URLs that get the user's credentials, and the variable that gives such a URL outside of a recipe."""
_ACCOUNT = "checkpoint.remote.options.account_name"
_OUTSIDE = "a recipe file may have nothing written outside of the run directory"
_LOCAL_STORE = re.compile(r"(?:file:(?://(?=/))?|sqlite:///)?(?P<path>[^:?#%]+)")
_WRITTEN = {"tensorboard": ("log_dir", ""), "wandb": ("dir", "wandb")}
"""Tracker -> its option for a directory, and what it writes there. Without the option, it writes into the run."""


@dataclass(frozen=True)
class Value:
    """A scalar of a recipe: its text, with references resolved, and the names of the variables in it.

    *target* is the name of the callable that gets it as *argument*, or in it; both are empty outside of plug-ins.
    """

    key: str
    node: Node
    text: str
    names: tuple[str, ...]
    is_from_user: bool
    target: str
    argument: str

    @property
    def schema_key(self) -> str:
        """The key without indices of lists."""
        return ".".join(part for part in self.key.split(".") if not is_number(part))

    def problem(self, what: str, hint: str) -> Problem:
        return Problem(f"{self.key}: {what}", self.node.origin, str(self.node), hint)


def sent_problems(tree: Node, trust: Trust) -> Iterator[Problem]:
    """Yield a problem for each value in a recipe's tree that would be sent, or be an address, without permission.

    References to keys must have been replaced in *tree*. Sends nothing.
    """
    values = {value.key: value for value in values_of(tree)}
    section = tree.at(_TRACKERS)
    trackers = {name for name, _ in section.children()} if section is not None else set()
    for value in values.values():
        # The trackers' run has the name of its directory.
        yield from _variable_problems(value, trust, names_run=bool(trackers - {"tensorboard"}))
        if not value.is_from_user:
            yield from _host_problems(value, trust)
            yield from _setting_problems(value)
    if _RUN in values:
        yield from _tracker_paths(values, trackers)
        yield from _other_paths(values)


def values_of(
    node: Node, key: str = "", target: str = "", argument: str = "", *, is_indirect: bool = False
) -> Iterator[Value]:
    """Yield the scalars of a recipe's tree with references that can be resolved."""
    is_indirect = is_indirect or node.is_indirect
    own = node.value.get("_target_") if isinstance(node.value, dict) else None
    for name, child in node.children():
        if own is not None:
            target, argument = str(own.value), name
        yield from values_of(child, join(key, name), target, argument, is_indirect=is_indirect)
    if not isinstance(node.value, str) or node.is_null:
        return
    try:
        text, names = resolve_with_names(node.value)
    except ReferenceFailed:  # reported with the type of the key
        return
    if text is not None:
        is_from_user = node.is_from_user and not is_indirect
        yield Value(key, node, text, tuple(names), is_from_user, target, argument)


# ---------------------------------------------------------------- environment variables


def _variable_problems(value: Value, trust: Trust, *, names_run: bool) -> Iterator[Problem]:
    if not value.names or _stays_here(value, names_run=names_run):
        return
    secrets = [name for name in value.names if SECRET_NAME.search(name)]
    if secrets:
        what = f"the value of {', '.join(secrets)} would be sent, and by its name it is a secret"
        hint = "remove the reference; libraries read credentials from the environment themselves"
        yield value.problem(what, hint)
        return
    others = [name for name in value.names if f"env:{name}" not in trust.names]
    if others and not value.is_from_user:
        what = f"a recipe file may not send the value of {', '.join(others)}"
        allowed = " ".join(f"--trust env:{name}" for name in others)
        hint = (
            f"if it may be sent, allow it with {allowed}, or give --{value.key} on the command "
            "line; a path that does not exist yet begins with / or ./"
        )
        yield value.problem(what, hint)


def _stays_here(value: Value, *, names_run: bool) -> bool:
    """Whether a text with values of the environment is not sent: a local path, a number, or one of a few words."""
    key = value.schema_key
    kinds = members(annotation_at(RecipeConfig, value.key) or Any)
    accepts_text = any(kind is str or is_open(kind) for kind in kinds)
    if key.rpartition(".")[2] == "_target_" or not accepts_text:
        return True
    if is_within(key, _SENT) or "://" in value.text or "::" in value.text:
        return False
    if str not in kinds and not isinstance(untyped(value.text), str):
        return True
    is_secret = any(SECRET_NAME.search(name) for name in value.names)
    if key in _ONLY_LOCAL:
        return not (key == _RUN and names_run and is_secret)
    if not (key in _PATHS or value.argument in _PATH_ARGUMENTS or _is_read_by_user_code(value)):
        return False
    # The names of existing files are no secrets. Other text of a template is stored in the tokenizer.
    has_form = value.text.startswith(("/", "./", "../", "~")) and not is_secret
    exists = os.path.exists(os.path.expanduser(value.text))
    return exists or (has_form and not key.endswith("chat_template"))


def _is_read_by_user_code(value: Value) -> bool:
    """Whether a text is in a section of a custom recipe, or an argument of a callable that is not on the allowlist."""
    if value.target:
        return not is_within(value.target, LIBRARIES)
    return value.key.partition(".")[0] not in RecipeConfig.__dataclass_fields__


# ---------------------------------------------------------------- hosts


def _host_problems(value: Value, trust: Trust) -> Iterator[Problem]:
    """Yield a problem for a host of the recipe file that would get the user's credentials."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    # datasets sends the token to each URL that begins with the Hub's, without a slash after it.
    is_like_hub = value.text.startswith(hub) and value.text[len(hub) :][:1] not in ("", "/")
    address = value.text
    if value.key == _ACCOUNT:
        address = f"https://{value.text}.blob.core.windows.net"
    elif not is_like_hub and not (value.key in _HOSTS and is_url(value.text)):
        return
    outside = f"give --{value.key} on the command line"
    if value.key in _HOSTS:
        outside += f", or set {_HOSTS[value.key]} instead"
    what = "a recipe file may not name a host that gets your credentials"
    found = _ADDRESS.fullmatch(address)
    if found is None:
        yield value.problem(what, outside)
        return
    host = found["host"].strip("[]").lower()
    port = int(found["port"] or (443 if found["scheme"] == "https" else 80))
    if not trust.allows_host(host, port):
        yield value.problem(what, f"if you trust it, allow it with --trust host:{host}; {outside}")


# ---------------------------------------------------------------- trackers and files


def _setting_problems(value: Value) -> Iterator[Problem]:
    """Yield a problem for a setting of a tracker that a recipe file may not have."""
    if not value.key.startswith(f"{_TRACKERS}."):
        return
    tracker, _, name = value.key.removeprefix(f"{_TRACKERS}.").partition(".")
    allowed = RECIPE_OPTIONS.get(tracker, ())
    if name.partition(".")[0] not in allowed:
        yield value.problem(
            f"a recipe file may set only {', '.join(allowed)} of {tracker}",
            f"give --{value.key} on the command line, or set the variables of {tracker}",
        )


def _tracker_paths(values: dict[str, Value], trackers: set[str]) -> Iterator[Problem]:
    """Yield a problem for each directory outside of the run's in which a tracker would write."""
    run = values[_RUN]
    for tracker in trackers & _WRITTEN.keys():
        option, below = _WRITTEN[tracker]
        given = values.get(join(_TRACKERS, tracker, option))
        if given is None:
            path = os.path.join(run.text, tracker)
            if not is_url(run.text) and not _is_within(path, run.text):
                yield Problem("a link leads a tracker out of the run directory", path, "")
        elif not given.is_from_user and not _is_within(os.path.join(given.text, below), run.text):
            yield given.problem(_OUTSIDE, f"remove it, or give --{given.key} on the command line")


def _other_paths(values: dict[str, Value]) -> Iterator[Problem]:
    """Yield a problem for each other file outside of the run directory that a recipe file would have written."""
    run = values[_RUN].text
    for key in (f"{_TRACKERS}.mlflow.tracking_uri", "profile.directory"):
        value = values.get(key)
        if value is None or value.is_from_user or _ADDRESS.fullmatch(value.text):
            continue
        found = _LOCAL_STORE.fullmatch(value.text)
        if found is None or not _is_within(found["path"], run):
            yield value.problem(_OUTSIDE, f"remove it, or give --{key} on the command line")


def _is_within(path: str, *bases: str) -> bool:
    """Whether *path* is in one of the directories, with links followed. A URL has nothing in it."""
    target = os.path.realpath(os.path.expanduser(path))
    roots = [os.path.realpath(os.path.expanduser(base)) for base in bases if not is_url(base)]
    return any(os.path.commonpath([target, root]) == root for root in roots)
