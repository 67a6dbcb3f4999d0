"""The training loop beside a bare hand-written one, Hugging Face's Trainer and accelerate.

    python -m tools.bench_loop [--rounds 3] [--steps 60] [--sizes tiny 5M 50M] [--docs] [--profile]

Every measurement is a process of its own, on one thread; the ways take turns, and the median over the rounds of the
ratio within a round counts. All train the same Llama on the same blocks of text with fused AdamW in float32; the bare
loop is forward, backward and step, without a metric; the others log loss and gradient norm (accelerate: the loss) each
step. ``--docs`` writes the figures to docs/performance.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.bench_report import write_block
from tools.bench_rounds import ROOT, machine
from tools.bench_startup import first_step_seconds

WARM_UP = 5
"""Steps that are not counted."""


@dataclass(frozen=True)
class Size:
    """A Llama, and what a step of it trains on."""

    hidden: int
    layers: int
    vocab: int
    batch: int
    length: int

    @property
    def config(self) -> dict[str, Any]:
        """For transformers."""
        return {
            "hidden_size": self.hidden, "intermediate_size": 8 * self.hidden // 3, "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 32, "num_key_value_heads": self.hidden // 32,
            "vocab_size": self.vocab, "max_position_embeddings": 1024, "tie_word_embeddings": False,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        }  # fmt: skip


SIZES = {
    "tiny": Size(64, 2, 1024, 4, 32),
    "5M": Size(256, 5, 1024, 8, 128),
    "50M": Size(640, 9, 4096, 8, 128),
}


@dataclass
class Steps:
    """When steps ended, by the clock and in this process's processor time, and how many tokens each trained on."""

    limit: int
    ends: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def note(self, tokens: int) -> bool:
        """Count a step of so many *tokens*, padding apart; whether it was the last one."""
        self.ends.append(time.perf_counter())
        self.processor.append(time.process_time())
        self.tokens.append(tokens)
        return len(self.ends) >= self.limit

    def figures(self) -> dict[str, float]:
        """Milliseconds of the median step, and tokens per second over all that count."""
        seconds = self.ends[-1] - self.ends[WARM_UP]
        return {
            "ms": _median_step(self.ends),
            "cpu_ms": _median_step(self.processor),
            "tokens_per_s": sum(self.tokens[WARM_UP + 1 :]) / seconds,
        }


def _median_step(ends: list[float]) -> float:
    counted = ends[WARM_UP:]
    return 1e3 * statistics.median(after - before for before, after in pairwise(counted))


def _model(size: Size) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**size.config)).train()


def _dataset(size: Size, data: str) -> Any:
    from automodel_ckpt.data import python_docs

    tokenizer = python_docs.train_tokenizer(size.vocab)
    if data == "blocks":
        return python_docs.language_modeling(tokenizer, size.length)
    return python_docs.docstring_pairs(tokenizer, 512, max_samples=4000)


def _batches(size: Size, data: str, rank: int = 0, num_ranks: int = 1) -> Iterator[dict[str, Any]]:
    """Padded to the longest, in shuffled order, again and again, as many as a DataLoader of one's own would give."""
    import torch
    from torch.utils.data import DataLoader

    from automodel_ckpt.data.collate import PadCollator

    dataset = _dataset(size, data)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()[rank::num_ranks]
    loader: Any = DataLoader(dataset, size.batch, sampler=order, collate_fn=PadCollator(0), drop_last=True)
    while True:
        yield from loader


def bare(size: Size, steps: Steps, data: str = "blocks", num_ranks: int = 1) -> None:
    """Forward, backward, fused AdamW; with more ranks FSDP2, each layer and the rest."""
    import torch
    import torch.distributed as dist

    model, rank = _model(size), int(os.environ.get("RANK", "0"))
    if num_ranks > 1:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for batch in _batches(size, data, rank, num_ranks):
        tokens = int(batch["attention_mask"].sum())
        if data == "blocks":
            del batch["attention_mask"]
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if steps.note(num_ranks * tokens):
            break
    if num_ranks > 1:
        dist.destroy_process_group()


