"""``ckpt diff A B``: show what changed between two checkpoints, and what a resume of A with B's recipe would change."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.base.units import counted
from automodel_ckpt.cli.common.arguments import WHERE
from automodel_ckpt.cli.common.paths import whole_checkpoint
from automodel_ckpt.cli.common.remote import locate_one, sparse_copy
from automodel_ckpt.cli.common.terminal import (
    coloured,
    fitted,
    json_text,
    print_error,
    printable,
    problem_from_json,
    problem_json,
    table,
)
from automodel_ckpt.errors import EXIT_DONE, CheckpointUnusable, Problem, describe

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.manifest import Manifest
    from automodel_ckpt.checkpoint.sources.source import Source
    from automodel_ckpt.checkpoint.tensors.difference import StoredTensors

_SECTIONS = ("general", "recipe", "environment", "config")
_TITLES = {"general": "checkpoint", "config": "model config"}
_GENERAL = ("step", "epoch", "world_size", "dp_size", "losses", "progress")
# State of the data loader that a resume restores whatever the recipe states, and its key in the recipe.
_RESTORED = {"seed": "seed", "shuffle": "dataloader.shuffle"}
# Keys of the optimizer section that are not options of its parameter groups.
_NOT_IN_GROUPS = ("optimizer.lr", "optimizer._target_", "optimizer.on_resume")
_SCHEDULE_NUMBERS = ("warmup_steps", "warmup_ratio", "warmup_from", "decay_steps")
_MAX_LINES = 20
"""How many tensors each list shows."""


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints.

    *general* and *environment* come from its manifest and are empty for an external checkpoint. *recipe* maps dotted
    keys to values. *config* is the content of the model's config.json, empty if there is none. *trees* maps tree names
    to tensors. *steps* and *data* are the state of the step scheduler and the data loader, and *state* the names of all
    saved state. *url* is that of a checkpoint in a store, whose tensors are not read; *path* then has its other files.
    """

    path: Path
    general: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    trees: Mapping[str, StoredTensors] = field(default_factory=dict)
    steps: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    state: frozenset[str] = frozenset()
    url: str = ""

    @property
    def name(self) -> str:
        """The path or URL, for reports."""
        return self.url or str(self.path)

    @property
    def is_external(self) -> bool:
        return not self.general


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe the command ``ckpt diff``."""
    command.description = (
        "Show what changed from checkpoint A to B: recipe, environment, ranks, the model's config and tensors; and "
        "what would change if A were resumed with B's recipe. Tensors with equal digests are not read, unless their "
        "files are those of an export or have changed since the manifest was written: then their bytes are compared "
        "with the digests first. Tensors of a checkpoint in a store are compared by their digests alone. The exit "
        "code is 3 if a tensor is damaged."
    )
    for name in ("a", "b"):
        command.add_argument(
            name,
            metavar=name.upper(),
            help=f"{WHERE}, a URL of one in a store, or a directory or file of another program",
        )


def run(arguments: argparse.Namespace) -> int:
    """Run ``ckpt diff``. Differences give exit code 0, damaged tensors 3; damaged tensors are not compared."""
    with contextlib.ExitStack() as copies:
        a = _side_at(arguments.a, copies)
        b = _side_at(arguments.b, copies)
        document = _document(a, b)
    if arguments.json:
        print(json_text(document))
    else:
        print("\n".join(_lines(document)))
    problems = _damage(document)
    if problems:
        code, message = describe(CheckpointUnusable.all_of(problems))
        print_error(message)
        return code
    return EXIT_DONE


def _side_at(place: str, copies: contextlib.ExitStack) -> Side:
    """Read the checkpoint at a path or URL. *copies* keeps the files of a checkpoint in a store while it is open."""
    if not is_url(place):
        return _side(whole_checkpoint(Path(place)))
    run, name, manifest = locate_one(place)
    copy = copies.enter_context(sparse_copy(run, name, manifest))
    return replace(_side_of(copy, manifest, recorded_at=math.inf), url=f"{run.store}/{name}")


def _side(path: Path) -> Side:
    """Read the checkpoint at *path*; of another program's, only the tensors and the recipe, if it has one."""
    from automodel_ckpt.checkpoint.files import layout
    from automodel_ckpt.checkpoint.parts.manifest import Manifest
    from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
    from automodel_ckpt.config.help.changes import saved_recipe
    from automodel_ckpt.convert.open import open_source

    has_manifest = os.path.lexists(path / layout.MANIFEST)
    if not has_manifest and not os.path.lexists(path.parent / layout.MANIFEST):
        source = open_source(path)
        return Side(
            path,
            trees={"model": StoredTensors(source.root, source.tensors)},
            recipe=saved_recipe(path / layout.CONFIG),
            config=_config_of(source),
        )
    if not has_manifest:
        path = path.parent
    manifest = Manifest.read(path)
    recorded_at = os.stat(path / layout.MANIFEST).st_mtime_ns
    return _side_of(path, manifest, recorded_at=recorded_at)


