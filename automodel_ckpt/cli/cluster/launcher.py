"""The launchers of ``ckpt-train --write-launcher``: a template for each kind, filled with facts of a recipe.

Nothing is submitted.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
import shlex
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from automodel_ckpt.base.store_url import extra_of, is_url
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.type_aliases import Strings, ValueDict
from automodel_ckpt.cli.common.arguments import option_flag
from automodel_ckpt.cli.common.paths import IN_THE_WAY
from automodel_ckpt.cli.launch.ranks import check_ranks
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.overrides import CommandLine
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.config.tree.references import SECRET_NAME, variables_in
from automodel_ckpt.config.tree.yaml_tree import is_stream
from automodel_ckpt.errors import Problem, RecipeError, printable, without_hidden

FLAG = "--write-launcher"
KINDS = {
    "slurm": "slurm.sh.jinja",
    "k8s": "trainjob.yaml.jinja",
    "skypilot": "skypilot.yaml.jinja",
}
"""Kind of launcher -> its template."""
_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)")
_OPTIONS: dict[str, tuple[Strings, str | None, re.Pattern[str], str]] = {
    "output": (tuple(KINDS), None, re.compile(".+"), "a path"),
    "time_limit": (
        ("slurm",),
        "08:00:00",
        _TIME,
        "[DAYS-]HH:MM:SS, such as 08:00:00 or 2-00:00:00",
    ),
    "image": (
        ("k8s", "skypilot"),
        None,
        re.compile(r"[A-Za-z0-9][\w./:@-]*"),
        "the name of an image, such as registry.example.com/automodel_ckpt:1",
    ),
    "volume_claim": (
        ("k8s",),
        "training",
        re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"),
        "lowercase letters, digits, - and .",
    ),
}
"""Option -> the kinds of launchers that use it, its default, its form, and the form in words."""
SAVE_SECONDS = 300
"""Seconds from a signal to the end of a run: the current step, and a save."""
_SLACK_SECONDS = 30
_ROUNDED_TO = 30
# Variables that the client of a store reads, by the extra that installs it. Instance roles need none of them.
_CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "azure": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
# Trackers that an extra of this package installs. The others are packages of these names.
_TRACKER_EXTRAS = {"tensorboard"}
_NAME_LENGTH = 40
# The local directory of runs with a URL as their directory, if the recipe and the environment name no other.
_SCRATCH = "~/.cache/automodel_ckpt/runs"
# How often a node may fail otherwise than by a signal, if ``--max-restarts`` does not set it.
_NUM_FAILURES = 3
_CORES_PER_GPU_RANK, _CORES_PER_RANK = 8, 2


def launcher_options(line: CommandLine) -> dict[str, str | None]:
    """Return the kind of launcher and its options on a command line with ``--write-launcher``.

    Raises :class:`RecipeError` with all problems: an unknown kind, options of another kind, and malformed values.
    """
    (kind,) = line.modes["write_launcher"]
    if kind not in KINDS:
        raise RecipeError("unknown kind of launcher", FLAG, kind, f"use {', '.join(KINDS)}")
    options: dict[str, str | None] = {"kind": kind}
    problems = []
    for name, (kinds, default, form, expected) in _OPTIONS.items():
        flag = option_flag(name)
        (text,) = line.modes.get(name, [None])
        options[name] = default if text is None else text
        if text is not None and kind not in kinds:
            problems.append(
                Problem(f"{flag} is used only with {FLAG} {' or '.join(kinds)}", flag, text)
            )
        elif text is not None and not form.fullmatch(text):
            problems.append(Problem(f"{flag} must be {expected}", flag, text))
    RecipeError.check(problems)
    return options


def _check_flags(flags: LaunchFlags) -> None:
    """Raise :class:`RecipeError` for launch flags that a launcher determines, and for unknown numbers of ranks."""
    problems = []
    for name in ("node_rank", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port"):
        if getattr(flags, name) is not None:
            flag = option_flag(name)
            problems.append(Problem(f"{FLAG} determines {flag}", flag, ""))
    for name in ("nproc_per_node", "nnodes"):
        text = getattr(flags, name)
        if not text.isdecimal():
            problems.append(Problem(f"{FLAG} needs a number", option_flag(name), text))
    RecipeError.check(problems)


def write_launcher(loaded: LoadedRecipe, line: CommandLine, options: dict[str, str | None]) -> None:
    """Print the launcher, or write it to a new file and print its path. *options* are :func:`launcher_options`.

    Raises:
        RecipeError: The recipe is from a pipe or does not fit the ranks, the time limit is too short for a save, or the
            file exists or cannot be written.
    """
    _check_flags(line.flags)
    check_ranks(loaded, int(line.flags.nnodes) * int(line.flags.nproc_per_node))
    facts = _facts(loaded, line) | options
    if facts["kind"] == "slurm" and _seconds_of(facts["time_limit"]) < 2 * facts["stop_seconds"]:
        raise RecipeError(
            "the time limit is too short: the run would stop again before it trains",
            "--time-limit",
            f"{facts['time_limit']} ({facts['stop_seconds']} s are needed to save and stop)",
        )
    text, output = _rendered(KINDS[facts["kind"]], facts), facts["output"]
    if output is None:
        print(text, end="")
        return
    try:
        # x: an edited file is never replaced.
        with Path(output).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RecipeError(
            "the launcher cannot be written", output, error.strerror, IN_THE_WAY
        ) from error
    print(output)


def _seconds_of(time_limit: str) -> int:
    found = _TIME.fullmatch(time_limit)
    assert found is not None
    days, hours, minutes, seconds = (int(text or 0) for text in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


# ---------------------------------------------------------------- facts of a recipe


def _facts(loaded: LoadedRecipe, line: CommandLine) -> ValueDict:
    """Return the names that templates use. Values of environment variables are never read."""
    if is_stream(loaded.path):
        raise RecipeError("a launcher needs a recipe file", FLAG, loaded.path)
    config, flags, recipe = loaded.config, line.flags, str(loaded.path)
    num_nodes, num_ranks = int(flags.nnodes), int(flags.nproc_per_node)
    each = " each" if num_nodes > 1 else ""
    ranks = f"{counted(num_nodes, 'node')} with {counted(num_ranks, 'rank')}{each}"
    uses_gpus = config.distributed.backend != "gloo"
    num_cores = _CORES_PER_GPU_RANK if uses_gpus else _CORES_PER_RANK
    run_name = [f"--run-name={flags.run_name}"] if flags.run_name else []
    signals = [name.removeprefix("SIG") for name in config.step_scheduler.stop_signals]
    seconds = float(SAVE_SECONDS)
    if config.checkpoint.remote is not None:
        # The end of the run may wait for its uploads.
        waited = config.checkpoint.remote.wait_after_signal_seconds
        seconds = max(seconds, waited + _SLACK_SECONDS)
    storage = _storage(loaded)
    variables = variables_in(loaded.tree)
    required = [name for name, has_no_default in variables.items() if has_no_default]
    trackers = set(config.logging.trackers)
    extra = extra_of(storage["url"]) if storage["url"] else ""
    keys = ["HF_TOKEN", *["WANDB_API_KEY"] * ("wandb" in trackers), *_CREDENTIALS.get(extra, ())]
    credentials = [key for key in keys if key not in variables]
    return storage | {
        "title": f"Trains {recipe} on {ranks}",
        "name": _name(loaded.path),
        "recipe": recipe,
        "recipe_name": posixpath.basename(recipe) if posixpath.isabs(recipe) else recipe,
        "recipe_in_copy": _path_in_copy(recipe),
        "text": _recipe_text(loaded),
        "run_words": [*_arguments(line), *run_name],
        "run_name": flags.run_name or "",
        "launch_words": partial(_launch_words, flags),
        "num_nodes": num_nodes,
        "num_ranks": num_ranks,
        "max_restarts": flags.max_restarts,
        "num_failures": _NUM_FAILURES if flags.max_restarts is None else flags.max_restarts,
        "uses_gpus": uses_gpus,
        "num_workers": config.dataloader.num_workers,
        "cores_per_rank": max(num_cores, config.dataloader.num_workers + 1),
        "stop_signal": next((name for name in ("USR1", *signals) if name in signals), "INT"),
        "stop_seconds": math.ceil(seconds / _ROUNDED_TO) * _ROUNDED_TO,
        "required": required,
        "credentials": credentials,
        "secrets": [*variables, *credentials],
        "to_give": [*required, *["CHECKPOINT_URL"] * (storage["url"] is None)],
        "extras": sorted({extra, *trackers & _TRACKER_EXTRAS} - {""}),
        "packages": sorted(trackers - _TRACKER_EXTRAS),
        "offline": os.environ.get("HF_HUB_OFFLINE", "0"),
        "hf_home": os.environ.get("HF_HOME", ""),
        "environment": str(Path(sys.executable).parents[1]),
    }


def _storage(loaded: LoadedRecipe) -> ValueDict:
    """Return where the run is stored: its directory, the URL of its store, and what a container has to mount."""
    directory = _text(loaded, "checkpoint.checkpoint_dir") or "checkpoints/"
    url = _text(loaded, "checkpoint.remote.url")
    is_url_directory = is_url(directory)
    if is_url_directory:
        # Checkpoints are uploaded from a local directory.
        url, directory = directory, _text(loaded, "checkpoint.scratch_dir") or _SCRATCH
    mounted = directory.rstrip("/")
    is_outside = mounted.startswith("/") and not f"{mounted}/".startswith("/work/")
    return {
        "directory": directory,
        "is_scratch": directory == _SCRATCH,
        "is_url_directory": is_url_directory,
        "url": url,
        "mounted": mounted if is_outside and "${" not in mounted else "",
        "sub_path": re.sub(r"[^\w.-]+", "-", mounted.strip("/")),
    }


def _launch_words(flags: LaunchFlags, rank: str, host: str, port: str, run_id: str) -> list[str]:
    """Return the flags that start the ranks of a node with this *rank*; node 0 is at *host* and *port*."""
    words = [f"--nproc-per-node={flags.nproc_per_node}"]
    if flags.max_restarts:
        words.append(f"--max-restarts={flags.max_restarts}")
    if flags.nnodes == "1":
        return words
    words.append(f"--nnodes={flags.nnodes}")
    if flags.max_restarts:
        return [*words, f"--rdzv-endpoint={host}:{port}", f"--rdzv-id={run_id}"]
    return [*words, f"--node-rank={rank}", f"--master-addr={host}", f"--master-port={port}"]


def _text(loaded: LoadedRecipe, key: str) -> str | None:
    """Return the text of a key as written, with its references. Returns None when it is null or missing."""
    node = loaded.tree.at(key)
    if node is None or node.is_null or not isinstance(node.value, str):
        return None
    return node.value


def _name(path: Path) -> str:
    """Return a name of letters, digits and dashes (RFC 1123) from the name of a recipe file."""
    words = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:_NAME_LENGTH].strip("-")
    return words if words[:1].isalpha() else f"run-{words}".strip("-")


def _arguments(line: CommandLine) -> list[str]:
    """Return the overrides and flags of the command line that belong to the run, in their order."""
    given = [override for override in line.overrides if not override.is_below]
    return [
        *(f"--trust={name}" for name in line.flags.trust),
        *(f"--{override.key}={override.node.value}" for override in given),
    ]


def _recipe_text(loaded: LoadedRecipe) -> str | None:
    """Return the text of a recipe's file. Returns None when it extends other files, or its class is in a file."""
    text = loaded.path.read_text(encoding="utf-8")
    name = _text(loaded, "recipe") or ""
    is_alone = re.search(r"^extends\s*:", text, re.MULTILINE) is None and ".py:" not in name
    return text if is_alone else None


