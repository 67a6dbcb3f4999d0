"""The goals on one H200, computed from the figures of the parts: as text, and for docs/performance.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu.session import read_all
from tools.support import write_block

DATASHEET_TFLOPS = 989.0
"""Dense bfloat16 rate of H100 and H200 in their datasheets, which torchtitan's MFU refers to."""
Parts = Mapping[str, Mapping[str, Any]]
Value = Callable[[Parts], float | None]


@dataclass(frozen=True)
class Goal:
    """A figure with its goal: at least *least*, or at most *most*. *value* returns None if it was not measured."""

    text: str
    reference: str
    value: Value
    least: float | None = None
    most: float | None = None

    @property
    def wanted(self) -> str:
        """The goal as text."""
        return f"≥ {self.least:,g}" if self.least is not None else f"≤ {self.most:,g}"

    def is_met(self, value: float) -> bool:
        """Whether *value* is at least, or at most, the goal."""
        if self.least is not None:
            return value >= self.least
        return self.most is not None and value <= self.most


def largest(parts: Parts, part: str, pattern: str, key: str) -> float | None:
    """The largest figure of a part's measurements with names that begin with *pattern*. None if there is none."""
    found = []
    for name, figures in parts.get(part, {}).get("figures", {}).items():
        if re.match(pattern, name) and figures.get(key) is not None:
            found.append(float(figures[key]))
    return max(found, default=None)


def of(part: str, pattern: str, key: str) -> Value:
    """What computes :func:`largest`."""
    return lambda parts: largest(parts, part, pattern, key)


def ratio(above: Value, below: Value) -> Value:
    """The quotient of two figures; None if one of them is missing or the second is 0."""

    def value(parts: Parts) -> float | None:
        first, second = above(parts), below(parts)
        return first / second if first is not None and second else None

    return value


def _forecast(parts: Parts) -> float | None:
    found = []
    for part in parts.values():
        for figures in part.get("figures", {}).values():
            difference = figures.get("forecast_difference")
            if difference is not None:
                found.append(abs(float(difference)))
    return max(found, default=None)


_SPEED, _MEMORY = "tokens_per_second", "memory_in_full_logits"
_LORA = of("lora", "ours, defaults$", _SPEED)
_MFU = ratio(of("full", "ours", "tflops"), lambda _: DATASHEET_TFLOPS)
_PACKED = ratio(of("packing", "ours", _SPEED), of("packing", "bare, padded$", _SPEED))
_HEAD = "(4096|8192) tokens, {} layer, default$"
_ASYNC = "asynchronous saves$"
GOALS = (
    Goal("LoRA r16, 8B, recipe defaults: tokens/s", "AutoModel, H100: 12,473", _LORA, 13_700),
    Goal(
        "LoRA r16, 8B: ours / bare PEFT loop",
        "1.0",
        ratio(_LORA, of("lora", "bare$", _SPEED)),
        0.97,
    ),
    Goal("full fine-tuning, 8B: MFU", "torchtitan, H100: 0.39 with compile", _MFU, 0.45),
    Goal(
        "loss head: time / its three products",
        "",
        of("head", _HEAD.format("trained"), "time_in_products"),
        most=1.25,
    ),
    Goal(
        "loss head, frozen: memory / full logits",
        "",
        of("head", _HEAD.format("frozen"), _MEMORY),
        most=0.2,
    ),
    Goal(
        "loss head, trained, with its gradient: memory",
        "",
        of("head", _HEAD.format("trained"), _MEMORY),
        most=0.2,
    ),
    Goal("short answers: useful tokens/s / padded", "1.0", _PACKED, 3.0),
    Goal(
        "async save of 1B: stall / copy to the host",
        "1.0",
        of("saves", _ASYNC, "stall_in_copies"),
        most=1.1,
    ),
    Goal(
        "async save of 1B: step time while saving",
        "1.0",
        of("saves", _ASYNC, "step_while_saving"),
        most=1.03,
    ),
    Goal(
        "resume after kill -9, deterministic: bit-equal",
        "",
        of("saves", "kill and resume$", "is_equal"),
        1.0,
    ),
    Goal("memory: forecast against the peak, worst case", "", _forecast, most=0.10),
)


def rows_of(parts: Parts) -> list[tuple[str, str, str, str, str]]:
    """(figure, reference, goal, measured, met) of each goal, as text."""
    rows = []
    for goal in GOALS:
        value = goal.value(parts)
        measured, met = "not measured", ""
        if value is not None:
            measured = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            met = "yes" if goal.is_met(value) else "**no**"
        rows.append((goal.text, goal.reference, goal.wanted, measured, met))
    return rows


def table_text(directory: Path) -> str:
    """The goals and the figures in a directory, for a terminal."""
    parts = read_all(directory)
    lines = [f"\n{'':48} {'goal':>10} {'measured':>13} {'met':>5}"]
    for text, _, wanted, measured, met in rows_of(parts):
        lines.append(f"{text:48} {wanted:>10} {measured:>13} {met.strip('*'):>5}")
    if any(part["is_dry_run"] for part in parts.values()):
        lines.append("A dry run: these figures are of tiny models on a CPU and mean nothing.")
    return "\n".join(lines)


def report(directory: Path, *, docs: bool) -> int:
    """Print the table; with *docs*, write docs/performance.md if there are figures of a GPU. Returns the exit code."""
    print(table_text(directory))
    if not docs:
        return 0
    parts = {}
    for name, part in read_all(directory).items():
        if not part["is_dry_run"] and part["machine"].get("gpu"):
            parts[name] = part
    if not parts:
        print(f"nothing to write: {directory} has no figures of a GPU")
        return 1
    write_block("gpu", as_markdown(parts))
    return 0


def as_markdown(parts: Parts) -> str:
    """The generated section of docs/performance.md: machines (usually one), goals, tests."""
    machines: dict[str, list[str]] = {}
    for name, part in parts.items():
        machine = part["machine"]
        gpu, driver, *_ = (word.strip() for word in machine["gpu"].split(","))
        words = [gpu, f"driver {driver}"]
        words += [f"{key} {machine[key]}" for key in ("torch", "transformers", "peft")]
        words += [f"Python {machine['python']}", machine["kernel"], machine["date"]]
        words += [f"commit {machine['commit']}"] if machine["commit"] else []
        machines.setdefault(", ".join(words), []).append(name)
    lines = []
    for text, names in machines.items():
        of_parts = f" ({', '.join(names)})" if len(machines) > 1 else ""
        lines.append(f"{text}{of_parts}.")
    lines += ["", "| | reference | goal | measured | met |", "|---|---|---|---:|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows_of(parts)]
    if (tests := parts.get("tests")) is None:
        return "\n".join([*lines, "", "tests/gpu was not run."])
    outcomes = tests["figures"].get("outcomes", {})
    words = [f"{count} {name}" for name, count in outcomes.items()]
    failed = [f"* failed: `{name}`" for name in tests["failed"]]
    return "\n".join([*lines, "", f"tests/gpu: {', '.join(words) or 'no result'}.", *failed])
