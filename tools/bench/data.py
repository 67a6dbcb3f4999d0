"""Measure how many tokens per second the data of a rank come with: rows of 2048 tokens, as a recipe collates them.

``python -m tools.bench.data`` writes 20 million tokens to a file, and documents to JSON lines, and reads them as one
rank with local batches of 4 rows. Each source runs in a new process, with and without worker processes. ``--docs``
writes the figures to docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.report import write_block
from tools.bench.rounds import ROOT, machine

SIZE = 2048
"""Tokens of a row."""
ROWS = 4
"""Rows of a local batch."""
NEEDED = 20 * 10_000
"""Tokens per second: 20 times what one GPU needs for a model of 8 billion parameters (see :func:`as_markdown`)."""
_WARM_BATCHES = 40
"""Batches before the measurement: the parts of a stream pack their first rows in them."""
_SOURCES = (
    "windows",
    "documents",
    "divided",
    "token mixture",
    "stream",
    "divided stream",
    "stream mixture",
)
_TITLES = {
    "windows": "token file: windows",
    "documents": "token file: documents, packed whole",
    "divided": "token file: documents that rows divide",
    "token mixture": "mixture of two token files",
    "stream": "JSON lines, tokenized on the fly, packed whole",
    "divided stream": "JSON lines, tokenized on the fly, rows divide documents",
    "stream mixture": "mixture: 80 % token file, 20 % JSON lines",
}


def write_data(directory: Path, num_tokens: int) -> None:
    """Write tokens.bin (uint16, documents of 50 to 1500 tokens that end with token 0), and documents.jsonl."""
    random = np.random.RandomState(0)
    tokens = random.randint(1, 8000, num_tokens).astype(np.uint16)
    ends = np.cumsum(random.randint(50, 1500, num_tokens // 500))
    tokens[ends[ends < num_tokens]] = 0
    tokens.tofile(directory / "tokens.bin")
    words = ["the", "of", "and", "to", "in", "a", "is", "that", "for", "it"]
    words += [f"word{number}" for number in range(500)]
    with (directory / "documents.jsonl").open("w") as file:
        for _ in range(num_tokens // 2000):
            count = random.randint(40, 900)
            text = " ".join(words[number] for number in random.randint(0, len(words), count))
            file.write(json.dumps({"text": text}) + "\n")


def measure(source: str, num_workers: int, directory: Path, seconds: float) -> float:
    """Return the tokens per second of the batches of *source* over about *seconds*."""
    from automodel_ckpt.data.batches.loader import GlobalBatchLoader
    from automodel_ckpt.data.collate import PadCollator

    loader = GlobalBatchLoader(
        _dataset(source, directory),
        global_batch_size=ROWS,
        local_batch_size=ROWS,
        collate_fn=PadCollator(0),
        num_workers=num_workers,
    )
    num_tokens = 0
    began = 0.0
    number = 0
    while True:
        for batch in loader:
            if number == _WARM_BATCHES:
                began, num_tokens = time.perf_counter(), 0
            for rows in batch.micro_batches:
                num_tokens += int(rows["attention_mask"].sum())
            loader.mark_consumed(batch)
            number += 1
            passed = time.perf_counter() - began
            if number > _WARM_BATCHES and passed > seconds:
                return num_tokens / passed


def _dataset(source: str, directory: Path) -> Any:
    from automodel_ckpt.data.batches.document_rows import DocumentRows, RowRules
    from automodel_ckpt.data.batches.packed_stream import PackedStream
    from automodel_ckpt.data.batches.packing import PackedDataset
    from automodel_ckpt.data.mixture import mixture
    from automodel_ckpt.data.text import text
    from automodel_ckpt.data.token_files import nanogpt
    from automodel_ckpt.examples.data.python_docs import train_tokenizer

    whole, divided = RowRules(SIZE), RowRules(SIZE, splits=True)
    read = partial(nanogpt, str(directory / "tokens.bin"), header=False, vocab_size=8000)
    as_documents = partial(read, None, documents=True, eos_token=0)

    def stream() -> Any:
        path = str(directory / "documents.jsonl")
        return text(train_tokenizer(8000), path, SIZE, truncation="right", streaming=True)

    def alone(rules: RowRules) -> PackedStream:
        return PackedStream({"": stream()}, {"": Fraction(1)}, rules)

    def mixed() -> PackedStream:
        sources = {"tokens": DocumentRows(as_documents(), divided), "stream": stream()}
        return PackedStream(sources, {"tokens": Fraction(4, 5), "stream": Fraction(1, 5)}, divided)

    def of_token_files() -> Any:
        sources = {"a": PackedDataset(read(SIZE), SIZE), "b": DocumentRows(as_documents(), divided)}
        return mixture(sources, {"a": 0.7, "b": 0.3})

    builders: dict[str, Callable[[], Any]] = {
        "windows": lambda: read(SIZE),
        "documents": lambda: PackedDataset(as_documents(), SIZE),
        "divided": lambda: DocumentRows(as_documents(), divided),
        "token mixture": of_token_files,
        "stream": lambda: alone(whole),
        "divided stream": lambda: alone(divided),
        "stream mixture": mixed,
    }
    return builders[source]()


def main() -> None:
    """Measure and print the figures as a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--docs", action="store_true", help="write the figures to docs/performance.md"
    )
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        source, num_workers, directory = given.one
        print(measure(source, int(num_workers), Path(directory), given.seconds))
        return
    block = as_markdown(_measure_all(given.tokens, given.seconds, given.rounds))
    print(block)
    if given.docs:
        write_block("bench-data", block)


def _measure_all(num_tokens: int, seconds: float, rounds: int) -> dict[tuple[str, int], float]:
    """The median tokens per second of each source and number of workers."""
    found: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_data(Path(scratch), num_tokens)
        for _ in range(rounds):
            for source in _SOURCES:
                for num_workers in (0, 1, 2):
                    command = [sys.executable, "-m", "tools.bench.data", "--seconds", str(seconds)]
                    command += ["--one", source, str(num_workers), scratch]
                    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
                    done = subprocess.run(
                        command, check=True, stdout=subprocess.PIPE, cwd=ROOT, env=environment
                    )
                    rate = float(done.stdout)
                    print(source, num_workers, f"{rate:,.0f}", file=sys.stderr, flush=True)
                    found.setdefault((source, num_workers), []).append(rate)
    return {key: statistics.median(rates) for key, rates in found.items()}


def as_markdown(found: dict[tuple[str, int], float]) -> str:
    """The generated part of docs/performance.md."""
    where = machine()
    load = os.getloadavg()[1]
    head = (
        f"{where['cores']} cores ({where['processor']}), {where['kernel']}, {where['date']}; load average of the "
        f"machine {load:.0f}. Rows of {SIZE} tokens in batches of {ROWS}; one thread of the tokenizer in each process. "
        f"Thousands of tokens per second of one rank, and their ratio to 20 x 10,000."
    )
    table = [
        "| | no worker | ratio | 1 worker | ratio | 2 workers | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for source in _SOURCES:
        cells = [_TITLES[source]]
        for num_workers in (0, 1, 2):
            rate = found[source, num_workers]
            cells += [f"{rate / 1000:,.0f}", f"{rate / NEEDED:.1f}"]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join([head, "", *table])


if __name__ == "__main__":
    main()
