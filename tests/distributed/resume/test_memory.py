"""What a save and a load take of the host's memory, measured on real ranks with a model of 100 MB."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support import ranks
from tests.support.anonymous_memory import growth
from tests.support.models import tiny

WIDTH, NUM_LAYERS = 2048, 6
TENSOR_BYTES = WIDTH * WIDTH * 4
# Two blocks of 4 MiB that a file is written through, the manifest and other small things.
BUFFER_BYTES = 12 << 20
LAYOUTS = ("shards", "hf")


def build() -> SimpleNamespace:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))


def step(made: SimpleNamespace) -> None:
    made.model(torch.ones(1, WIDTH)).sum().backward()
    made.optimizer.step()
    made.optimizer.zero_grad()


def saved_as(made: SimpleNamespace, layout: str) -> SimpleNamespace:
    """All of it once is enough."""
    return made if layout == "shards" else SimpleNamespace(model=made.model)


def saving(root: Path) -> dict[str, int]:
    made = build()
    grown = {"training": growth(partial(step, made))}
    for layout in LAYOUTS:
        grown[layout] = growth(
            partial(tiny.save, root / layout, saved_as(made, layout), model_layout=layout)
        )
    return grown


def loading(root: Path) -> dict[str, tuple[int, int]]:
    """Of a fresh run's load, and of one more when all state is there already."""
    grown = {}
    for layout in LAYOUTS:
        load = partial(tiny.load, root / layout, saved_as(build(), layout))
        grown[layout] = growth(load), growth(load)
    return grown


def test_a_save_takes_its_buffer_and_a_load_no_more_than_a_training_step(tmp_path: Path) -> None:
    saved, loaded = (ranks.run(what, 2, tmp_path, timeout=80) for what in (saving, loading))
    for grown in saved:
        assert grown["training"] > NUM_LAYERS * TENSOR_BYTES
        assert max(grown["shards"], grown["hf"]) < BUFFER_BYTES, grown
    for read in loaded:
        for layout, (first, second) in read.items():
            assert first <= min(grown["training"] for grown in saved), (layout, read)
            assert second < TENSOR_BYTES + BUFFER_BYTES, (layout, read)