def ours(size: Size, steps: Steps, data: str = "blocks", num_ranks: int = 1, packed: bool = False) -> None:
    """The recipe, its log on disk, without checkpoints before the end."""
    from automodel_ckpt.config.load import load_recipe
    from automodel_ckpt.config.overrides import parse
    from automodel_ckpt.recipes.llm_finetune import LLMFinetune

    class Timed(LLMFinetune):
        def log_step(self, batch: Any, control: Any, result: Any, seconds: float) -> None:
            super().log_step(batch, control, result, seconds)
            steps.note(control.num_tokens)

        def end(self) -> None: ...

        def validate_and_save(self, **due: Any) -> None: ...

    directory = Path(os.environ["BENCH_LOOP_DIRECTORY"])  # shared by the ranks
    path = directory / f"recipe-{os.environ.get('RANK', '0')}.yaml"
    path.write_text(json.dumps(recipe_of(size, steps.limit, data, num_ranks, packed)))
    line = parse([f"--checkpoint.checkpoint_dir={directory / 'run'}"])
    loaded = load_recipe(path, line.overrides, problems=line.problems)
    recipe = Timed(loaded.config, config_yaml=loaded.to_yaml())
    try:
        recipe.setup()
        recipe.run()
    finally:
        recipe.close()


def recipe_of(size: Size, num_steps: int, data: str, num_ranks: int, packed: bool) -> dict[str, Any]:
    """The recipe file that trains as the bare loop does; JSON is YAML."""
    docs, blocks = "automodel_ckpt.data.python_docs", {"seq_length": size.length}
    builder = {"_target_": f"{docs}.language_modeling", **blocks}
    if data != "blocks":
        builder = {"_target_": f"{docs}.docstring_pairs", "seq_length": 512, "max_samples": 4000}
    batch = 1 if packed else size.batch
    return {
        "model": {"from_config": {"model_type": "llama", **size.config}},
        "tokenizer": {"_target_": f"{docs}.train_tokenizer", "vocab_size": size.vocab},
        "dataset": builder,
        "optimizer": {"lr": 1e-4},
        "step_scheduler": {
            "global_batch_size": batch * num_ranks, "local_batch_size": batch,
            "max_steps": num_steps, "num_epochs": None, "ckpt_every_epochs": None,
        },
        "logging": {"level": "warning"},
        **({"packed_sequence": {"size": 1024}} if packed else {}),
    }  # fmt: skip


