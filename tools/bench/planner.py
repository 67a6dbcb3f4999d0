"""What planning, finalizing and reading a checkpoint of thousands of ranks costs each rank, by simulation.

    python -m tools.bench.planner                  # 8, 64, 512 and 4,096 ranks: about five minutes on one core
    python -m tools.bench.planner --ranks 8 512
    python -m tools.bench.planner --docs           # also writes the table into docs/performance.md

One process is one rank of a fake process group at a time, with 300 parameters that `fully_shard` would shard over all
ranks, and AdamW's two moments of each. The code of saves and loads runs as it does in a run, except that digests are
invented and no bytes of tensors are written or read. Times are processor times, without waiting for a disk.
Prints a table in Markdown.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import FileRecord, digest_of
from automodel_ckpt.checkpoint.files.threads import collector_paused
from automodel_ckpt.checkpoint.formats.planning import Share, TreePlan
from automodel_ckpt.checkpoint.formats.rank_files import ShardFiles, item_jobs, shard_jobs
from automodel_ckpt.checkpoint.jobs.jobs import (
    Chunk,
    FileJob,
    RankManifest,
    finalize,
    merge_trees,
    read_rank_manifests,
)
from automodel_ckpt.checkpoint.options import CheckpointOptions
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.saving.planner import Planner, shares_of_all
from automodel_ckpt.checkpoint.saving.publisher import Publisher
from automodel_ckpt.checkpoint.saving.save import Proposal, Save, SaveSettings, TreeSummary
from automodel_ckpt.checkpoint.state.storable import local_box
from tools.bench.harness import options_of, reset_peak, status_bytes
from tools.support import table, write_block

NUM_TENSORS = 300
# Llama's shapes, without its width: rows that 4,096 ranks can share.
SHAPES = ((8192, 16), (8192, 8), (28672, 8), (8192,))
RANKS = (8, 64, 512, 4096)


TABLE = (
    ("planning, each rank (s)", "plan", 1.0, 2),
    ("finalizing the manifest, rank 0 (s)", "finalize", 1.0, 2),
    ("DCP's `.metadata` at the first save, rank 0 (s)", "metadata", 1.0, 2),
    ("finding its slices at a load, each rank (s)", "load", 1.0, 2),
    ("sent to the other ranks, each rank (KB)", "sent bytes", 1e3, 1),
    ("rank manifest (KB)", "rank manifest bytes", 1e3, 1),
    ("MANIFEST.json (MB)", "manifest bytes", 1e6, 1),
    ("slice tables (MB)", "table bytes", 1e6, 1),
    ("DCP's `.metadata` (MB)", "metadata bytes", 1e6, 1),
    ("memory of a load, each rank (MB)", "load bytes", 1e6, 1),
)
"""What was measured: its text, its name in the figures, unit, and digits."""
Figures = dict[str, float]


def trees_of(num_ranks: int) -> dict[str, TreePlan]:
    mesh = DeviceMesh("cpu", torch.arange(num_ranks))
    model: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for number in range(NUM_TENSORS):
        name = f"model.layers.{number // 4}.block.weight_{number % 4}"
        shape = SHAPES[number % 4]
        model[name] = _shard(mesh, shape, torch.bfloat16)
        state[f"model.{name}"] = {
            "exp_avg": _shard(mesh, shape, torch.float32),
            "exp_avg_sq": _shard(mesh, shape, torch.float32),
        }
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "params": list(state)}
    nested = {"optimizer": {"state": state, "param_groups": [options]}}
    return {
        "model": TreePlan("model", "model", model, nested=False),
        "optimizer": TreePlan("optimizer", "optim", nested, nested=True),
    }


def _shard(mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype) -> DTensor:
    rows = shape[0] // mesh.size()
    local = torch.empty((rows, *shape[1:]), dtype=dtype)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def be_rank(rank: int, num_ranks: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())


@collector_paused()
def planned(rank: int, num_ranks: int, figures: Figures) -> tuple[SaveSettings, Save]:
    be_rank(rank, num_ranks)
    trees = trees_of(num_ranks)
    ranks = layout.DataParallelRanks(rank, num_ranks)
    run: Any = SimpleNamespace(path=Path(), root=Path())
    settings = SaveSettings(run, ranks, {}, CheckpointOptions())
    save = Save(layout.CheckpointName(20, 0))
    save.trees = trees
    started = time.process_time()
    save.descriptions = {name: tree.describe() for name, tree in trees.items()}
    proposal = Proposal({"rng": digest_of(b""), "loader": digest_of(b"")}, dp_rank=rank)
    for name, description in save.descriptions.items():
        proposal.trees[name] = TreeSummary(description.digest(), description.origins)
    sent = pickle.dumps(proposal)
    proposals = [pickle.loads(sent) for _ in range(num_ranks)]
    shares: dict[str, list[Share]] = {}
    for name in trees:
        of_tree = [proposal.trees[name] for proposal in proposals]
        # Equal digests: no collective is called.
        shares[name] = shares_of_all(None, save.descriptions[name], of_tree)
    Planner(settings).plan(save, proposals, shares)
    figures["plan"] = time.process_time() - started
    figures["sent bytes"] = len(sent)
    return settings, save


def rank_manifests(save: Save, num_ranks: int) -> Iterator[RankManifest]:
    """What each rank writes, without the bytes of the tensors."""
    model, optimizer = save.trees.values()
    files = ShardFiles()
    for rank in range(num_ranks):
        written = RankManifest(rank)
        for tree in (model, optimizer):
            written.trees[tree.name] = tree.layout.rank_tree()
        for job in (*shard_jobs(model, rank, files), *item_jobs(optimizer, rank)):
            _pretend_to_write(job, written)
        for name in ("rng", "dataloader"):
            file = f"{name}/{name}_dp_rank_{rank}.pt"
            written.files[file] = FileRecord(1000, digest_of(file.encode()))
        yield written


def _pretend_to_write(job: FileJob, written: RankManifest) -> None:
    assert job.tree is not None
    end = 0
    for chunk in job.chunks:
        end = max(end, chunk.start + _nbytes(chunk))
        if chunk.entry is not None:
            written.trees[job.tree].add(chunk.entry, digest_of(os.urandom(8)))
    written.files[job.file] = FileRecord(end, digest_of(job.file.encode()))


def _nbytes(chunk: Chunk) -> int:
    if isinstance(chunk.entry, Tensor):
        return chunk.entry.slices[0].nbytes
    data = chunk.data
    return len(data) if isinstance(data, bytes | memoryview) else 0


def measured(num_ranks: int, directory: Path) -> Figures:
    figures: Figures = {}
    settings, save = planned(num_ranks // 2, num_ranks, figures)
    staging = commit.reserve(directory, "epoch_0_step_20")
    save.staging.path = staging
    for tree in save.trees.values():
        (staging / tree.directory).mkdir()
    for written in rank_manifests(save, num_ranks):
        data = written.to_bytes()
        (staging / layout.rank_manifest_file(written.rank)).write_bytes(data)
        figures["rank manifest bytes"] = len(data)
    settings.ranks = layout.DataParallelRanks(0, num_ranks)
    publisher = Publisher(settings)
    partial_manifest = publisher.partial_manifest(save)
    started = time.process_time()
    trees = merge_trees(partial_manifest, read_rank_manifests(staging, num_ranks))
    metadata = publisher.write_metadata(save, trees.__getitem__)
    figures["metadata"] = time.process_time() - started
    figures["metadata bytes"] = sum(record.size for record in metadata.values())
    started = time.process_time()
    finalize(staging, partial_manifest, read_rank_manifests(staging, num_ranks))
    figures["finalize"] = time.process_time() - started
    figures["manifest bytes"] = (staging / layout.MANIFEST).stat().st_size
    tables = list(staging.glob(f"*/{layout.SLICE_TABLE}"))
    figures["table bytes"] = sum(table.stat().st_size for table in tables)
    checkpoint = commit.publish(staging, "epoch_0_step_20")
    # A new process, so that its memory is the load's.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return figures | pool.submit(load, checkpoint, num_ranks).result()


@collector_paused()
def load(checkpoint: Path, num_ranks: int) -> Figures:
    """Find the slices of one rank in a checkpoint; the seconds and the bytes of memory that this takes."""
    torch.set_num_threads(1)
    be_rank(num_ranks // 3, num_ranks)
    trees = trees_of(num_ranks)
    reset_peak()
    before = status_bytes("VmHWM")
    started = time.process_time()
    manifest = Manifest.read(checkpoint)
    found = 0
    for name, tree in trees.items():
        for fqn, value in tree.flat.items():
            if isinstance(value, torch.Tensor):
                box = local_box(value)
                assert box is not None
                stored = list(manifest.trees[name].tensors[fqn].overlapping(box))
                found += len(stored)
                assert stored[0].box == box
                assert stored[0].digest
    seconds = time.process_time() - started
    assert found == 3 * NUM_TENSORS
    return {"load": seconds, "load bytes": status_bytes("VmHWM") - before}


def main() -> None:
    parser = options_of(__doc__, 1)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    for num_ranks in given.ranks:
        with tempfile.TemporaryDirectory(prefix="bench-planner-", dir=given.directory) as directory:
            figures.append(measured(num_ranks, Path(directory)))
        print(num_ranks, figures[-1], flush=True)
    rows = [
        (text, *(f"{each[name] / unit:.{digits}f}" for each in figures))
        for text, name, unit, digits in TABLE
    ]
    block = table(("ranks", *(f"{number:,}" for number in given.ranks)), rows)
    print(block)
    if given.docs:
        write_block("planner", block)


if __name__ == "__main__":
    main()
