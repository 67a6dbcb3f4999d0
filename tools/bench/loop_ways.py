"""The training loops that :mod:`tools.bench.loop` compares, and how those of one process take turns.

All train the same Llama on the same text with fused AdamW in float32 on one thread. The bare loop is forward, backward
and step, without a metric; the others log loss and gradient norm (accelerate: the loss) in each step.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

WARM_UP = 2
"""Blocks of steps that are not counted: the first includes the set-up."""
DOCSTRINGS: dict[str, Any] = {"seq_length": 512, "max_samples": 4000}
PACK = 1024


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
    first_step: float = 0.0
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
        self.first_step = self.first_step or time.time()
        is_last = len(self.seconds) >= self.limit
        if not is_last and len(self.seconds) % self.block == 0:
            self.pass_on()
        self.start()
        return is_last

    def plain(self) -> dict[str, Any]:
        """The counted steps, for JSON."""
        skipped = WARM_UP * self.block
        counted = {
            name: getattr(self, name)[skipped:] for name in ("seconds", "processor", "tokens")
        }
        return {**counted, "block": self.block, "first_step": self.first_step}


def model_of(size: Size) -> Any:
    import torch
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**size.config)).train()


def dataset_of(size: Size, data: str) -> Any:
    """Prepared once and kept on disk."""
    from automodel_ckpt.examples.data import python_docs

    tokenizer = python_docs.train_tokenizer(size.vocab)
    if data == "blocks":
        return python_docs.language_modeling(tokenizer, size.length)
    return python_docs.docstring_pairs(tokenizer, **DOCSTRINGS)


def _batches(size: Size, data: str, rank: int = 0, num_ranks: int = 1) -> Iterator[dict[str, Any]]:
    """Padded to the longest, as a DataLoader of one's own gives them, in the order in which ours trains on them."""
    from torch.utils.data import DataLoader

    from automodel_ckpt.data.batches.sampler import permutation
    from automodel_ckpt.data.collate import PadCollator

    dataset, together = dataset_of(size, data), size.batch * num_ranks
    for epoch in range(1000):
        order = permutation(len(dataset), 0, epoch, True).tolist()
        mine = [
            order[start + rank * size.batch : start + (rank + 1) * size.batch]
            for start in range(0, len(order) - together + 1, together)
        ]
        loader: Any = DataLoader(dataset, batch_sampler=mine, collate_fn=PadCollator(0))
        yield from loader


def bare(steps: Steps, size: Size, data: str = "blocks", num_ranks: int = 1) -> None:
    """Forward, backward, fused AdamW; with more ranks FSDP2, each layer and the rest."""
    import torch

    model, rank = model_of(size), int(os.environ.get("RANK", "0"))
    if num_ranks > 1:
        _shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for batch in _batches(size, data, rank, num_ranks):
        tokens = int(batch["attention_mask"].sum())
        if data == "blocks":
            del batch["attention_mask"]
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if steps.note(num_ranks * tokens):
            return


