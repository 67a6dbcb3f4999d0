"""``ckpt diff A B``: what changed between two checkpoints, and what a resume of A under B's recipe would change."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.cli.commands.small_files import first_state, recipe_leaves
from automodel_ckpt.cli.paths import WHERE, whole_checkpoint
from automodel_ckpt.cli.terminal import (
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
    from automodel_ckpt.checkpoint.tensors.difference import Held

_GENERAL = ("step", "epoch", "world_size", "dp_size", "losses", "progress")
# Of the recipe, what a resume takes from the checkpoint whatever the recipe says.
_KEPT = {"seed": "seed", "shuffle": "dataloader.shuffle"}
_NOT_IN_GROUPS = ("optimizer.lr", "optimizer._target_", "optimizer.on_resume")
_SHOWN = 20


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints.

    *general* and *environment* come from its manifest and are empty for an external checkpoint. *recipe* maps dotted
    keys to values, *trees* tree names to tensors. *steps* and *data* are the state of the step scheduler and the data
    loader, and *state* the names of all saved state.
    """

    path: Path
    general: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, str] = field(default_factory=dict)
    trees: Mapping[str, Held] = field(default_factory=dict)
    steps: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    state: frozenset[str] = frozenset()

    @property
    def is_external(self) -> bool:
        return not self.general


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``ckpt``'s."""
    command: argparse.ArgumentParser = commands.add_parser(
        "diff",
        help="compare two checkpoints",
        description="Show what changed from checkpoint A to B: recipe, environment, ranks and tensors; and what would "
        "change if A were resumed with B's recipe. Tensors with equal digests are not read. The exit code is 3 if a "
        "tensor is damaged.",
    )
    for name in ("a", "b"):
        command.add_argument(
            name, metavar=name.upper(), help=f"{WHERE}, or a directory of another program"
        )
    return command


def diff(arguments: argparse.Namespace) -> int:
    """Run ``ckpt diff``. Differences give exit code 0, damaged tensors 3; damaged tensors are not compared."""
    a, b = (_side(whole_checkpoint(Path(path))) for path in (arguments.a, arguments.b))
    document = _document(a, b)
    if arguments.json:
        print(json_text(document))
    else:
        print("\n".join(_lines(document)))
    if problems := [problem for tree in document["trees"].values() for problem in _damage(tree)]:
        code, message = describe(CheckpointUnusable.all_of(problems))
        print_error(message)
        return code
    return EXIT_DONE


def _damage(tree: Mapping[str, Any]) -> list[Problem]:
    found: list[Problem] = []
    for problems in tree["damaged"].values():
        found += map(problem_from_json, problems)
    return found


def _side(path: Path) -> Side:
    import os

    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.checkpoint.manifest import Manifest
    from automodel_ckpt.checkpoint.tensors.difference import Held
    from automodel_ckpt.convert.sources.external import open_external

    if not os.path.lexists(path / layout.MANIFEST) and not os.path.lexists(
        path.parent / layout.MANIFEST
    ):
        source = open_external(path)
        return Side(
            path, trees={"model": Held(source.root, source.tensors)}, recipe=recipe_leaves(path)
        )
    path = path if os.path.lexists(path / layout.MANIFEST) else path.parent
    manifest = Manifest.read(path)
    files = {name: record.files for name, record in manifest.state.items()}
    return Side(
        path,
        {key: getattr(manifest, key) for key in _GENERAL},
        manifest.environment,
        recipe_leaves(path),
        {name: Held(path, tree.tensors) for name, tree in manifest.trees.items()},
        first_state(path, files.get("step_scheduler", ())),
        first_state(path, files.get("dataloader", ())),
        frozenset(name for name, record in manifest.state.items() if record.scope != "not saved"),
    )


def _document(a: Side, b: Side) -> dict[str, Any]:
    from automodel_ckpt.checkpoint.tensors.difference import Held, changed_leaves, compare

    trees = {}
    for name in {**a.trees, **b.trees}:
        empty = Held(Path(), {})
        difference = compare(a.trees.get(name, empty), b.trees.get(name, empty))
        damaged = {
            fqn: [problem_json(problem) for problem in problems]
            for fqn, problems in difference.damaged.items()
        }
        trees[name] = asdict(difference) | {"damaged": damaged}
    return {
        "a": str(a.path),
        "b": str(b.path),
        "foreign": [str(side.path) for side in (a, b) if side.is_external],
        "general": changed_leaves(a.general, b.general),
        "recipe": changed_leaves(a.recipe, b.recipe),
        "environment": changed_leaves(a.environment, b.environment),
        "trees": trees,
        "resume": list(resume_lines(a, b)),
    }


