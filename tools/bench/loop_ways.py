"""The training loops that :mod:`tools.bench.loop` compares, and how those of one process take turns.

All train the same Llama on the same text with fused AdamW in float32 on one thread. The bare loop is forward, backward
and step, without a metric; the others log loss and gradient norm (accelerate: the loss) in each step.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

WARM_UP = 2
"""Blocks of steps that are not counted: the first includes the set-up."""
DOCSTRINGS: dict[str, Any] = {"seq_length": 512, "max_samples": 4000}
PACK = 1024
PLAN = "BENCH_LOOP_PLAN"
"""The environment variable with a :class:`Plan` as JSON."""


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


class Turns:
    """Loops in threads of one process run one at a time, a block of steps each, always in the same order."""

    def __init__(self, names: list[str], block: int, blocks: int) -> None:
        self.steps = {
            name: Steps(block, (WARM_UP + blocks) * block, partial(self._pass_on, name))
            for name in names
        }
        self._waiting = list(names)
        self._changed = threading.Condition()
        self._failed = False

    def run(self, ways: Mapping[str, Callable[[Steps], None]]) -> None:
        """Run all to their ends: the last one in this thread, since ours wants the main one."""
        *others, mine = ways
        threads = [
            threading.Thread(target=self._run, args=(name, ways[name]), daemon=True)
            for name in others
        ]
        for thread in threads:
            thread.start()
        self._run(mine, ways[mine])
        for thread in threads:
            thread.join()
        if self._failed:
            raise SystemExit("a loop failed, see above")

    def _run(self, name: str, way: Callable[[Steps], None]) -> None:
        try:
            self._await(name)
            self.steps[name].start()
            way(self.steps[name])
        except _AnotherFailed:
            pass
        except BaseException:
            self._failed = True
            raise
        finally:
            with self._changed:
                self._waiting.remove(name)
                self._changed.notify_all()

    def _pass_on(self, name: str) -> None:
        with self._changed:
            self._waiting.append(self._waiting.pop(self._waiting.index(name)))
            self._changed.notify_all()
        self._await(name)

    def _await(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] == name or self._failed)
        if self._failed:
            raise _AnotherFailed


class _AnotherFailed(BaseException):
    """Ends a loop from within."""


@dataclass
class Steps:
    """How long steps took by the clock and in this process's processor time, and the tokens that each trained on."""

    block: int
    limit: int
    pass_on: Callable[[], None]
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _since: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        """The next step begins now."""
        self._since = time.perf_counter(), time.process_time()

    def note(self, tokens: int) -> bool:
        """A step ended that trained on so many *tokens*, padding apart; whether it was the last one. After a block the
        others have their turns."""
        wall, processor = self._since
        self.seconds.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)
        self.tokens.append(tokens)
        is_last = len(self.seconds) >= self.limit
        if not is_last and len(self.seconds) % self.block == 0:
            self.pass_on()
        self.start()
        return is_last

    def plain(self) -> dict[str, Any]:
        """The counted steps, for JSON."""
        skipped = WARM_UP * self.block
        names = ("seconds", "processor", "tokens")
        return {name: getattr(self, name)[skipped:] for name in names} | {"block": self.block}


def model_of(size: Size) -> Any:
    import torch
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**size.config)).train()


def dataset_of(plan: Plan) -> Any:
    """Prepared once and kept on disk."""
    from automodel_ckpt.examples.data import python_docs

    tokenizer = python_docs.train_tokenizer(plan.size.vocab)
    if plan.data == "blocks":
        return python_docs.language_modeling(tokenizer, plan.size.length)
    return python_docs.docstring_pairs(tokenizer, **DOCSTRINGS)


def _batches(plan: Plan) -> Iterator[dict[str, Any]]:
    """Padded to the longest, as a DataLoader of one's own gives them, in the order in which ours trains on them."""
    from torch.utils.data import DataLoader

    from automodel_ckpt.data.batches.sampler import permutation
    from automodel_ckpt.data.collate import PadCollator

    dataset, batch = dataset_of(plan), plan.size.batch
    together, first = batch * plan.ranks, batch * int(os.environ.get("RANK", "0"))
    for epoch in range(1000):
        order = permutation(len(dataset), 0, epoch, True).tolist()
        starts = range(first, len(order) - together + first + 1, together)
        mine = [order[start : start + batch] for start in starts]
        loader: Any = DataLoader(dataset, batch_sampler=mine, collate_fn=PadCollator(0))
        yield from loader