def _shard(model: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def ours(steps: Steps, size: Size, data: str = "blocks", packed: bool = False) -> None:
    """The recipe in one process, its log on disk, without checkpoints. It is closed at the end of the process."""
    import torch.distributed as dist

    from automodel_ckpt.config.load import load_recipe
    from automodel_ckpt.config.overrides import parse
    from automodel_ckpt.recipes.llm_finetune import LLMFinetune

    class Timed(LLMFinetune):
        loop_class = timed_loop(steps)

        def setup(self) -> None:
            super().setup()
            # So that another recipe can make its own; nothing is saved here.
            dist.destroy_process_group()

    # As the command does after its imports: collections search the modules' objects no more.
    gc.freeze()
    directory = Path(os.environ["BENCH_LOOP_DIRECTORY"])
    path = directory / f"recipe-{packed}.yaml"
    path.write_text(json.dumps(recipe_of(size, steps.limit, data, 1, packed)))
    line = parse([f"--checkpoint.checkpoint_dir={directory / f'run-{packed}'}"])
    loaded = load_recipe(path, line.overrides, problems=line.problems)
    recipe = Timed(loaded.config, config_yaml=loaded.to_yaml())
    at_end.callback(recipe.close)
    recipe.setup()
    recipe.run()


def timed_loop(steps: Steps) -> Any:
    """The class of a loop that notes its *steps*, and neither validates nor saves."""
    from automodel_ckpt.training.loop import TrainingLoop

    class TimedLoop(TrainingLoop):
        def step(self, batch: Any, control: Any) -> Any:
            due = super().step(batch, control)
            steps.note(control.num_tokens)
            return due

        def end(self) -> None: ...

        def validate_and_save(self, **due: Any) -> None: ...

    return TimedLoop


at_end = ExitStack()
"""What ends the loops that others may still need: their process group."""


def recipe_of(
    size: Size, num_steps: int, data: str, num_ranks: int, packed: bool
) -> dict[str, Any]:
    """The recipe file that trains as the bare loop does; JSON is YAML."""
    docs, blocks = "automodel_ckpt.examples.data.python_docs", {"seq_length": size.length}
    builder = {"_target_": f"{docs}.language_modeling", **blocks}
    if data != "blocks":
        builder = {"_target_": f"{docs}.docstring_pairs", **DOCSTRINGS}
    batch = 1 if packed else size.batch
    return {
        "seed": 0,
        "model": {"from_config": {"model_type": "llama", **size.config}},
        "tokenizer": {"_target_": f"{docs}.train_tokenizer", "vocab_size": size.vocab},
        "dataset": builder,
        "optimizer": {"lr": 1e-4},
        "step_scheduler": {
            "global_batch_size": batch * num_ranks,
            "local_batch_size": batch,
            "max_steps": num_steps,
            "num_epochs": None,
            "ckpt_every_epochs": None,
        },
        "dataloader": {"drop_last": True},
        "logging": {"level": "warning", "log_every_seconds": 600},
        **({"packed_sequence": {"size": PACK}} if packed else {}),
    }


def trainer(steps: Steps, size: Size) -> None:
    """Hugging Face's Trainer, logging each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from automodel_ckpt.data.collate import PadCollator

    class Clock(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            if len(steps.seconds) < steps.limit:  # after the last step there is a summary
                steps.note(size.batch * size.length)

    with tempfile.TemporaryDirectory(prefix="bench-loop-") as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=size.batch,
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
            model_of(size),
            arguments,
            train_dataset=dataset_of(size, "blocks"),
            data_collator=PadCollator(0),
            callbacks=[Clock()],
        )
        made.remove_callback(
            next(
                c for c in made.callback_handler.callbacks if type(c).__name__ == "PrinterCallback"
            )
        )
        made.train()


def accelerated(steps: Steps, size: Size) -> None:
    """A loop of one's own through accelerate, clipped, with the loss read each step."""
    import torch
    from accelerate import Accelerator  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from torch.utils.data import DataLoader

    from automodel_ckpt.data.collate import PadCollator

    accelerator = Accelerator(cpu=True)
    dataset, model = dataset_of(size, "blocks"), model_of(size)
    loader: Any = DataLoader(
        dataset, size.batch, shuffle=True, collate_fn=PadCollator(0), drop_last=True
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
            if steps.note(size.batch * size.length):
                return


WAYS: dict[str, tuple[int, Callable[..., None]]] = {
    "bare": (1, bare),
    "bare, repeated": (1, bare),
    "accelerate": (1, accelerated),
    "Trainer": (1, trainer),
    "ours": (1, ours),
    "bare, 2 ranks": (2, partial(bare, num_ranks=2)),
    "ours, 2 ranks": (2, ours),
    "bare, padded docstrings": (1, partial(bare, data="docstrings")),
    "ours, docstrings": (1, partial(ours, data="docstrings")),
    "ours, packed docstrings": (1, partial(ours, data="docstrings", packed=True)),
}
"""Name -> ranks, and what trains."""


def train_here(ways: list[str], size: Size) -> dict[str, Any]:
    """Train in this process, as the rank that RANK says, in turns; the figures by way. The last way starts: ours, which
    makes the process group of several ranks."""
    import torch

    torch.set_num_threads(1)
    if "docstrings" in ways[0]:  # of different lengths: a dozen batches are not what an epoch is
        size = replace(size, blocks=4 * size.blocks)
    turns = Turns(ways[::-1], size.block, size.blocks)
    with at_end:
        turns.run({way: partial(WAYS[way][1], size=size) for way in ways})
    return {way: turns.steps[way].plain() for way in ways}
