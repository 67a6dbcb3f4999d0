"""A plain training script, with which the campaign ``goodput`` compares this project: FSDP2, DCP and torchrun.

    CRASH_MARKS=DIR torchrun --standalone --nproc-per-node=2 --max-restarts=3 -m tools.torchrun_dcp DIRECTORY

It is written as PyTorch's tutorials do it: :func:`torch.distributed.checkpoint.save` (or ``async_save``) into a new
directory after every few steps, and ``load`` of the newest complete one at the start. Model, data and the length of
steps are those of the campaign (:mod:`tools.crash.signals`). It notes its steps in CRASH_MARKS as those ranks do.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from tools.crash.marks import MICRO_BATCH_SECONDS, Samples, mark

GLOBAL_BATCH, LOCAL_BATCH = 8, 2
CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    attention_dropout=0.1,
)


class State:
    """What is saved: the model, the optimizer, and the number of completed steps."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = LlamaForCausalLM(CONFIG)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0
        # The thread of async_save has collectives, too: in the group of the training, both would wait forever.
        self.group = dist.new_group(backend="gloo")

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def load(self, path: Path) -> None:
        state = self.state_dict()
        load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = int(state["step"])


def newest(directory: Path) -> Path | None:
    """The newest complete checkpoint: DCP writes ``.metadata`` last."""
    complete = [path.parent for path in directory.glob("step_*/.metadata")]
    return max(complete, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def batches(step: int) -> Iterator[torch.Tensor]:
    """The micro-batches of this rank in the step after *step*."""
    samples = Samples()
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(len(samples), generator=generator).tolist()
    first = step * GLOBAL_BATCH
    own = []
    for position in range(dist.get_rank(), GLOBAL_BATCH, dist.get_world_size()):
        own.append(order[(first + position) % len(samples)])
    for start in range(0, len(own), LOCAL_BATCH):
        micro_batch = own[start : start + LOCAL_BATCH]
        rows = [samples[index]["input_ids"] for index in micro_batch]
        yield torch.tensor(rows)


def train_step(state: State) -> None:
    micro_batches = list(batches(state.step))
    for tokens in micro_batches:
        time.sleep(MICRO_BATCH_SECONDS)
        loss = state.model(input_ids=tokens, labels=tokens).loss / len(micro_batches)
        loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step += 1


def train(state: State, directory: Path, num_steps: int, every: int, *, is_async: bool) -> None:
    """Train to step *num_steps*, with a checkpoint after *every* so many."""
    saving: Future[Any] | None = None
    while True:
        mark("data", state.step)
        if state.step >= num_steps:
            break
        train_step(state)
        if state.step % every == 0:
            path = directory / f"step_{state.step}"
            if saving is not None:
                saving.result()
            if is_async:
                answer: Any = async_save(
                    state.state_dict(), checkpoint_id=path, process_group=state.group
                )
                saving = getattr(answer, "upload_completion", answer)
            else:
                save(state.state_dict(), checkpoint_id=path)
    if saving is not None:
        saving.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--is-async", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    marks = Path(os.environ["CRASH_MARKS"])
    (marks / f"rank_{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    state = State()
    found = newest(given.directory)
    if found is not None:
        state.load(found)
    train(state, given.directory, given.steps, given.every, is_async=given.is_async)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