def bare(steps: Steps, plan: Plan) -> None:
    """Forward, backward, fused AdamW; with more ranks FSDP2, each layer and the rest."""
    import torch

    model = model_of(plan.size)
    if plan.ranks > 1:
        _shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for batch in _batches(plan):
        tokens = int(batch["attention_mask"].sum())
        if plan.data == "blocks":
            del batch["attention_mask"]
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if steps.note(plan.ranks * tokens):
            return


def _shard(model: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def trainer(steps: Steps, plan: Plan) -> None:
    """Hugging Face's Trainer, logging each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from automodel_ckpt.data.collate import PadCollator

    class Clock(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            if len(steps.seconds) < steps.limit:  # after the last step there is a summary
                steps.note(plan.size.batch * plan.size.length)

    with tempfile.TemporaryDirectory(prefix="bench-loop-") as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=plan.size.batch,
            max_steps=steps.limit,
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


def accelerated(steps: Steps, plan: Plan) -> None:
    """A loop of one's own through accelerate, clipped, with the loss read each step."""
    import torch
    from accelerate import Accelerator  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from torch.utils.data import DataLoader

    from automodel_ckpt.data.collate import PadCollator

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
            if steps.note(plan.size.batch * plan.size.length):
                return


@dataclass(frozen=True)
class Way:
    """A loop: what trains (None: the recipe that ``ckpt-train`` runs), on how many ranks, and on what."""

    run: Callable[[Steps, Plan], None] | None = None
    ranks: int = 1
    data: str = "blocks"
    packed: bool = False


WAYS = {
    "bare": Way(bare),
    "bare, repeated": Way(bare),
    "accelerate": Way(accelerated),
    "Trainer": Way(trainer),
    "ours": Way(),
    "bare, 2 ranks": Way(bare, ranks=2),
    "ours, 2 ranks": Way(ranks=2),
    "bare, padded docstrings": Way(bare, data="docstrings"),
    "ours, docstrings": Way(data="docstrings"),
    "ours, packed docstrings": Way(data="docstrings", packed=True),
}


@dataclass(frozen=True)
class Plan:
    """Loops that alternate in the same processes, and the file in which rank 0 leaves the figures.

    The last one begins, and has the main thread, which signals reach. *short*: one step of each.
    """

    ways: list[str]
    size_name: str
    output: str
    short: bool = False

    @classmethod
    def of_this_process(cls) -> Plan:
        return cls(**json.loads(os.environ[PLAN]))

    @property
    def last(self) -> Way:
        return WAYS[self.ways[-1]]

    @property
    def ranks(self) -> int:
        return self.last.ranks

    @property
    def data(self) -> str:
        return self.last.data

    @property
    def size(self) -> Size:
        size = SIZES[self.size_name]
        if self.short:
            return replace(size, block=1, blocks=1)
        # Docstrings have different lengths: a dozen batches are not what an epoch is.
        return size if self.data == "blocks" else replace(size, blocks=4 * size.blocks)

    def turns(self) -> Turns:
        return Turns(self.ways[::-1], self.size.block, self.size.blocks)

    def train(self, turns: Turns, main: Callable[[Steps], None] | None = None) -> None:
        """Train in this process, as the rank that RANK says, in turns; *main* is the recipe, if it is the last way."""
        import torch

        torch.set_num_threads(1)

        def run(name: str, steps: Steps) -> None:
            if (way := WAYS[name].run) is not None:
                way(steps, self)
            elif main is not None:
                main(steps)

        turns.run({name: partial(run, name) for name in self.ways})
        if os.environ.get("RANK", "0") == "0":
            figures = {name: turns.steps[name].plain() for name in self.ways}
            Path(self.output).write_text(json.dumps(figures))


if __name__ == "__main__":
    plan = Plan.of_this_process()
    plan.train(plan.turns())
