"""The goals on one H200, computed from the figures of the parts: as text, and for docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.report import write_block
from tools.gpu.results import read_all

DATASHEET_TFLOPS = 989.0
"""Dense bfloat16 rate of H100 and H200 in their datasheets, which torchtitan's MFU refers to."""
Parts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A figure with its goal: at least *least*, or at most *most*. *value* returns None if it was not measured."""

    text: str
    reference: str
    value: Callable[[Parts], float | None]
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


def figure(parts: Parts, part: str, name: str, key: str) -> float | None:
    """One figure of a measurement; None if it was not measured."""
    figures = parts.get(part, {}).get("figures", {}).get(name, {})
    value = figures.get(key)
    return None if value is None else float(value)


def ratio(above: float | None, below: float | None) -> float | None:
    """The quotient of two figures; None if one of them is missing or the second is 0."""
    return above / below if above is not None and below else None


def _speed(parts: Parts, part: str, name: str) -> float | None:
    return figure(parts, part, name, "tokens_per_second")


def best(parts: Parts, part: str, beginning: str, key: str) -> float | None:
    """The largest figure of a part's measurements whose names have this *beginning*."""
    found = []
    for name in parts.get(part, {}).get("figures", {}):
        value = figure(parts, part, name, key) if name.startswith(beginning) else None
        if value is not None:
            found.append(value)
    return max(found, default=None)


def _worst_head(parts: Parts, layer: str, key: str) -> float | None:
    found = []
    for tokens in (4096, 8192):
        value = figure(parts, "head", f"{tokens} tokens, {layer} layer, default", key)
        if value is not None:
            found.append(value)
    return max(found, default=None)


def _lora_speed(parts: Parts) -> float | None:
    return _speed(parts, "lora", "ours, defaults")


def _lora_ratio(parts: Parts) -> float | None:
    return ratio(_lora_speed(parts), _speed(parts, "lora", "bare"))


def _full_mfu(parts: Parts) -> float | None:
    tflops = best(parts, "full", "ours", "tflops")
    return None if tflops is None else tflops / DATASHEET_TFLOPS


def _short_answers(parts: Parts) -> float | None:
    ours = best(parts, "packing", "ours", "tokens_per_second")
    return ratio(ours, _speed(parts, "packing", "bare, padded"))


def _stall(parts: Parts) -> float | None:
    return figure(parts, "saves", "asynchronous saves", "stall_in_copies")


def _steps_while_saving(parts: Parts) -> float | None:
    return figure(parts, "saves", "asynchronous saves", "step_while_saving")


def _resume(parts: Parts) -> float | None:
    return figure(parts, "saves", "kill and resume", "is_equal")


def _forecast(parts: Parts) -> float | None:
    found = []
    for part in parts.values():
        for figures in part.get("figures", {}).values():
            difference = figures.get("forecast_difference")
            if difference is not None:
                found.append(abs(float(difference)))
    return max(found, default=None)


GOALS = (
    Goal("LoRA r16, 8B, recipe defaults: tokens/s", "AutoModel, H100: 12,473", _lora_speed, 13_700),
    Goal("LoRA r16, 8B: ours / bare PEFT loop", "1.0", _lora_ratio, 0.97),
    Goal("full fine-tuning, 8B: MFU", "torchtitan, H100: 0.39 with compile", _full_mfu, 0.45),
    Goal(
        "loss head: time / its three products",
        "",
        lambda parts: _worst_head(parts, "trained", "time_in_products"),
        most=1.25,
    ),
    Goal(
        "loss head, frozen: memory / full logits",
        "",
        lambda parts: _worst_head(parts, "frozen", "memory_in_full_logits"),
        most=0.2,
    ),
    Goal(
        "loss head, trained, with its gradient: memory",
        "",
        lambda parts: _worst_head(parts, "trained", "memory_in_full_logits"),
        most=0.2,
    ),
    Goal("short answers: useful tokens/s / padded", "1.0", _short_answers, 3.0),
    Goal("async save of 1B: stall / copy to the host", "1.0", _stall, most=1.1),
    Goal("async save of 1B: step time while saving", "1.0", _steps_while_saving, most=1.03),
    Goal("resume after kill -9, deterministic: bit-equal", "", _resume, 1.0),
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
    """The generated section of docs/performance.md."""
    lines = []
    for machine in _machines(parts):
        lines.append(machine)
    lines += ["", "| | reference | goal | measured | met |", "|---|---|---|---:|---|"]
    for row in rows_of(parts):
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", *_tests_lines(parts)]
    return "\n".join(lines).rstrip()


def _machines(parts: Parts) -> list[str]:
    """A line for each machine and date; usually one."""
    found: dict[str, list[str]] = {}
    for name, part in parts.items():
        machine = part["machine"]
        gpu = machine["gpu"].split(",")
        text = (
            f"{gpu[0]}, driver {gpu[1].strip()}, torch {machine['torch']}, transformers {machine['transformers']}, "
            f"peft {machine['peft']}, Python {machine['python']}, {machine['kernel']}, {machine['date']}"
        )
        if machine["commit"]:
            text += f", commit {machine['commit']}"
        found.setdefault(text, []).append(name)
    lines = []
    for text, names in found.items():
        of_parts = f" ({', '.join(names)})" if len(found) > 1 else ""
        lines.append(f"{text}{of_parts}.")
    return lines


def _tests_lines(parts: Parts) -> list[str]:
    tests = parts.get("tests")
    if tests is None:
        return ["tests/gpu was not run."]
    outcomes = tests["figures"].get("outcomes", {})
    words = [f"{count} {name}" for name, count in outcomes.items()]
    lines = [f"tests/gpu: {', '.join(words) or 'no result'}."]
    for name in tests["failed"]:
        lines.append(f"* failed: `{name}`")
    return lines
