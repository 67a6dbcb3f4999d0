"""The training loops that :mod:`tools.bench.loop` compares; in each process, one of them alternates with the bare loop.

All train the same Llama on the same text with fused AdamW in float32 on one thread. The bare loop is forward, backward
and step, without a metric; the others log loss and gradient norm (accelerate: the loss) in each step.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.trainer_callback import PrinterCallback

from automodel_ckpt.data.batches.micro_batches import permutation
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.examples.data import python_docs
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.loop import TrainingLoop

WARM_UP = 2
"""Blocks of steps that are not counted: the first includes the set-up."""
DOCSTRINGS: dict[str, Any] = {"seq_length": 512, "max_samples": 4000}
PACK = 1024
PLAN = "BENCH_LOOP_PLAN"
"""The environment variable with the arguments of a :class:`Plan` as JSON."""


@dataclass(frozen=True)
class Size:
    """A Llama, what a step of it trains on, and how much of it is enough: *blocks* of *block* steps, *rounds* times."""

    hidden: int
    layers: int
    vocab: int
    batch: int
    length: int
    block: int
    blocks: int
    rounds: int
    with_peers: bool = True
    """Whether accelerate and Trainer are worth their time."""

    @property
    def config(self) -> dict[str, Any]:
        """For transformers."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": 8 * self.hidden // 3,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 32,
            "num_key_value_heads": self.hidden // 32,
            "vocab_size": self.vocab,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


SIZES = {
    "tiny": Size(64, 2, 1024, 4, 32, block=20, blocks=6, rounds=11),
    "5M": Size(256, 5, 1024, 8, 128, block=2, blocks=6, rounds=7),
    "50M": Size(640, 9, 4096, 8, 128, block=1, blocks=5, rounds=2, with_peers=False),
}


@dataclass(frozen=True)
class Way:
    """A loop: what trains (None: the recipe that ``ckpt-train`` runs), on how many ranks, and on what."""

    run: Callable[[Plan, Turns], None] | None = None
    ranks: int = 1
    docstrings: bool = False
    packed: bool = False


@dataclass(frozen=True)
class Plan:
    """A loop and a size by their names, and the file in which rank 0 writes the figures."""

    way_name: str
    size_name: str
    output: str

    @property
    def way(self) -> Way:
        return WAYS[self.way_name]

    @property
    def size(self) -> Size:
        return SIZES[self.size_name]

    @property
    def num_steps(self) -> int:
        # Docstrings have different lengths: a dozen batches are not what an epoch is.
        blocks = 4 * self.size.blocks if self.way.docstrings else self.size.blocks
        return (WARM_UP + blocks) * self.size.block


@dataclass
class Steps:
    """How long steps took by the clock and in this process's processor time, and the tokens that each trained on."""

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _since: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        """The next step begins now."""
        self._since = time.perf_counter(), time.process_time()

    def note(self, tokens: int) -> None:
        """A step ended that trained on so many *tokens*, padding apart, and the next one begins."""
        wall, processor = self._since
        self.seconds.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)
        self.tokens.append(tokens)
        self.start()


class Turns:
    """The steps of a loop, and those of a bare loop: after each block of steps, the bare loop takes as many."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        self._plan = plan
        self._bare = bare(plan)
        self.bare, self.other = Steps(), Steps()
        self.other.start()

    def note(self, tokens: int) -> bool:
        """Note the end of a step of the loop, which trained on so many *tokens*. Returns whether it was the last."""
        self.other.note(tokens)
        block = self._plan.size.block
        num_steps = len(self.other.seconds)
        if num_steps % block == 0:
            self.bare.start()
            for _ in range(block):
                self.bare.note(next(self._bare))
            self.other.start()
        return num_steps >= self._plan.num_steps

    def write(self) -> None:
        """Write the counted steps of both as rank 0; other ranks write nothing."""
        if os.environ.get("RANK", "0") == "0":
            skipped = WARM_UP * self._plan.size.block
            names = ("seconds", "processor", "tokens")
            figures = [
                {name: getattr(steps, name)[skipped:] for name in names}
                for steps in (self.bare, self.other)
            ]
            Path(self._plan.output).write_text(json.dumps(figures))


# ---------------------------------------------------------------- loops


def model_of(size: Size) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**size.config)).train()


def dataset_of(plan: Plan) -> Any:
    """Prepared once and kept on disk."""
    tokenizer = python_docs.train_tokenizer(plan.size.vocab)
    if plan.way.docstrings:
        return python_docs.docstring_pairs(tokenizer, **DOCSTRINGS)
    return python_docs.language_modeling(tokenizer, plan.size.length)


def _batches(plan: Plan) -> Iterator[dict[str, Any]]:
    """Padded to the longest, as a DataLoader of one's own gives them, in the order in which ours trains on them."""
    dataset, batch = dataset_of(plan), plan.size.batch
    together, first = batch * plan.way.ranks, batch * int(os.environ.get("RANK", "0"))
    for epoch in range(1000):
        order = permutation(len(dataset), 0, epoch, True).tolist()
        starts = range(first, len(order) - together + first + 1, together)
        mine = [order[start : start + batch] for start in starts]
        loader: Any = DataLoader(dataset, batch_sampler=mine, collate_fn=PadCollator(0))
        yield from loader


