"""checkpoint.files_per_node: the ranks of a node write together into few files, and every reader reads them."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM

from automodel_ckpt.checkpoint import Manifest, discover
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
from automodel_ckpt.checkpoint.files import durable_file
from automodel_ckpt.checkpoint.formats.reading import read_tree
from automodel_ckpt.checkpoint.jobs import rank_manifest
from automodel_ckpt.checkpoint.jobs.file_groups import groups_of
from automodel_ckpt.checkpoint.parts import slice_table
from automodel_ckpt.checkpoint.parts.manifest import Tree
from automodel_ckpt.checkpoint.parts.verify import unlisted_files, verify, verify_deep
from automodel_ckpt.checkpoint.remote.push import push_checkpoint
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.sources.shard_header import files_covered_by_slices
from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.convert.formats.torch.run_state import read_run_state
from automodel_ckpt.convert.open import open_weights
from automodel_ckpt.errors import RecipeError, SaveFailed
from tests.distributed.saves.test_checkpointer import PerRank, build, whole_state
from tests.distributed.saves.test_hf_layout import make_base
from tests.support import ranks
from tests.support.models import tiny

ODD = "odd"


def on_nodes(*sizes: int) -> None:
    """Make this rank one of nodes with so many ranks each."""
    rank, node = dist.get_rank(), 0
    while rank >= sizes[node]:
        rank -= sizes[node]
        node += 1
    os.environ |= {"GROUP_RANK": str(node), "LOCAL_WORLD_SIZE": str(sizes[node])}


class Even(torch.nn.Module):
    """A model that tensor parallelism divides."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(6, 8)
        self.first = torch.nn.Linear(8, 4)
        self.second = torch.nn.Linear(4, 8, bias=False)
        # Sharded as the first one: in a file, others are in between.
        self.third = torch.nn.Linear(8, 4, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(torch.tanh(self.first(self.embed(ids))))).square().mean()


def even(strategy: str, seed: int, **more: Any) -> SimpleNamespace:
    """A trained model; ``tp`` combines FSDP2 between nodes of two ranks with tensor parallelism on each."""
    model = Even(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if strategy == "tp":
        shape = (dist.get_world_size() // 2, 2)
        both = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        whole = ColwiseParallel(output_layouts=Replicate())
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel(), "third": whole}
        parallelize_module(model, both["tp"], plan)
        mesh = both["dp"]
    if strategy != "single":
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3])
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(5)).backward()
        optimizer.step()
        schedule.step()
    return SimpleNamespace(model=model, optimizer=optimizer, lr_scheduler=schedule, **more)