# ---------------------------------------------------------------- a resume of A under B's recipe


def resume_lines(a: Side, b: Side) -> Iterator[str]:
    """Yield a sentence for each effect of resuming A with the recipe of B instead of its own."""
    if a.is_external or not a.recipe or not b.recipe:
        return
    step, changed = (
        int(a.general["step"]),
        {k for k in {*a.recipe, *b.recipe} if a.recipe.get(k) != b.recipe.get(k)},
    )
    yield from _resume_failures(a, b)
    yield from _schedule(a, b, step)
    if ("lr_scheduler" in a.state) == ("lr_scheduler" in b.state):
        yield from _rates(a, b, step, changed)
    yield from _data(a, b, changed)


def _resume_failures(a: Side, b: Side) -> Iterator[str]:
    for one, other, how in ((a, b, "saved in A, missing in B"), (b, a, "saved in B, missing in A")):
        if names := ", ".join(sorted(one.state - other.state)):
            yield f"the resume fails without --checkpoint.allow_missing_state '[{names}]': {how}"
    for name in sorted(a.trees.keys() & b.trees.keys()):
        for line in _other_function(a.path, b.path, name):
            yield f"the resume fails without --checkpoint.allow_changed_model true: {line}"


def _other_function(a: Path, b: Path, name: str) -> tuple[str, ...]:
    """Changes from the model config of *a* to that of *b* that affect the outputs of the module *name*."""
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.checkpoint.state.model_config import config_changes, saved_config
    from automodel_ckpt.errors import CheckpointUnusable

    try:
        before, after = (saved_config(path, layout.state_directory(name)) for path in (a, b))
    except CheckpointUnusable:
        return ()
    return config_changes(before, after).function if before and after else ()


def _schedule(a: Side, b: Side, step: int) -> Iterator[str]:
    before, after = a.steps.get("planned_steps"), b.steps.get("planned_steps")
    if before != after:
        left = f": {max(after - step, 0)} left after step {step}" if isinstance(after, int) else ""
        yield f"the run is planned for {after} steps instead of {before}{left}"


def _rates(a: Side, b: Side, step: int, changed: set[str]) -> Iterator[str]:
    peak, others = a.recipe.get("optimizer.lr"), b.recipe.get("optimizer.lr")
    applies = b.recipe.get("optimizer.on_resume") == "recipe"
    if applies and peak != others:
        yield f"the peak learning rate changes from {peak} to {others} (optimizer.on_resume: recipe)"
    elif peak != others:
        yield f"the peak learning rate stays {peak} as saved; {others} in the recipe only applies to new runs"
    for key in sorted(
        key for key in changed if key.startswith("optimizer.") and key not in _NOT_IN_GROUPS
    ):
        kept, new = (side.recipe.get(key, "default") for side in (a, b))
        if applies:
            yield f"{key} changes from {kept} to {new} (optimizer.on_resume: recipe)"
        else:
            yield f"{key} stays {kept} as saved; {new} in the recipe only applies to new runs"
    planned = a.steps.get("planned_steps") != b.steps.get("planned_steps")
    if not planned and not any(key.startswith("lr_scheduler") for key in changed):
        return
    was, will = _rate(a, peak, a.steps, step), _rate(b, others if applies else peak, b.steps, step)
    if was is not None and will is not None:
        yield f"the learning rate of step {step + 1} is {will:.6g} instead of {was:.6g}"
    else:
        yield "the learning rate follows the new schedule"


