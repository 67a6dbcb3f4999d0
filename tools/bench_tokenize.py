"""Measure how long data takes to be tokenized, and with how much memory: in parallel, and in one process with all rows.

``python -m tools.bench_tokenize`` writes 100,000 rows, and prepares them as pairs, as text and as conversations: with
our builders into an empty cache, and as Python lists of all rows, with one call of the tokenizer for each column or
rendered text. Both write the same files. Every measurement runs in a new process, and the two alternate. ``--docs``
writes the figures to docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.bench_memory import reset_peak, status_megabytes
from tools.bench_report import write_block
from tools.bench_rounds import ROOT, machine

KINDS = ("pairs", "text", "chat")
WAYS = ("lists", "ours")
CHAT = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
Figures = dict[str, float]


def write_rows(path: Path, count: int) -> None:
    """Write *count* rows with a prompt, a completion and the conversation of both."""
    with path.open("w") as file:
        for number in range(count):
            prompt = f"What is {number} plus one? "
            answer = f"It is {number + 1}. "
            answer += "The tower has many steps and a bell that rings. " * (number % 7)
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            row = {"prompt": prompt, "completion": answer, "messages": turns}
            file.write(json.dumps(row) + "\n")


def measure(way: str, kind: str, data: Path, cache: Path) -> Figures:
    """Prepare the rows of *data*. Returns seconds, seconds of processor time with workers, and MB at the peak."""
    os.environ["AUTOMODEL_CKPT_CACHE"] = str(cache / "tokenizer")
    from automodel_ckpt.examples.data.python_docs import train_tokenizer

    tokenizer = train_tokenizer(8000)
    tokenizer.chat_template = CHAT
    os.environ["AUTOMODEL_CKPT_CACHE"] = str(cache / f"{way}-{kind}")
    _prepare(way, kind, tokenizer, _first_rows(data), cache)  # imports and compiles
    reset_peak()
    before = status_megabytes("VmRSS")
    cpu, began = _processor_seconds(), time.perf_counter()
    _prepare(way, kind, tokenizer, data, cache)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "cpu": _processor_seconds() - cpu,
        "megabytes": status_megabytes("VmHWM") - before,
    }


def _first_rows(data: Path) -> Path:
    short = data.with_name("short.jsonl")
    with data.open() as file:
        short.write_text("".join(file.readline() for _ in range(20)))
    return short


def _prepare(way: str, kind: str, tokenizer: Any, data: Path, cache: Path) -> None:
    from automodel_ckpt.data import chat, text

    if way == "lists":
        _prepare_lists(kind, tokenizer, data, cache)
    elif kind == "pairs":
        text.prompt_completion(tokenizer, str(data), 512)
    elif kind == "text":
        text.text(tokenizer, str(data), 512, field="completion")
    else:
        chat.messages(tokenizer, str(data), 512, chat_template=CHAT)


def _prepare_lists(kind: str, tokenizer: Any, data: Path, cache: Path) -> None:
    """Tokenize all rows as Python lists, in this process, and save the result."""
    from automodel_ckpt.data import chat
    from automodel_ckpt.data.conversations.chat_renderer import ChatRenderer
    from automodel_ckpt.data.conversations.chat_template import ChatTemplate
    from automodel_ckpt.data.conversations.conversation_changes import ConversationChanges
    from automodel_ckpt.data.rows.source import Source
    from automodel_ckpt.data.samples.encoder import Encoder
    from automodel_ckpt.data.samples.truncation import Truncation

    class Calling(Encoder):
        def _encode(self, texts: Sequence[str]) -> list[list[int]]:
            return [list(ids) for ids in _call(tokenizer, list(texts))]

    class Renderer(ChatRenderer):
        def encode(self, text: str) -> list[int]:
            return list(_call(tokenizer, text))

    class Template(ChatTemplate):
        @cached_property
        def renderer(self) -> Renderer:
            return Renderer(self.tokenizer, self.template, self.variables)

    source = Source.of(str(data))
    source.fingerprint()
    if kind == "pairs":
        samples = Calling(tokenizer).pairs(*source.texts(["prompt", "completion"]))
    elif kind == "text":
        samples = Calling(tokenizer).documents(*source.texts(["completion"]))
    else:
        template = Template(tokenizer, CHAT, {}, False)
        changes = ConversationChanges(False, False, False)
        encoder = chat.ConversationEncoder(template, changes, "messages", "tools")
        samples = encoder.encode(source)
    dataset = Truncation("error", 512).apply_to_all(samples, source.place)
    directory = cache / f"saved-{kind}-{data.stem}"
    directory.mkdir()
    dataset.save(directory)


def _call(tokenizer: Any, texts: Any) -> Any:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _processor_seconds() -> float:
    return sum(os.times()[:4])


def main() -> None:
    """Measure and print the figures as a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--docs", action="store_true", help="write the figures to docs/performance.md"
    )
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        way, kind, data, cache = given.one
        print(json.dumps(measure(way, kind, Path(data), Path(cache))))
        return
    block = as_markdown(_measure_all(given.rows, given.rounds), given.rows)
    print(block)
    if given.docs:
        write_block("bench-tokenize", block)


def _measure_all(num_rows: int, rounds: int) -> dict[tuple[str, str], Figures]:
    """Measure each kind in each way; of several rounds, the fastest counts."""
    best: dict[tuple[str, str], Figures] = {}
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "rows.jsonl"
        write_rows(data, num_rows)
        for number in range(rounds):
            cache = Path(scratch) / f"cache{number}"
            cache.mkdir()
            for kind in KINDS:
                for way in WAYS:
                    found = _in_a_process(way, kind, data, cache)
                    print(way, kind, found, file=sys.stderr, flush=True)
                    known = best.setdefault((way, kind), found)
                    if found["seconds"] < known["seconds"]:
                        best[way, kind] = found
    return best


def _in_a_process(way: str, kind: str, data: Path, cache: Path) -> Figures:
    command = [sys.executable, "-m", "tools.bench_tokenize", "--one", way, kind]
    done = subprocess.run(
        [*command, str(data), str(cache)], check=True, stdout=subprocess.PIPE, cwd=ROOT
    )
    answer: Figures = json.loads(done.stdout)
    return answer


def as_markdown(found: dict[tuple[str, str], Figures], num_rows: int) -> str:
    """The generated part of docs/performance.md."""
    where = machine()
    load = os.getloadavg()[1]
    head = (
        f"{where['cores']} cores ({where['processor']}), {where['kernel']}, {where['date']}; {num_rows:,} rows, load "
        f"average of the machine {load:.0f}. Memory: of the process that prepares the data, in addition to that at its "
        "start."
    )
    table = [
        "| | | µs per row | ratio | processor µs per row | ratio | kB per row | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (way, kind), figures in found.items():
        base = found["lists", kind]
        cells = [kind, "all rows as lists" if way == "lists" else "**ours**"]
        for name, unit in (("seconds", 1e6), ("cpu", 1e6), ("megabytes", 1e3)):
            per_row = figures[name] * unit / num_rows
            cells += [f"{per_row:.1f}", f"{figures[name] / base[name]:.2f}"]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join([head, "", *table])


if __name__ == "__main__":
    main()