def bare(plan: Plan) -> Iterator[int]:
    """Forward, backward, fused AdamW; with more ranks FSDP2. Yields the tokens of each step."""
    model = model_of(plan.size)
    if plan.way.ranks > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for batch in _batches(plan):
        tokens = int(batch["attention_mask"].sum())
        if not plan.way.docstrings:
            del batch["attention_mask"]
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield plan.way.ranks * tokens


def repeated(plan: Plan, turns: Turns) -> None:
    """The bare loop once more."""
    for tokens in bare(plan):
        if turns.note(tokens):
            return


def trainer(plan: Plan, turns: Turns) -> None:
    """Hugging Face's Trainer, logging each step."""

    class Clock(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            if len(turns.other.seconds) < plan.num_steps:  # after the last step there is a summary
                turns.note(plan.size.batch * plan.size.length)

    with tempfile.TemporaryDirectory(prefix="bench-loop-") as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=plan.size.batch,
            max_steps=plan.num_steps,
            logging_steps=1,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            optim="adamw_torch_fused",
            use_cpu=True,
            lr_scheduler_type="constant",
            dataloader_pin_memory=False,
            dataloader_drop_last=True,
        )
        made = Trainer(
            model_of(plan.size),
            arguments,
            train_dataset=dataset_of(plan),
            data_collator=PadCollator(0),
            callbacks=[Clock()],
        )
        made.remove_callback(PrinterCallback)
        made.train()


def accelerated(plan: Plan, turns: Turns) -> None:
    """A loop of one's own through accelerate, clipped, with the loss read each step."""
    from accelerate import Accelerator  # type: ignore[import-untyped, import-not-found, unused-ignore]

    accelerator = Accelerator(cpu=True)
    dataset, model = dataset_of(plan), model_of(plan.size)
    loader: Any = DataLoader(
        dataset, plan.size.batch, shuffle=True, collate_fn=PadCollator(0), drop_last=True
    )
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
            if turns.note(plan.size.batch * plan.size.length):
                return


# ---------------------------------------------------------------- ours


def recipe_of(plan: Plan) -> dict[str, Any]:
    """The recipe file that trains as the bare loop does; JSON is YAML."""
    size, way = plan.size, plan.way
    docs = python_docs.__name__
    builder = {"_target_": f"{docs}.language_modeling", "seq_length": size.length}
    if way.docstrings:
        builder = {"_target_": f"{docs}.docstring_pairs", **DOCSTRINGS}
    batch = 1 if way.packed else size.batch
    return {
        "recipe": "tools.bench.loop_ways.Launched",
        "seed": 0,
        "model": {"from_config": {"model_type": "llama", **size.config}},
        "tokenizer": {"_target_": f"{docs}.train_tokenizer", "vocab_size": size.vocab},
        "dataset": builder,
        "optimizer": {"lr": 1e-4},
        "step_scheduler": {
            "global_batch_size": batch * way.ranks,
            "local_batch_size": batch,
            "max_steps": plan.num_steps,
            "num_epochs": None,
            "ckpt_every_epochs": None,
        },
        "dataloader": {"drop_last": True},
        "logging": {"level": "warning", "log_every_seconds": 600},
        **({"packed_sequence": {"size": PACK}} if way.packed else {}),
    }


class TimedLoop(TrainingLoop):
    """A loop that notes its steps, and neither validates nor saves."""

    turns: Turns

    def step(self, batch: Any, control: Any) -> Any:
        due = super().step(batch, control)
        self.turns.note(control.num_tokens)
        return due

    def end(self) -> None: ...

    def validate_and_save(self, **due: Any) -> None: ...


class Launched(LLMFinetune):
    """Trains in turns with a bare loop, in the processes and the process group of ``ckpt-train``."""

    loop_class = TimedLoop

    def build_loop(self) -> TrainingLoop:
        TimedLoop.turns = Turns(Plan(**json.loads(os.environ[PLAN])))
        return super().build_loop()

    def run(self) -> None:
        super().run()
        TimedLoop.turns.write()


WAYS = {
    "bare, repeated": Way(repeated),
    "accelerate": Way(accelerated),
    "Trainer": Way(trainer),
    "ours": Way(),
    "ours, 2 ranks": Way(ranks=2),
    "ours, docstrings": Way(docstrings=True),
    "ours, packed docstrings": Way(docstrings=True, packed=True),
}


def main() -> None:
    """Train with a loop that needs no ``ckpt-train``."""
    plan = Plan(**json.loads(os.environ[PLAN]))
    assert plan.way.run is not None
    turns = Turns(plan)
    plan.way.run(plan, turns)
    turns.write()


if __name__ == "__main__":
    main()