def _rate(side: Side, peak: str | None, steps: Mapping[str, Any], step: int) -> float | None:
    """Learning rate of step ``step + 1`` in the schedule of *side*; None if it cannot be computed."""
    section = {
        key.partition(".")[2]: text
        for key, text in side.recipe.items()
        if key.startswith("lr_scheduler")
    }
    try:
        lr = float(peak or "")
        if section in ({}, {"": "null"}):
            return lr
        import torch

        from automodel_ckpt.training.lr import build_schedule

        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        given = {
            key: text
            for key, text in section.items()
            if key in _NUMBERS and text not in ("null", "")
        }
        numbers = {key: float(text) for key, text in given.items()}
        warmup, decay = numbers.get("warmup_steps"), numbers.get("decay_steps")
        extra = {
            key.partition(".")[2]: float(text)
            for key, text in section.items()
            if key.startswith("kwargs.")
        }
        schedule: Any = build_schedule(
            optimizer,
            section["name"],
            total_steps=steps.get("planned_steps"),
            warmup_steps=None if warmup is None else int(warmup),
            decay_steps=None if decay is None else int(decay),
            warmup_ratio=numbers.get("warmup_ratio"),
            kwargs=extra,
        )
        return float(lr * schedule.lr_lambdas[0](step))
    except Exception:  # the recipe is of another version, or its schedule has non-numeric settings
        return None


_NUMBERS = ("warmup_steps", "warmup_ratio", "decay_steps")


def _data(a: Side, b: Side, changed: set[str]) -> Iterator[str]:
    lengths = (a.data.get("num_samples"), b.data.get("num_samples"))
    if lengths[0] != lengths[1]:
        yield f"the resume fails: the data set has {lengths[1]} samples instead of {lengths[0]}"
    elif any(key.startswith(("dataset.", "packed_sequence", "tokenizer")) for key in changed):
        yield "the samples differ, but their number is the same: the position in the data is kept"
    for name, key in _KEPT.items():
        saved = a.data.get(name)
        if key in changed:
            other = b.recipe.get(key)
            yield f"the order of samples stays as saved ({name} {saved}); {key} {other} only applies to new runs"
    sizes = [side.recipe.get("step_scheduler.global_batch_size") for side in (a, b)]
    if sizes[0] != sizes[1]:
        at = a.data.get("consumed_samples")
        yield f"each step takes {sizes[1]} samples instead of {sizes[0]}, from sample {at} of the epoch"


# ---------------------------------------------------------------- for people


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield coloured(printable(f"{document['a']} -> {document['b']}"), "bold", sys.stdout)
    for path in document["foreign"]:
        yield coloured(printable(f"external, unverified: {path}"), "yellow", sys.stdout)
    for title, key in (
        ("checkpoint", "general"),
        ("recipe", "recipe"),
        ("environment", "environment"),
    ):
        rows = [
            (name, _text(one), "->", _text(other)) for name, (one, other) in document[key].items()
        ]
        yield from _section(title, table(rows) if rows else ["no difference"])
    for name, tree in document["trees"].items():
        yield from _section(f"{name}: tensors", list(_tree_lines(tree)))
    if document["resume"]:
        yield from _section("resuming A with the recipe of B", document["resume"])


def _tree_lines(tree: Mapping[str, Any]) -> Iterator[str]:
    damaged = f", {len(tree['damaged'])} damaged" if tree["damaged"] else ""
    unread = f"{tree['num_unread']} by digest"
    yield f"{tree['num_equal']} equal ({unread}), {len(tree['changed'])} changed{damaged}"
    for fqn in tree["damaged"]:
        yield f"{fqn}: damaged, not compared"
    for title, key in (("only in A", "only_first"), ("only in B", "only_second")):
        if tree[key]:
            more = f" and {len(tree[key]) - _SHOWN} more" if len(tree[key]) > _SHOWN else ""
            yield f"{title}: {', '.join(tree[key][:_SHOWN])}{more}"
    for fqn, (one, other) in tree["redescribed"].items():
        yield f"{fqn}: {one} -> {other}"
    if tree["changed"]:
        rows = [("tensor", "largest change", "relative norm", "elements changed")]
        order = sorted(tree["changed"], key=lambda change: -(change["relative"] or 0.0))
        rows += [
            (
                c["fqn"],
                _number(c["max_abs"]),
                _number(c["relative"]),
                f"{c['num_changed']} of {c['numel']}",
            )
            for c in order[:_SHOWN]
        ]
        yield from fitted(rows, (1, 2, 3), ("elements changed", "largest change"))
        if len(order) > _SHOWN:
            yield f"and {len(order) - _SHOWN} more: `ckpt diff --json` lists all"


def _section(title: str, content: list[str]) -> Iterator[str]:
    yield ""
    yield coloured(printable(title), "bold", sys.stdout)
    for line in content:
        yield "  " + printable(line)


def _text(value: Any) -> str:
    return "(none)" if value is None else str(value)[:80]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