def _side_of(path: Path, manifest: Manifest, *, recorded_at: float) -> Side:
    """Read the checkpoint of this program at *path*, by its *manifest*, which was written at *recorded_at*."""
    from automodel_ckpt.checkpoint.files import layout
    from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
    from automodel_ckpt.checkpoint.tensors.float32_weights import further_bits_of
    from automodel_ckpt.config.help.changes import saved_recipe

    tensors = {name: tree.tensors for name, tree in manifest.trees.items()}
    found = further_bits_of(tensors)
    # They are compared with the weights that they belong to.
    places = {place for of_module in found.values() for place in of_module.values()}
    trees = {}
    for tree, stored in tensors.items():
        others = {fqn: tensor for fqn, tensor in stored.items() if (tree, fqn) not in places}
        bits = {fqn: tensors[owner][name] for fqn, (owner, name) in found.get(tree, {}).items()}
        trees[tree] = StoredTensors(path, others, recorded_at, bits)
    saved = {name for name, record in manifest.state.items() if record.scope != "not saved"}
    return Side(
        path,
        general={key: getattr(manifest, key) for key in _GENERAL},
        environment=manifest.environment,
        recipe=saved_recipe(path / layout.CONFIG),
        config=_saved_config(path),
        trees=trees,
        steps=_state_of(path, manifest, "step_scheduler"),
        data=_state_of(path, manifest, "dataloader"),
        state=frozenset(saved),
    )


def _config_of(source: Source) -> dict[str, Any]:
    """The content of config.json of another program's model; empty if there is none that can be read."""
    from automodel_ckpt.convert.formats.files import read_json

    with contextlib.suppress(CheckpointUnusable):
        return read_json(source.config_directory, "config.json", source.export) or {}
    return {}


def _saved_config(path: Path) -> dict[str, Any]:
    from automodel_ckpt.checkpoint.files import layout
    from automodel_ckpt.checkpoint.state.model_config import saved_config

    with contextlib.suppress(CheckpointUnusable):
        return saved_config(path, layout.state_directory("model")) or {}
    return {}


def _state_of(path: Path, manifest: Any, attribute: str) -> dict[str, Any]:
    """Return the plain values in the state of an attribute; empty if it has none."""
    from automodel_ckpt.checkpoint.state.display import plain_state

    return plain_state(path, manifest, attribute)


def _document(a: Side, b: Side) -> dict[str, Any]:
    """Return the document of ``ckpt diff --json``."""
    from automodel_ckpt.checkpoint.tensors.difference import StoredTensors, changed_leaves, compare

    empty = StoredTensors(Path(), {})
    reads_values = not (a.url or b.url)
    trees = {}
    for name in {**a.trees, **b.trees}:
        difference = compare(
            a.trees.get(name, empty), b.trees.get(name, empty), reads_values=reads_values
        )
        trees[name] = asdict(difference)
        # The keys of problems in JSON are not the names of their fields.
        for fqn, problems in difference.damaged.items():
            trees[name]["damaged"][fqn] = [problem_json(problem) for problem in problems]
    sections: dict[str, Any] = {}
    not_compared: list[str] = []
    absent: list[str] = []
    for section in _SECTIONS:
        before, after = getattr(a, section), getattr(b, section)
        # Weights of another program have tensors only.
        if not (before or after):
            absent.append(section)
        # Another program's checkpoint has none of this: that is no change from a value to none.
        if bool(before) != bool(after):
            not_compared.append(section)
            before = after = {}
        sections[section] = changed_leaves(before, after)
    return {
        "a": a.name,
        "b": b.name,
        "foreign": [side.name for side in (a, b) if side.is_external],
        **sections,
        "not_compared": not_compared,
        "absent": absent,
        "trees": trees,
        "resume": list(resume_lines(a, b)),
    }


