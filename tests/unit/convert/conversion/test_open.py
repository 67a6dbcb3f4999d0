"""Weights to start from: found in every form they lie in, and read into modules, whole or by rows."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.state.fill_modules import Filling, fill_module, module_shapes
from automodel_ckpt.convert.open import open_base, open_weights
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models import tiny


def hugging_face(directory: Path, *, rows: int = 6) -> dict[str, torch.Tensor]:
    """Two files with an index, as the Hub's cache has them: links to blobs."""
    directory.mkdir(parents=True)
    tensors = {
        "embed.weight": torch.randn(rows, 4),
        "head.weight": torch.randn(rows, 4).to(torch.bfloat16),
    }
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, directory.parent / f"blob{number}")
        (directory / f"model-{number}.safetensors").symlink_to(f"../blob{number}")
        weight_map[name] = f"model-{number}.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_the_file_that_transformers_reads_is_read_and_others_are_reported(tmp_path: Path) -> None:
    hugging_face(tmp_path / "model")
    # An earlier model's index, files with the same names, and files with other names for the same weights.
    save_file({"embed.weight": torch.ones(2)}, tmp_path / "model" / "model.safetensors")
    save_file(
        {"tok_embeddings.weight": torch.ones(2)}, tmp_path / "model" / "consolidated.safetensors"
    )
    opened = open_weights(tmp_path / "model")
    assert {name: each.shape for name, each in opened.modules["model"].tensors.items()} == {
        "embed.weight": (2,)
    }
    (omitted,) = opened.omitted
    assert omitted.startswith("consolidated.safetensors, model-0") and "beside" in omitted


def test_shards_of_pytorch_with_an_index_are_shards(tmp_path: Path) -> None:
    """``dcp.save(storage_writer=HuggingFaceStorageWriter(path))`` of torch 2.13 writes the index, too."""
    info = json.dumps({"embed.weight": {"saved_offsets": [0, 0]}})
    metadata = {"DCP_SHARDING_INFO": info, "format": "pt", "DCP_VERSION": "1.0"}
    name = "model-00001-of-00001.safetensors"
    save_file({"embed.weight": torch.ones(2, 3)}, tmp_path / name, metadata)
    index = json.dumps({"weight_map": {"embed.weight": name}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert open_weights(tmp_path).modules["model"].tensors["embed.weight"].shape == (2, 3)


@pytest.mark.parametrize(
    "kind", ["adapter", "weights", "self_attn.unembed_out", "mlp.switch_mlp.up_proj"]
)
def test_what_only_mlx_reads_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    if kind == "adapter":
        save_file({"q_proj.lora_a": torch.ones(2, 2)}, tmp_path / "adapters.safetensors")
        (tmp_path / "adapter_config.json").write_text("{}")
    elif kind in ("self_attn.unembed_out", "mlp.switch_mlp.up_proj"):
        name = f"model.layers.0.{kind}.weight"
        save_file({name: torch.ones(2, 2, 2)}, tmp_path / "model.safetensors")
    else:
        packed = {"q.weight": torch.zeros(4, 2, dtype=torch.uint32)}
        packed |= {f"q.{each}": torch.ones(4, 1) for each in ("scales", "biases")}
        save_file(packed, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointUnusable, match="MLX"):
        open_weights(tmp_path)


class Net(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        self.head = nn.Linear(4, rows, bias=False)


def fillings(source: Tensors, *, resized: bool = False) -> dict[str, Filling]:
    return {name: Filling(source, name, resized) for name in source.tensors}


FOREIGN = {
    "model_world_size_2_rank_1.pt": "verl",
    "_CHECKPOINT_METADATA": "Orbax",
    "lit_model.pth": "LitGPT",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_directories_that_cannot_be_read_are_named_with_a_way_to_convert_them(
    tmp_path: Path, name: str
) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CheckpointUnusable, match=FOREIGN[name]) as caught:
        open_weights(tmp_path)
    assert caught.value.problems[0].hint
    if FOREIGN[name] == "verl":
        # Its tensors are those of one rank.
        with pytest.raises(CheckpointUnusable, match="verl"):
            open_weights(tmp_path / name)


@pytest.mark.parametrize("model_save_format", ["safetensors", "torch_save"])
def test_each_way_to_name_a_checkpoint_gives_its_newest_weights(
    tmp_path: Path, model_save_format: Any
) -> None:
    made = tiny.recipe(seed=3, head=nn.Linear(2, 2))
    root = tmp_path / "run"
    tiny.save(root, tiny.recipe(seed=1), step=10, model_save_format=model_save_format)
    tiny.save(root, made, step=20, model_save_format=model_save_format)
    newest = root / "epoch_0_step_20"
    for path in (root, root / "LATEST", newest, newest / "model"):
        weights = open_weights(path)
        assert weights.checkpoint == newest
        weights.verify("digest", 0, 1)
        fresh = tiny.recipe(seed=9).model
        shapes, tied = module_shapes(fresh)
        assert shapes.keys() == weights.modules["model"].tensors.keys()
        assert dict(weights.modules["model"].tied) == tied
        fill_module(fresh, fillings(weights.modules["model"]), "mean")
        for name, value in made.model.state_dict().items():
            assert torch.equal(fresh.state_dict()[name], value), name
    assert open_weights(root).modules.keys() == {"model", "head"}
    # A model in whose directory a run has its checkpoints.
    base = {"head.weight": torch.ones(2, 2)}
    save_file(base, root / "model.safetensors")
    assert open_base(root).modules["model"].tensors.keys() == base.keys()


def test_linked_files_with_an_index_are_read_and_cast(tmp_path: Path) -> None:
    tensors = hugging_face(tmp_path / "hub" / "snapshot")
    weights = open_weights(tmp_path / "hub" / "snapshot")
    net = Net(6)
    fill_module(net, fillings(weights.modules["model"]), "mean")
    assert torch.equal(net.embed.weight, tensors["embed.weight"])
    assert torch.equal(net.head.weight, tensors["head.weight"].float())


def test_what_holds_no_weights_is_refused_with_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "missing").mkdir()
    (tmp_path / "broken/model.safetensors.index.json").write_text("[1]")
    (tmp_path / "elsewhere/model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../x.safetensors"}}'
    )
    (tmp_path / "missing/model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "x.safetensors"}}'
    )
    (tmp_path / "twice").mkdir()
    for name in ("a", "b"):
        save_file({"w": torch.ones(1)}, tmp_path / f"twice/{name}.safetensors")
    tiny.save(tmp_path / "whole", tiny.recipe())
    made = SimpleNamespace(counter=tiny.Counter())
    tiny.save(tmp_path / "run", made)
    for name, what in (
        ("nowhere", "no such directory"),
        ("empty", "there are no shards here"),
        ("broken", "the index of the weights has no weight_map of file names"),
        ("elsewhere", "the index names a file outside of its directory"),
        ("missing", "a file of weights is missing"),
        ("twice", "two files hold the tensor 'w'"),
        ("run", "this checkpoint holds no module"),
        ("whole/epoch_0_step_20/optim", "this checkpoint has no such model"),
    ):
        with pytest.raises(CheckpointUnusable, match=what):
            open_weights(tmp_path / name)
