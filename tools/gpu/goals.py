"""The goals on one H200, computed from the figures of the parts: as text, and for docs/performance.md."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu.session import read_all
from tools.support import table, write_block

DATASHEET_TFLOPS = 989.0
"""Dense bfloat16 rate of H100 and H200 in their datasheets, which torchtitan's MFU refers to."""
Parts = Mapping[str, Mapping[str, Any]]
Figure = tuple[str, str, str]
"""A part, the beginning of the names of measurements (regular expressions), and the key of a figure."""


@dataclass(frozen=True)
class Goal:
    """A figure, or its ratio to another one (*over*), with its goal: at least *least*, or at most *most*.

    *reference* is what others have reached.
    """

    text: str
    reference: str
    figure: Figure
    least: float | None = None
    most: float | None = None
    over: Figure | float = 1.0

    @property
    def wanted(self) -> str:
        return f"≥ {self.least:,g}" if self.least is not None else f"≤ {self.most:,g}"

    def value(self, parts: Parts) -> float | None:
        above = largest(parts, self.figure)
        below = largest(parts, self.over) if isinstance(self.over, tuple) else self.over
        return above / below if above is not None and below else None

    def is_met(self, value: float) -> bool:
        if self.least is not None:
            return value >= self.least
        return self.most is not None and value <= self.most


def largest(parts: Parts, figure: Figure) -> float | None:
    """The largest absolute value of a figure, or None if there is none."""
    part_pattern, pattern, key = figure
    found = []
    for name, part in parts.items():
        for measurement, figures in part.get("figures", {}).items():
            is_meant = re.match(part_pattern, name) and re.match(pattern, measurement)
            if is_meant and figures.get(key) is not None:
                found.append(abs(float(figures[key])))
    return max(found, default=None)


_SPEED, _MEMORY = "tokens_per_second", "memory_in_full_logits"
_LORA = ("lora", "ours, defaults$", _SPEED)
_UNQUANTIZED = ("qlora", "ours, bfloat16$", _SPEED)
_PADDED = ("packing", "bare, padded$", _SPEED)
_TRAINED, _FROZEN = (
    f"(4096|8192) tokens, {kind} layer, default$" for kind in ("trained", "frozen")
)
_TITAN = "torchtitan, H100: 0.39 with compile"
_ASYNC = "asynchronous saves$"
GOALS = (
    Goal("LoRA r16, 8B, recipe defaults: tokens/s", "AutoModel, H100: 12,473", _LORA, 13_700),
    Goal("LoRA r16, 8B: ours / bare PEFT loop", "1.0", _LORA, 0.97, over=("lora", "bare$", _SPEED)),
    Goal("QLoRA r16, 8B: tokens/s / base in bfloat16", "", ("qlora", "ours, nf4$", _SPEED), 0.8, over=_UNQUANTIZED),
    Goal("full fine-tuning, 8B: MFU", _TITAN, ("full", "ours", "tflops"), 0.45, over=DATASHEET_TFLOPS),
    Goal("loss head: time / its three products", "", ("head", _TRAINED, "time_in_products"), most=1.25),
    Goal("loss head, frozen: memory / full logits", "", ("head", _FROZEN, _MEMORY), most=0.2),
    Goal("loss head, trained, with its gradient: memory", "", ("head", _TRAINED, _MEMORY), most=0.2),
    Goal("short answers: useful tokens/s / padded", "1.0", ("packing", "ours", _SPEED), 3.0, over=_PADDED),
    Goal("async save of 1B: stall / copy to the host", "1.0", ("saves", _ASYNC, "stall_in_copies"), most=1.1),
    Goal("async save of 1B: step time while saving", "1.0", ("saves", _ASYNC, "step_while_saving"), most=1.03),
    Goal("resume after kill -9, deterministic: bit-equal", "", ("saves", "kill and resume$", "is_equal"), 1.0),
    Goal("memory: forecast against the peak, worst case", "", (".*", ".*", "forecast_difference"), most=0.1),
)  # fmt: skip


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
    lines += ["", table(("", "reference", "goal", "measured", "met"), rows_of(parts))]
    if (tests := parts.get("tests")) is None:
        return "\n".join([*lines, "", "tests/gpu was not run."])
    outcomes = tests["figures"].get("outcomes", {})
    words = [f"{count} {name}" for name, count in outcomes.items()]
    failed = [f"* failed: `{name}`" for name in tests["failed"]]
    return "\n".join([*lines, "", f"tests/gpu: {', '.join(words) or 'no result'}.", *failed])