def _damage(document: Mapping[str, Any]) -> list[Problem]:
    problems: dict[Problem, None] = {}
    for tree in document["trees"].values():
        for entries in tree["damaged"].values():
            # A missing file is a problem of each of its tensors.
            problems.update(dict.fromkeys(problem_from_json(entry) for entry in entries))
    return list(problems)


# ---------------------------------------------------------------- a resume of A under B's recipe


def resume_lines(a: Side, b: Side) -> Iterator[str]:
    """Yield a sentence for each effect of resuming A with the recipe of B instead of that of A."""
    if a.is_external or not a.recipe or not b.recipe:
        return
    step = int(a.general["step"])
    keys = {*a.recipe, *b.recipe}
    changed = {key for key in keys if a.recipe.get(key) != b.recipe.get(key)}
    yield from _missing_state_lines(a.state, b.state)
    yield from _model_lines(a, b)
    yield from _planned_steps_lines(a, b, step)
    if ("lr_scheduler" in a.state) == ("lr_scheduler" in b.state):
        yield from _optimizer_lines(a, b, changed)
        yield from _learning_rate_lines(a, b, step, changed)
    yield from _data_lines(a, b, changed)


def _missing_state_lines(a: Collection[str], b: Collection[str]) -> Iterator[str]:
    only_a = sorted(set(a) - set(b))
    only_b = sorted(set(b) - set(a))
    for names, how in ((only_a, "saved in A, missing in B"), (only_b, "saved in B, missing in A")):
        if names:
            listed = ", ".join(names)
            yield f"the resume fails without --checkpoint.allow_missing_state '[{listed}]': {how}"


def _model_lines(a: Side, b: Side) -> Iterator[str]:
    for name in sorted(a.trees.keys() & b.trees.keys()):
        for line in _changed_outputs(a.path, b.path, name):
            yield f"the resume fails without --checkpoint.allow_changed_model true: {line}"


def _changed_outputs(a: Path, b: Path, name: str) -> tuple[str, ...]:
    """Return the changes from A's model config to B's that affect the outputs of the module *name*."""
    from automodel_ckpt.checkpoint.files import layout
    from automodel_ckpt.checkpoint.state.model_config import config_changes, saved_config

    directory = layout.state_directory(name)
    try:
        before = saved_config(a, directory)
        after = saved_config(b, directory)
    except CheckpointUnusable:
        return ()
    if not before or not after:
        return ()
    return config_changes(before, after).function


def _counted(value: object, noun: str) -> str:
    """Format a number of things that a checkpoint states, or another value as it is; None: the number is unknown."""
    if isinstance(value, int):
        return counted(value, noun)
    return f"{_known(value)} {'of ' if value is None else ''}{noun}s"


def _known(value: object) -> object:
    return "an unknown number" if value is None else value


def _planned_steps_lines(a: Side, b: Side, step: int) -> Iterator[str]:
    before, after = a.steps.get("planned_steps"), b.steps.get("planned_steps")
    if before != after:
        left = f": {max(after - step, 0)} left after step {step}" if isinstance(after, int) else ""
        yield f"the run is planned for {_counted(after, 'step')} instead of {_known(before)}{left}"


def _applies_recipe(side: Side) -> bool:
    """Whether a resume with the recipe of *side* applies the recipe's optimizer options instead of the saved ones."""
    return side.recipe.get("optimizer.on_resume") == "recipe"


def _optimizer_lines(a: Side, b: Side, changed: Collection[str]) -> Iterator[str]:
    """Describe the changed options of the optimizer, the peak learning rate first."""
    options = []
    peak, new_peak = a.recipe.get("optimizer.lr"), b.recipe.get("optimizer.lr")
    if peak != new_peak:
        options.append(("the peak learning rate", peak, new_peak))
    for key in sorted(changed):
        if key.startswith("optimizer.") and key not in _NOT_IN_GROUPS:
            options.append((key, a.recipe.get(key, "default"), b.recipe.get(key, "default")))
    for name, before, after in options:
        if _applies_recipe(b):
            yield f"{name} changes from {before} to {after} (optimizer.on_resume: recipe)"
        else:
            yield f"{name} stays {before} as saved; {after} in the recipe only applies to new runs"