def trainer(size: Size, steps: Steps) -> None:
    """Hugging Face's Trainer, logging each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from automodel_ckpt.data.collate import PadCollator

    class Clock(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            steps.note(size.batch * size.length)

    with tempfile.TemporaryDirectory(prefix="bench-loop-") as directory:
        arguments = TrainingArguments(
            directory, per_device_train_batch_size=size.batch, max_steps=steps.limit, logging_steps=1,
            disable_tqdm=True, report_to=[], save_strategy="no", optim="adamw_torch_fused", use_cpu=True,
            lr_scheduler_type="constant",
        )  # fmt: skip
        made = Trainer(
            _model(size), arguments, train_dataset=_dataset(size, "blocks"), data_collator=PadCollator(0),
            callbacks=[Clock()],
        )  # fmt: skip
        made.remove_callback(next(c for c in made.callback_handler.callbacks if type(c).__name__ == "PrinterCallback"))
        made.train()


def accelerated(size: Size, steps: Steps) -> None:
    """A loop of one's own through accelerate, clipped, with the loss read each step."""
    import torch
    from accelerate import Accelerator  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from torch.utils.data import DataLoader

    from automodel_ckpt.data.collate import PadCollator

    accelerator = Accelerator(cpu=True)
    dataset, model = _dataset(size, "blocks"), _model(size)
    loader: Any = DataLoader(dataset, size.batch, shuffle=True, collate_fn=PadCollator(0), drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while True:
        for batch in loader:
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            if steps.note(size.batch * size.length):
                return


WAYS: dict[str, tuple[int, Callable[[Size, Steps], None]]] = {
    "bare": (1, bare),
    "ours": (1, ours),
    "accelerate": (1, accelerated),
    "Trainer": (1, trainer),
    "bare, 2 ranks": (2, partial(bare, num_ranks=2)),
    "ours, 2 ranks": (2, partial(ours, num_ranks=2)),
    "bare, padded docstrings": (1, partial(bare, data="docstrings")),
    "ours, docstrings": (1, partial(ours, data="docstrings")),
    "ours, packed docstrings": (1, partial(ours, data="docstrings", packed=True)),
}
"""Name -> ranks, and what trains."""
GROUPS: dict[str, list[str]] = {
    "One process": ["bare", "ours", "accelerate", "Trainer"],
    "Two ranks, FSDP2": ["bare, 2 ranks", "ours, 2 ranks"],
    "Short answers (docstrings of at most 512 tokens)": [
        "bare, padded docstrings", "ours, docstrings", "ours, packed docstrings",
    ],
}  # fmt: skip


def train_here(way: str, size: Size, num_steps: int, output: Path) -> None:
    """Train in this process as the rank that RANK says; rank 0 leaves the figures in a file."""
    import torch

    torch.set_num_threads(1)
    steps = Steps(num_steps)
    WAYS[way][1](size, steps)
    if os.environ.get("RANK", "0") == "0":
        first = time.time() - (time.perf_counter() - steps.ends[0])
        output.write_text(json.dumps({**steps.figures(), "first_step": first}))


def measure(way: str, size: str, num_steps: int) -> dict[str, float]:
    """The figures of one run of *way*, in processes of its own; ``first_step`` in seconds from their start."""
    ranks = WAYS[way][0]
    with tempfile.TemporaryDirectory(prefix="bench-loop-") as directory:
        output = Path(directory) / "figures"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        places: list[dict[str, str]] = [{}]  # one process without them: Trainer and accelerate would take DDP
        if ranks > 1:
            environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
            places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        environment["BENCH_LOOP_DIRECTORY"] = directory
        command = [sys.executable, "-m", "tools.bench_loop", "--one", way, size, str(num_steps), str(output)]
        started = time.time()
        ran = [subprocess.Popen(command, cwd=ROOT, env=environment | place) for place in places]
        codes = [process.wait() for process in ran]
        if any(codes):
            sys.exit(f"{way}, {size}: a process failed, see above")
        figures: dict[str, float] = json.loads(output.read_text())
        return {**figures, "first_step": figures["first_step"] - started}


def _free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def waste(size: Size) -> float:
    """The part of packs of 1024 tokens that stays empty, of docstrings."""
    from automodel_ckpt.data.packing import PackedDataset

    return PackedDataset(_dataset(size, "docstrings"), 1024).waste


Figures = dict[str, list[dict[str, float]]]


def run_group(ways: list[str], size: str, num_rounds: int, num_steps: int) -> Figures:
    """The figures of each way, round by round."""
    found: Figures = {way: [] for way in ways}
    for _ in range(num_rounds):
        for way in ways:
            found[way].append(measure(way, size, num_steps))
    return found


def rows(found: Figures) -> list[dict[str, Any]]:
    """Each way beside the first one: the medians over the rounds of what is compared within a round."""
    base = next(iter(found.values()))
    return [
        {
            "way": way,
            "ms": statistics.median(each["ms"] for each in runs),
            "added_cpu_ms": statistics.median(each["cpu_ms"] - b["cpu_ms"] for each, b in zip(runs, base, strict=True)),
            "added_ms": statistics.median(each["ms"] - b["ms"] for each, b in zip(runs, base, strict=True)),
            "speed": statistics.median(
                each["tokens_per_s"] / b["tokens_per_s"] for each, b in zip(runs, base, strict=True)
            ),
        }
        for way, runs in found.items()
    ]


def as_markdown(results: Mapping[str, Any]) -> str:
    """The generated part of docs/performance.md."""
    where = results["machine"]
    head = (
        f"{where['cores']} cores ({where['processor']}), {where['kernel']}, {where['date']}; one thread a process. "
        "Added: milliseconds per step over the first line, by the clock and of processor time. "
        "Speed: tokens per second, padding apart, in times of its."
    )
    parts = [head]
    for title, table in results["tables"].items():
        parts += [
            "",
            f"### {title}",
            "",
            "| | ms per step | added | of processor time | speed |",
            "|---|---|---|---|---|",
        ]
        for row in table:
            name = f"**{row['way']}**" if row["way"].startswith("ours") else row["way"]
            parts.append(f"| {name} | {row['ms']:.2f} | {row['added_ms']:+.2f} | {row['added_cpu_ms']:+.2f} | "
                         f"{row['speed']:.3f} |")  # fmt: skip
    parts += ["", *(f"* {name}: {text}" for name, text in results["also"].items())]
    return "\n".join(parts)


def first_steps(size: str, num_rounds: int) -> str:
    """How soon the first step of the same model ends in a bare script and in ``ckpt-train``, in turns."""
    with tempfile.TemporaryDirectory(prefix="bench-loop-") as directory:
        recipe = Path(directory) / "recipe.yaml"
        recipe.write_text(json.dumps(recipe_of(SIZES[size], WARM_UP, "blocks", 1, packed=False)))
        pairs = [
            (measure("bare", size, WARM_UP + 2)["first_step"], first_step_seconds(1, recipe)) for _ in range(num_rounds)
        ]
    bare_seconds, our_seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    added = statistics.median(mine - theirs for theirs, mine in pairs)
    return f"bare script {bare_seconds:.2f} s, ckpt-train {our_seconds:.2f} s, added {added:+.2f} s"


def run_all(sizes: list[str], num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Everything; the first round of one process warms caches and is not counted."""
    tables, also = {}, {}
    has_accelerate = importlib.util.find_spec("accelerate") is not None
    if not has_accelerate:
        also["accelerate and Trainer"] = "not measured, since accelerate is not installed (extra bench)"
    measure("bare", sizes[0], WARM_UP + 2)
    for title, ways in GROUPS.items():
        measured = [way for way in ways if has_accelerate or way not in ("accelerate", "Trainer")]
        for size in sizes if title == "One process" else sizes[-2:][:1]:
            found = run_group(measured, size, num_rounds, num_steps)
            tables[f"{title}, {size}"] = rows(found)
    also["first step, one process"] = first_steps(sizes[0], num_rounds)
    also["packing"] = f"{100 * waste(SIZES[sizes[0]]):.2f} % of packs of 1024 tokens stay empty"
    return {"machine": machine(), "tables": tables, "also": also}


def profile(way: str, size: str, num_steps: int) -> None:
    """Where a run's time goes, in this process."""
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory() as directory, profiler:
        os.environ["BENCH_LOOP_DIRECTORY"] = directory
        train_here(way, SIZES[size], num_steps, Path(directory) / "figures")
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(r"automodel_ckpt|recipes|transformers|torch", 70)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--docs", action="store_true", help="write the figures to docs/performance.md")
    parser.add_argument("--profile", action="store_true", help="where our loop's time goes, at the first size")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        way, size, num_steps, output = given.one
        train_here(way, SIZES[size], int(num_steps), Path(output))
    elif given.profile:
        profile("ours", given.sizes[0], given.steps)
    else:
        results = run_all(given.sizes, given.rounds, given.steps)
        print(as_markdown(results))
        if given.docs:
            write_block("bench-loop", as_markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
