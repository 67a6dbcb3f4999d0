"""model_layout hf: all ranks write the Hugging Face files together, and any layout of ranks loads them."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from automodel_ckpt.checkpoint import HFAssets, Manifest
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from tests.distributed.saves.test_checkpointer import build, whole_state
from tests.support import ranks
from tests.support.checkpoints import is_intact
from tests.support.models import tiny
from tests.support.models.sizes import model_sizes

STRATEGIES = {1: ["single"], 2: ["fsdp2", "ddp", "columns"]}
"""By number of ranks."""


def made_as(strategy: str, seed: int) -> SimpleNamespace:
    """A trained model; in ``columns`` the ranks hold columns of its matrices, which stand in files row by row."""
    if strategy != "columns":
        return build(strategy, seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = build("single", seed)
    for module in made.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 2:
                module.register_parameter(
                    name, torch.nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(1)]))
                )
    made.model.head.weight = made.model.embed.weight
    distribute_module(made.model, mesh)
    state = [dict(entry) for entry in made.optimizer.state.values()]
    made.optimizer = torch.optim.AdamW(made.model.parameters(), lr=0.1)
    made.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(made.optimizer, milestones=[1, 3])
    made.lr_scheduler.last_epoch = 2
    for parameter, entry in zip(made.model.parameters(), state, strict=True):
        moments = {
            k: distribute_tensor(v, mesh, parameter.placements) for k, v in entry.items() if v.dim()
        }
        made.optimizer.state[parameter] = entry | moments
    return made


def saved(root: Path, strategies: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for strategy in strategies:
        made = made_as(strategy, 7)
        tiny.save(root / strategy, made, model_layout="hf")
        found[strategy] = whole_state(made)
    return found


def loaded(root: Path, strategies: list[str]) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """What each of these layouts of ranks makes of what each one saved."""
    results = {}
    for strategy in strategies:
        for saver in [one for group in STRATEGIES.values() for one in group]:
            made = made_as(strategy, 99)
            assert tiny.load(root / saver, made) is not None
            results[strategy, saver] = whole_state(made)
    return results


def test_what_one_layout_of_ranks_saves_every_other_loads_bit_for_bit(tmp_path: Path) -> None:
    expected = {
        n: s
        for size, names in STRATEGIES.items()
        for n, s in ranks.run(saved, size, tmp_path, names)[0].items()
    }
    for strategy, state in expected.items():
        path = tmp_path / strategy / "LATEST"
        manifest = Manifest.read(path)
        assert is_intact(path) and is_intact(path, deep=True)
        assert sorted(p.name for p in (path / "model").iterdir()) == [
            "consolidate.sh",
            "model-00001-of-00001.safetensors",
            "model.safetensors.index.json",
        ]
        found = load_file(path / "model/model-00001-of-00001.safetensors")
        assert "head.weight" not in found
        assert [n for n, value in found.items() if not torch.equal(value, state[n])] == []
        cut = any(
            piece.interleaved
            for tensor in manifest.trees["model"].stored
            for piece in tensor.slices
        )
        assert cut == (strategy == "columns")
    for size, names in STRATEGIES.items():
        for results in ranks.run(loaded, size, tmp_path, names):
            for (strategy, saver), result in results.items():
                state = expected[saver]
                assert [n for n in state if not torch.equal(result[n], state[n])] == [], (
                    strategy,
                    saver,
                )


def make_base(directory: Path, *, tied: bool) -> None:
    """A base model in several files; *tied* it keeps the head beside the embedding all the same, as some do."""
    config = LlamaConfig(
        **model_sizes(vocab=67, hidden=16, inner=24, layers=2, heads=2),
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="5KB")
    if tied:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        name = index["weight_map"]["model.embed_tokens.weight"]
        tensors = load_file(directory / name)
        save_file(
            {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
            directory / name,
            {"format": "pt"},
        )
        index["weight_map"]["lm_head.weight"] = name
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def save_llama(base: Path, root: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    logits: torch.Tensor = model(torch.arange(40)[None]).logits.detach()
    assets = HFAssets.from_model(model, base_dir=base)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    tiny.save(root, SimpleNamespace(model=model), model_layout="hf", assets={"model": assets})
    return logits


def test_damage_is_found_by_every_export(tmp_path: Path) -> None:
    make_base(tmp_path / "base", tied=False)
    ranks.run(save_llama, 2, tmp_path / "base", tmp_path / "run")
    checkpoint = tmp_path / "run/epoch_0_step_20"
    [file, *_] = sorted((checkpoint / "model").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    for target in ("hf", "torch", "dcp"):
        output = tmp_path / target
        words = ["export", str(checkpoint), "--to", target, "--output", str(output)]
        assert main(words) == 3 and not output.exists(), target


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.further)])
def test_transformers_loads_the_model_directory_as_it_is_with_the_same_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool
) -> None:
    make_base(tmp_path / "base", tied=tied)
    logits = ranks.run(save_llama, 2, tmp_path / "base", tmp_path / "run")[0]
    model = tmp_path / "run/epoch_0_step_20/model"
    base = json.loads((tmp_path / "base/model.safetensors.index.json").read_text())["weight_map"]
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    assert (
        len(set(base.values())) > 1 and index.keys() == base.keys() and ("lm_head.weight" in index)
    )
    assert sorted(set(index.values())) == sorted(p.name for p in model.glob("*.safetensors"))
    assert [index[a] == index[b] for a in index for b in index] == [
        base[a] == base[b] for a in index for b in index
    ]
    again = AutoModelForCausalLM.from_pretrained(model)
    assert (
        again.dtype == torch.float32
        and json.loads((model / "config.json").read_text())["dtype"] == "float32"
    )
    assert (again(torch.arange(40)[None]).logits - logits).abs().max() == 0
    manifest = Manifest.read(model.parent)
    assert list(manifest.trees["model"].copies) == (["lm_head.weight"] if tied else [])
    assert is_intact(model.parent)
    cast = ["--cast-dtype", "bf16", "--output", str(tmp_path / "cast")]
    assert main(["consolidate", str(model), *cast]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "cast").dtype == torch.bfloat16
    script = [str(model / "consolidate.sh")]
    for command, status in (
        (["bash", *script], 0),
        (["env", "CAST_DTYPE=bf16", "bash", *script], 1),
    ):
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == status and ended.stdout == ("" if status else f"{model}\n"), (
            ended.stderr
        )
    capsys.readouterr()
    assert main(["consolidate", str(model)]) == 0
    printed = capsys.readouterr()
    assert "nothing to do" in printed.err and printed.out == f"{model}\n"
    assert not (model / "consolidated").exists()


def test_a_damaged_file_is_refused_with_its_tensor_and_torch_save_is_no_format_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiny.recipe()
    path = tiny.save(tmp_path, made, model_layout="hf").path
    file = path / "model/model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    export = ["consolidate", str(path)]
    with pytest.raises(CheckpointUnusable, match=r"tensor mask \(slice at \[0\]\)"):
        tiny.load(tmp_path, made)
    assert main(export) == 3
    assert "tensor mask (slice at [0])" in capsys.readouterr().err
    file.unlink()
    assert main(export) == 3
    assert "cannot be read" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="always written as safetensors"):
        tiny.checkpointer(tmp_path, model_layout="hf", model_save_format="torch_save")