def _learning_rate_lines(a: Side, b: Side, step: int, changed: Collection[str]) -> Iterator[str]:
    """Describe the learning rate of the next step, if the schedule or the planned steps changed."""
    is_schedule_changed = any(key.startswith("lr_scheduler") for key in changed)
    kinds = [side.recipe.get("lr_scheduler._target_", "") for side in (a, b)]
    if kinds[0] == kinds[1] and _keeps_schedule(b, kinds[1]):
        for key in sorted(changed):
            if key.startswith("lr_scheduler."):
                saved, new = (side.recipe.get(key, "default") for side in (a, b))
                yield f"{key} stays {saved} as saved; {new} in the recipe only applies to new runs"
        return
    if kinds[0] != kinds[1] and all(map(_is_known, kinds)):
        yield "the resume fails without --checkpoint.allow_missing_state '[lr_scheduler]': another kind of schedule"
    if a.steps.get("planned_steps") == b.steps.get("planned_steps") and not is_schedule_changed:
        return
    saved_peak = a.recipe.get("optimizer.lr")
    new_peak = b.recipe.get("optimizer.lr") if _applies_recipe(b) else saved_peak
    before = _learning_rate(a, saved_peak, step)
    after = _learning_rate(b, new_peak, step)
    if before is None or after is None:
        yield "the learning rate follows the new schedule"
    elif f"{after:.6g}" != f"{before:.6g}":
        yield f"the learning rate of step {step + 1} is {after:.6g} instead of {before:.6g}"


def _keeps_schedule(side: Side, kind: str) -> bool:
    """Whether a resume with the recipe of *side* keeps the settings of a schedule of that *kind* as saved."""
    from automodel_ckpt.config.help.changes import has_settings_in_state

    return has_settings_in_state(kind) and not _applies_recipe(side)


def _is_known(kind: str) -> bool:
    """Whether *kind* is a class of torch, or empty: a schedule by its name. A user's function may return any class."""
    from automodel_ckpt.config.help.changes import has_settings_in_state

    return not kind or has_settings_in_state(kind)


def _learning_rate(side: Side, peak: str | None, step: int) -> float | None:
    """Return the learning rate of step ``step + 1`` in the schedule of *side*; None if it cannot be computed."""
    section = {}
    for key, text in side.recipe.items():
        if key.startswith("lr_scheduler"):
            section[key.partition(".")[2]] = text
    try:
        lr = float(peak or "")
        if section in ({}, {"": "null"}):
            return lr
        return lr * _schedule_factor(section, lr, side.steps.get("planned_steps"), step)
    except Exception:  # the recipe is of another version, or its schedule has non-numeric settings
        return None


def _schedule_factor(
    section: Mapping[str, str], lr: float, planned_steps: int | None, step: int
) -> float:
    """Build the schedule that the recipe's section describes, and return its factor at *step*."""
    import torch

    from automodel_ckpt.optim.lr import build_schedule

    numbers: dict[str, float] = {}
    kwargs: dict[str, float] = {}
    for key, text in section.items():
        if key in _SCHEDULE_NUMBERS and text not in ("null", "auto", ""):
            numbers[key] = float(text)
        elif key.startswith("kwargs."):
            kwargs[key.partition(".")[2]] = float(text)
    warmup_steps: int | str | None = None
    if "warmup_steps" in numbers:
        warmup_steps = int(numbers["warmup_steps"])
    elif section.get("warmup_steps") == "auto":
        warmup_steps = "auto"
    decay_steps = numbers.get("decay_steps")
    # Any optimizer: only the factors of its schedule are used.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule: Any = build_schedule(
        optimizer,
        section["name"],
        total_steps=planned_steps,
        warmup_steps=warmup_steps,
        decay_steps=None if decay_steps is None else int(decay_steps),
        warmup_ratio=numbers.get("warmup_ratio"),
        warmup_from=numbers.get("warmup_from", 0.0),
        kwargs=kwargs,
        warns=False,
    )
    return float(schedule.lr_lambdas[0](step))


def _data_lines(a: Side, b: Side, changed: Collection[str]) -> Iterator[str]:
    before, after = a.data.get("num_samples"), b.data.get("num_samples")
    sources = ("dataset.", "packed_sequence", "tokenizer")
    if before != after:
        yield f"the resume fails: the data set has {_counted(after, 'sample')} instead of {_known(before)}"
    elif any(key.startswith(sources) for key in changed):
        yield "the samples differ, but their number is the same: the position in the data is kept"
    for name, key in _RESTORED.items():
        if key in changed:
            saved, new = a.data.get(name), b.recipe.get(key)
            yield f"the order of samples stays as saved ({name} {saved}); {key} {new} only applies to new runs"
    batch_size = "step_scheduler.global_batch_size"
    before, after = a.recipe.get(batch_size), b.recipe.get(batch_size)
    if before != after:
        position = a.data.get("consumed_samples")
        takes = f"{_counted(after, 'sample')} instead of {_known(before)}"
        yield f"each step takes {takes}, from sample {position} of the epoch"