class Position(PerRank):
    """The state of a data loader."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": 0, "consumed_samples": 9, "global_batch_size": 4}


def with_rank_state(name: str, strategy: str, seed: int) -> SimpleNamespace:
    rank = dist.get_rank()
    make = even if name.startswith("tp") else build
    made = make(
        strategy,
        seed,
        rng=PerRank("rank_rng", [rank] * (1 + 300 * rank)),
        dataloader=Position("dp_rank", 17),
        odd=tiny.Counter({"rank": rank}),
    )
    made.rng.derive = lambda step: setattr(made.rng, "value", f"derived at {step}")
    return made


SAVES: dict[str, dict[str, Any]] = {
    "fsdp2": {"files_per_node": 1},
    "ddp": {"files_per_node": 1},
    "tp": {"files_per_node": 1},
    "tp alone": {"files_per_node": 4},
    "torch_save": {"files_per_node": 1, "model_save_format": "torch_save"},
    "two": {"files_per_node": 2},
    "async": {"files_per_node": 1, "is_async": True},
    "hf": {"files_per_node": 1, "model_layout": "hf"},
    "table": {"files_per_node": 1},
}
NODES = {"torch_save": (3, 1), "tp": (4,), "tp alone": (4,)}
"""The ranks of each node, where they are not 2 and 2."""


def saved(root: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, options in SAVES.items():
        on_nodes(*NODES.get(name, (2, 2)))
        rank_manifest.MIN_TABLE_ROWS = 0 if name == "table" else slice_table.MIN_TABLE_ROWS
        strategy = name.split()[0]
        made = with_rank_state(name, strategy if strategy in ("ddp", "tp") else "fsdp2", 7)
        saver = tiny.checkpointer(root / name, **options)
        # The second one reuses the plan of the first, with state of other sizes.
        for step in (20, 40):
            made.rng.value = [dist.get_rank()] * (step * (2 + dist.get_rank()))
            saver.save(discover(made), step=step, epoch=0)
        saver.close()
        found[name] = whole_state(made)
    return found


def loaded(root: Path, again: Path | None) -> dict[str, tuple[dict[str, torch.Tensor], list[Any]]]:
    """What the present ranks load; they save it *again*."""
    found = {}
    for name, options in SAVES.items():
        on_nodes(*[1] * dist.get_world_size())
        made = with_rank_state(name, "fsdp2", 99)
        missing = [] if dist.get_world_size() == 4 else [ODD]
        assert tiny.load(root / name, made, allow_missing_state=missing) is not None
        found[name] = whole_state(made), [made.rng.value, made.dataloader.value, made.odd.value]
        if again is not None:
            on_nodes(dist.get_world_size())
            tiny.save(again / name, made, step=60, **options)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("runs")
    return root, ranks.run(saved, 4, root, timeout=120)[0]


def counts_of(checkpoint: Path) -> dict[str, int]:
    """The number of files of each tree that the ranks write."""
    suffixes = (".safetensors", ".distcp", ".pt", ".bin")
    paths = [path for path in checkpoint.rglob("*") if path.suffix in suffixes]
    return dict(Counter(path.parent.name for path in paths if path.parent != checkpoint))


def test_the_ranks_of_a_node_share_files_of_which_every_byte_is_checked(runs: Any) -> None:
    root, _ = runs
    for name in SAVES:
        for step in (20, 40):
            path = root / name / f"epoch_0_step_{step}"
            manifest = Manifest.read(path)
            files_per_node = SAVES[name]["files_per_node"]
            assert manifest.format_version == 3
            assert verify(path, manifest) == [] == verify_deep(path, manifest), name
            assert unlisted_files(path, manifest) == []
            found = counts_of(path)
            num_groups = len(NODES.get(name, (2, 2))) * files_per_node
            assert {each: found[each] for each in ("rng", "dataloader", "odd")} == dict.fromkeys(
                ("rng", "dataloader", "odd"), num_groups
            )
            # One more: the values of the optimizer, in a file of the rank that has them.
            assert found["optim"] == num_groups + (files_per_node == 1), name
            if name == "torch_save":
                assert (path / "optim/__3_0.distcp").exists()
            # The slices of the two tensor parallel ranks are not consecutive: a file for each, with two shards.
            num_model = {"tp": 2, "hf": 1}.get(name, num_groups)
            assert found["model"] == num_model, name
            if name in ("fsdp2", "tp", "table"):
                # An export reads them only once.
                covered = files_covered_by_slices(path, manifest)
                assert covered == {each for each in manifest.files if each.endswith(".safetensors")}


def test_other_numbers_of_ranks_load_them_bit_for_bit(runs: Any, tmp_path: Path) -> None:
    root, expected = runs
    for size, source, again in ((4, root, None), (2, root, tmp_path), (3, tmp_path, None)):
        for rank, results in enumerate(ranks.run(loaded, size, source, again, timeout=120)):
            for name, (state, (rng, dataloader, odd)) in results.items():
                different = [n for n in state if not torch.equal(state[n], expected[name][n])]
                assert different == [], (name, size)
                assert dataloader == 17
                if size == 4:
                    assert (rng, odd) == ([rank] * (40 * (2 + rank)), {"rank": rank}), name
                else:
                    assert rng == f"derived at {40 if size == 2 else 60}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["fsdp2", "tp", "torch_save", "table"])
def test_torch_reads_the_directories_as_they_are(runs: Any, name: str) -> None:
    root, expected = runs
    path = root / name / "LATEST"
    state = {
        f"optimizer.state.model.{fqn}.exp_avg": torch.zeros_like(value)
        for fqn, value in expected[name].items()
        if fqn in ("embed.weight", "first.weight", "first.bias", "second.weight")
    }
    dcp.load(state, checkpoint_id=path / "optim", no_dist=True)
    for key, value in state.items():
        fqn = key.removeprefix("optimizer.state.model.").removesuffix(".exp_avg")
        assert torch.equal(value, expected[name][f"{fqn}/exp_avg"])
    stored = Manifest.read(path).trees["model"].tensors
    model = {fqn: torch.zeros_like(expected[name][fqn]) for fqn in stored}
    if name == "torch_save":
        dcp.load(model, checkpoint_id=path / "model", no_dist=True)
    else:
        reader = HuggingFaceStorageReader(str(path / "model"))
        dcp.load(model, storage_reader=reader, no_dist=True)
    assert all(torch.equal(value, expected[name][fqn]) for fqn, value in model.items())


@pytest.mark.parametrize(
    "name", ["fsdp2", pytest.param("torch_save", marks=pytest.mark.further), "table"]
)
def test_a_flipped_bit_is_found_once_and_named(runs: Any, name: str, tmp_path: Path) -> None:
    root, _ = runs
    path = tmp_path / "copy"
    shutil.copytree(root / name / "epoch_0_step_40", path)
    manifest = Manifest.read(path)
    for tree, named in (
        ("model", "tensor "),
        ("optim", "tensor "),
        ("rng", "value rng/rng_dp_rank_"),
    ):
        files = [path / file for file in manifest.files if file.startswith(f"{tree}/")]
        file = max(files, key=lambda each: each.stat().st_size)
        data = file.read_bytes()
        listed = named_bytes(manifest, file.relative_to(path).as_posix())
        for at in (*range(0, len(data), 257), len(data) - 1):
            file.write_bytes(data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :])
            found = [verify(path, manifest, rank=rank, num_ranks=3) for rank in range(3)]
            ((problem,),) = [problems for problems in found if problems]
            assert str(problem.where) == str(file)
            assert (named in str(problem.value)) == (at in listed), (file, at, problem)
        file.write_bytes(data)


def named_bytes(manifest: Manifest, file: str) -> set[int]:
    """The bytes of a file that belong to slices or values."""
    found: set[int] = set()
    for tree in manifest.trees.values():
        pieces = [piece for tensor in tree.stored for piece in tensor.slices]
        for part in (*pieces, *tree.objects.values()):
            if part.file == file:
                found.update(range(part.start, part.start + part.nbytes))
    return found


@pytest.mark.parametrize("name", ["fsdp2", "torch_save", "table"])
def test_commands_and_stores_read_them(
    runs: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, expected = runs
    path = root / name / "epoch_0_step_40"
    url = f"file://{tmp_path}/store"
    push_checkpoint(RemoteRun(Store(url)), path, tmp_path / "memory")
    assert ckpt(["verify", "--deep", url]) == 0
    for place in (str(path), f"{url}/epoch_0_step_40"):
        capsys.readouterr()
        assert ckpt(["show", "--json", place]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["data_position"]["consumed_samples"] == 9
        assert shown["trees"].keys() == {"model", "optimizer"}
        assert ckpt(["diff", "--json", place, str(root / "ddp/epoch_0_step_40")]) == 0
        assert json.loads(capsys.readouterr().out)["trees"].keys() == {"model", "optimizer"}
    assert ckpt(["archive", str(path), "-o", str(tmp_path / "a.tar.zst")]) == 0
    assert ckpt(["unarchive", str(tmp_path / "a.tar.zst"), "-o", str(tmp_path / "out")]) == 0
    out = tmp_path / "out/epoch_0_step_40"
    assert verify(out, Manifest.read(out)) == []
    output = consolidate(path / "model", tmp_path / "exported", log=lambda _: None).output
    exported = load_file(output / "model-00001-of-00001.safetensors")
    assert {"embed.weight", "first.weight", "second.weight"} <= exported.keys()
    assert all(torch.equal(value, expected[name][fqn]) for fqn, value in exported.items())


def save_llama(base: Path, root: Path) -> torch.Tensor:
    on_nodes(2, 2)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    logits: torch.Tensor = model(torch.arange(40)[None]).logits.detach()
    assets = HFAssets.from_model(model, base_dir=base)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    made = SimpleNamespace(model=model)
    tiny.save(root, made, files_per_node=1, save_consolidated=False, assets={"model": assets})
    return logits


def test_transformers_loads_the_export_of_a_base_in_several_files(tmp_path: Path) -> None:
    make_base(tmp_path / "base", tied=False)
    logits = ranks.run(save_llama, 4, tmp_path / "base", tmp_path / "run")[0]
    model = tmp_path / "run/epoch_0_step_20/model"
    num_files = len(list((tmp_path / "base").glob("*.safetensors")))
    assert num_files > 1 and len(list(model.glob("*.safetensors"))) == 2
    exported = consolidate(model, tmp_path / "out", log=lambda _: None).output
    again = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    names = {path.name for path in exported.glob("*.safetensors")}
    assert len(names) == num_files
    assert (again(torch.arange(40)[None]).logits - logits).abs().max() < 1e-2
    state = again.state_dict()
    stored = open_weights(model.parent).modules["model"]
    for fqn, tensor in stored.tensors.items():
        read = {fqn: torch.empty(tensor.shape)}
        read_tree(stored.root, Tree("", {fqn: tensor}, {}), read)
        assert torch.equal(read[fqn].bfloat16().float(), state[fqn]), fqn


def fails_on_one_rank(root: Path) -> str:
    on_nodes(2, 2)
    made = with_rank_state("fsdp2", "fsdp2", 7)
    write = durable_file.write_all

    def broken(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    saver = tiny.checkpointer(root, files_per_node=1)
    saver.save(discover(made), step=20, epoch=0)
    if dist.get_rank() == 3:
        durable_file.write_all = broken
    with pytest.raises(SaveFailed) as caught:
        saver.save(discover(made), step=40, epoch=0)
    durable_file.write_all = write
    saver.save(discover(made), step=60, epoch=0)
    saver.close()
    return str(caught.value)


def test_what_fails_on_one_rank_of_a_node_fails_on_all(tmp_path: Path) -> None:
    for failure in ranks.run(fails_on_one_rank, 4, tmp_path):
        assert "rank 3" in failure and "ENOSPC" in failure
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["LATEST", "epoch_0_step_20", "epoch_0_step_60"]
    assert verify(tmp_path / "LATEST", Manifest.read(tmp_path / "LATEST")) == []


def dies_while_it_writes(root: Path) -> None:
    on_nodes(2, 2)
    made = with_rank_state("fsdp2", "fsdp2", 7)
    saver = tiny.checkpointer(root, files_per_node=1)
    saver.save(discover(made), step=20, epoch=0)
    if dist.get_rank() == 1:
        durable_file.write_all = lambda *_: os._exit(9)
    saver.save(discover(made), step=40, epoch=0)


def test_a_rank_that_is_killed_in_a_common_file_leaves_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    ended = ranks.outcomes(dies_while_it_writes, 4, tmp_path)
    assert ended[1].exitcode == 9 and not any(outcome.ok for outcome in ended)

    def resumed() -> int:
        made = with_rank_state("fsdp2", "fsdp2", 99)
        found = tiny.load(tmp_path, made)
        assert found is not None and made.odd.value == {"rank": dist.get_rank()}
        return found.step

    assert ranks.run(resumed, 4) == [20] * 4


def test_ranks_of_a_node_are_divided_evenly() -> None:
    assert groups_of(["a"] * 5, 2).groups == ((0, 1, 2), (3, 4))
    assert groups_of(["a"] * 3, 8).groups == ((0,), (1,), (2,))
    # Nodes of different sizes, whose ranks are not neighbors.
    groups = groups_of(["a", "b", "a", "c", "a"], 1)
    assert groups.groups == ((0, 2, 4), (1,), (3,))
    assert groups.of(4) == (0, 2, 4)


def test_files_of_several_ranks_are_not_shared_with_earlier_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"CheckpointOptions\.incremental"):
        tiny.checkpointer(tmp_path, files_per_node=1, incremental=True)


def test_an_export_finds_the_position_in_the_data(runs: Any) -> None:
    root, _ = runs
    run = read_run_state(root / "fsdp2/LATEST")
    assert run is not None and run.steps_in_epoch == 3