def _path_in_copy(recipe: str) -> str:
    """Return the path of the recipe where the current directory was copied; in ~/ckpt-train if it is elsewhere."""
    here, path = Path.cwd().resolve(), Path(recipe).resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else f"~/ckpt-train/{path.name}"


# ---------------------------------------------------------------- text of a template


# Text that YAML needs no quotes for, unless it is a word such as null.
_WORD = re.compile(r"[\w./-]+", re.ASCII)


class _Ready(str):
    """Text in the syntax of its place. All other text of a template is escaped, so that no value ends a comment."""


def _rendered(template: str, names: ValueDict) -> str:
    from jinja2 import Environment, FileSystemLoader

    def shown(value: Any) -> Any:
        return printable(without_hidden(value)) if type(value) is str else value

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), finalize=shown, keep_trailing_newline=True
    )
    environment.filters.update(
        yaml=_yaml, shell=_shell, in_quotes=_in_quotes, for_kubernetes=_for_kubernetes
    )
    environment.tests["secret"] = SECRET_NAME.search
    return environment.get_template(template).render(names)


def _yaml(text: str, indent: int = 0) -> str:
    """Return a text as YAML, several lines as a block. Characters that are not ASCII are escaped.

    Readers of YAML differ in which of them end a line.
    """
    style = None if _WORD.fullmatch(text) else "'"
    if "\n" in text and indent:
        style = "|"
    elif not text.isprintable():
        style = '"'
    node = yaml.ScalarNode("tag:yaml.org,2002:str", text, style=style)
    written = str(yaml.serialize(node, width=float("inf"), allow_unicode=False))
    lines = written.removesuffix("\n...\n").rstrip("\n").split("\n")
    return _Ready(f"\n{' ' * indent}".join(lines))


def _for_kubernetes(word: str) -> str:
    """Return an argument that Kubernetes does not change: it expands $(NAME), and $$ to a dollar sign."""
    return re.sub(r"\$(?=[$(])", "$$", word)


def _shell(words: Iterable[str]) -> str:
    """Return words for bash. Characters that are not printable are escaped, so that no reader takes one for a break."""
    quoted = []
    for word in words:
        escaped = "".join(f"\\x{byte:02x}" for byte in os.fsencode(word))
        quoted.append(shlex.quote(word) if word.isprintable() else f"$'{escaped}'")
    return _Ready(" ".join(quoted))


def _in_quotes(path: str) -> str:
    """Escape *path* for a default value between double quotes."""
    return _Ready(re.sub(r'[\\"$`}]', r"\\\g<0>", path))