# ---------------------------------------------------------------- printing


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield coloured(printable(f"{document['a']} -> {document['b']}"), "bold", sys.stdout)
    for path in document["foreign"]:
        yield coloured(printable(f"external, unverified: {path}"), "yellow", sys.stdout)
    for section in _SECTIONS:
        if section in document["absent"]:
            continue
        title = _TITLES.get(section, section)
        lines = _change_lines(document[section])
        if section in document["not_compared"]:
            lines = ["not compared: only one of the two has this information"]
        yield from _section(title, lines)
    for name, tree in document["trees"].items():
        yield from _section(f"{name}: tensors", list(_tree_lines(tree)))
    if document["resume"]:
        yield from _section("resuming A with the recipe of B", document["resume"])


def _change_lines(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    rows = []
    for name, (before, after) in changes.items():
        rows.append((name, _text(before), "->", _text(after)))
    return table(rows) or ["no difference"]


def _tree_lines(tree: Mapping[str, Any]) -> Iterator[str]:
    damaged = f", {len(tree['damaged'])} damaged" if tree["damaged"] else ""
    equal = f"{tree['num_equal']} equal ({tree['num_unread']} by digest)"
    changed = f"{len(tree['changed'])} changed"
    unread = [*tree["differing"], *tree["undecided"]]
    if unread:
        changed = f"{len(tree['differing'])} changed, by digest"
    yield f"{equal}, {changed}{damaged}"
    yield from _float32_lines(tree)
    for fqn in tree["differing"][:_MAX_LINES]:
        yield f"{fqn}: changed"
    for fqn in tree["undecided"][:_MAX_LINES]:
        yield f"{fqn}: not compared, because it is stored in other slices"
    if len(unread) > _MAX_LINES:
        yield "`ckpt diff --json` lists all"
    if unread:
        yield "values in a store are not read: `ckpt pull` the checkpoints to compare them"
    for fqn in tree["damaged"]:
        yield f"{fqn}: damaged, not compared"
    if tree["only_first"]:
        yield f"only in A: {_names_text(tree['only_first'])}"
    if tree["only_second"]:
        yield f"only in B: {_names_text(tree['only_second'])}"
    for fqn, (before, after) in tree["redescribed"].items():
        yield f"{fqn}: {before} -> {after}"
    yield from _changed_tensor_lines(tree["changed"])


def _float32_lines(tree: Mapping[str, Any]) -> Iterator[str]:
    """Describe which bfloat16 weights have further bits in the optimizer's state (optimizer.float32_weights)."""
    if tree["num_as_float32"]:
        number = counted(tree["num_as_float32"], "tensor")
        yield f"{number} compared as float32: bfloat16 weights with the further bits that the optimizer keeps of them"
    for side, names in (("A", tree["bits_only_first"]), ("B", tree["bits_only_second"])):
        if names:
            number = counted(len(names), "tensor")
            yield f"only in {side}: the optimizer keeps float32 weights of {number}, compared as bfloat16 here"


def _names_text(names: Sequence[str]) -> str:
    text = ", ".join(names[:_MAX_LINES])
    if len(names) > _MAX_LINES:
        text += f" and {len(names) - _MAX_LINES} more"
    return text


def _changed_tensor_lines(changes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Format a table of the changed tensors, the one with the largest relative change first."""
    if not changes:
        return
    rows = [("tensor", "largest change", "relative norm", "elements changed")]
    ordered = sorted(changes, key=lambda change: -(change["relative"] or 0.0))
    for change in ordered[:_MAX_LINES]:
        elements = f"{change['num_changed']} of {change['numel']}"
        largest, relative = _number(change["max_abs"]), _number(change["relative"])
        rows.append((change["fqn"], largest, relative, elements))
    yield from fitted(rows, (1, 2, 3), ("elements changed", "largest change"))
    if len(ordered) > _MAX_LINES:
        yield f"and {len(ordered) - _MAX_LINES} more: `ckpt diff --json` lists all"


def _section(title: str, content: Sequence[str]) -> Iterator[str]:
    yield ""
    yield coloured(printable(title), "bold", sys.stdout)
    for line in content:
        yield "  " + printable(line)


def _text(value: Any) -> str:
    return "(none)" if value is None else str(value)[:80]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
