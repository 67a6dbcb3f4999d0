"""`ckpt import` makes complete checkpoints of what other programs saved, and says what it leaves out."""

import json
import os
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from automodel_ckpt.checkpoint import discover
from automodel_ckpt.cli.ckpt import main
from tests.support.models import tiny
from tests.support.models.shards import bits, checkpoint_in

Capture = pytest.CaptureFixture[str]
AUTOMODEL = Path(__file__).parents[2] / "fixtures" / "automodel"
Tensors = dict[str, torch.Tensor]


def imported(capsys: Capture, source: Path, run: Path, *more: str) -> Any:
    assert main(["import", str(source), str(run), "--json", *more]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: Capture, source: Path, run: Path, *more: str) -> str:
    code = main(["import", str(source), str(run), *more])
    assert code in (2, 3), code
    return capsys.readouterr().err


def stored(checkpoint: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted((checkpoint / "model").glob("*.safetensors")):
        found |= load_file(path)
    return found


def weights() -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {
        "model.embed_tokens.weight": torch.randn(7, 4, generator=generator).to(torch.bfloat16),
        "model.norm.weight": torch.randn(4, generator=generator),
        "model.empty": torch.empty(0, 3),
        "model.scalar": torch.tensor(3),
        "model.small": torch.ones(5).to(torch.float8_e4m3fn),
    }


def hugging_face(path: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    path.mkdir(parents=True)
    names = list(tensors)
    files = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, path / file, {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: file for file, held in files.items() for name in held},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "dtype": "bfloat16", **(config or {})})
    )
    (path / "tokenizer.json").write_text("{}")
    (path / "notes.md").write_text("not needed")
    return path


def plain_dcp(path: Path, tensors: Tensors) -> Path:
    warnings.simplefilter("ignore")  # of torch, which asks whether one process is meant
    dcp.save(
        {"model": tensors, "optim": {"lr": 0.5, "moment": torch.ones(3)}},
        checkpoint_id=path,
        no_dist=True,
    )
    return path


@pytest.mark.parametrize("make", [hugging_face, plain_dcp])
def test_weights_of_every_dtype_come_over_bit_by_bit_into_a_complete_checkpoint(
    tmp_path: Path, capsys: Capture, make: Callable[[Path, Tensors], Path]
) -> None:
    tensors = weights()
    document = imported(capsys, make(tmp_path / "source", tensors), tmp_path / "run")
    path = tmp_path / "run" / "epoch_0_step_0"
    assert document["checkpoint"] == str(path) and document["num_tensors"] == len(tensors)
    assert os.readlink(tmp_path / "run" / "LATEST") == path.name
    found = stored(path)
    assert found.keys() == tensors.keys()
    assert all(
        found[name].dtype == t.dtype and (bits(found[name]) == bits(t)).all()
        for name, t in tensors.items()
    )
    assert main(["verify", "--deep", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("form", ["safetensors", "torch_save"])
def test_a_checkpoint_of_automodel_comes_over(tmp_path: Path, capsys: Capture, form: str) -> None:
    source = AUTOMODEL / form / "epoch_0_step_1"
    document = imported(capsys, source, tmp_path / "run", "--step", "1")
    path = tmp_path / "run" / "epoch_0_step_1"
    expected = load_file(AUTOMODEL / "expected.safetensors")
    found = stored(path)
    assert found.keys() == expected.keys() and all(
        torch.equal(found[n], t) for n, t in expected.items()
    )
    assert json.loads((path / "losses.json").read_text()) == {
        "step": 1,
        "epoch": 0,
        "train_loss": 1.25,
        "val_loss": 1.5,
    }
    assert (path / "config.yaml").read_text() == (source / "config.yaml").read_text()
    if form == "safetensors":
        assert document["left_out"] == ["optim: PyTorch DCP"] and document["has_config"]
        config = json.loads((path / "model" / "config.json").read_text())
        assert config["model_type"] == "llama" and config["dtype"] == "float32"


def test_side_files_come_with_it_and_nothing_else(tmp_path: Path, capsys: Capture) -> None:
    imported(capsys, hugging_face(tmp_path / "source", weights()), tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run" / "epoch_0_step_0" / "model").iterdir())
    assert names == [
        "config.json",
        "consolidate.sh",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


def test_a_model_in_the_hubs_cache_is_read_through_its_links_and_others_are_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    real = hugging_face(tmp_path / "real", weights())
    hub = tmp_path / "models--a--b"
    (hub / "snapshots" / "abc").mkdir(parents=True)
    shutil.copytree(real, hub / "blobs")
    for name in os.listdir(real):
        (hub / "snapshots" / "abc" / name).symlink_to(f"../../blobs/{name}")
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        (tmp_path / "elsewhere" / name).symlink_to(real / name)
    snapshot, run = hub / "snapshots" / "abc", tmp_path / "run"
    assert imported(capsys, snapshot, run)["num_tensors"] == 5
    assert "symbolic link points outside" in refused(
        capsys, tmp_path / "elsewhere", tmp_path / "other"
    )
    # The other commands read it, too.
    assert main(["show", str(snapshot)]) == 0
    text = capsys.readouterr().out
    assert "5 tensors" in text and text.count(" 14 B") == 0
    assert main(["diff", str(snapshot), str(run)]) == 0
    assert "5 equal" in capsys.readouterr().out
    exported = tmp_path / "model.pt"
    assert main(["export", str(snapshot), "--to", "torch", "-o", str(exported)]) == 0
    assert len(torch.load(exported, weights_only=True)) == 5
    assert main(["diff", str(tmp_path / "elsewhere"), str(run)]) == 3
    assert "symbolic link points outside" in capsys.readouterr().err


def adapter(path: Path) -> Path:
    path.mkdir()
    save_file({"lora_A": torch.ones(2, 2)}, path / "adapter_model.safetensors")
    return path


def pickled(path: Path) -> Path:
    path.mkdir()
    torch.save({"w": torch.ones(2)}, path / "consolidated.00.pth")
    return path


def taken(path: Path) -> Path:
    checkpoint_in(path.parent / "run", 0)
    return hugging_face(path, weights())


def config_link(path: Path) -> Path:
    hugging_face(path, weights())
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("/etc/hostname")
    return path


def hub_model(path: Path) -> Path:
    (path / "blobs").mkdir(parents=True)
    (path / "snapshots" / "abc").mkdir(parents=True)
    return path


def gguf_directory(path: Path) -> Path:
    path.mkdir()
    (path / "model.gguf").touch()
    return path


def old_adapter(path: Path) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    # Before PyTorch 1.6.
    torch.save({}, path / "adapter_model.bin", _use_new_zipfile_serialization=False)
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: checkpoint_in(path, 20).parent, "already a checkpoint or a run"),
        (adapter, "the adapter has no description"),
        (pickled, "name the file"),
        (hub_model, "it contains blobs, snapshots: name the file or the directory"),
        (gguf_directory, "it contains model.gguf: name the file"),
        (old_adapter, "of an old version of peft"),
        (lambda path: path, "relative paths start at the working directory"),
        (taken, "already"),
        (config_link, "symbolic link points outside"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_the_reason(
    tmp_path: Path, capsys: Capture, make: Callable[[Path], Path], said: str
) -> None:
    assert said in refused(capsys, make(tmp_path / "source"), tmp_path / "run")
    assert not any(path.name.startswith(".epoch") for path in (tmp_path / "run").glob("*"))


def megatron(path: Path) -> Path:
    path.mkdir()
    (path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    for name in (".metadata", "__0_0.distcp"):
        (path / name).write_bytes(b"x")
    torch.save({"args": 1}, path / "common.pt")
    return path


def optimizer_file(path: Path) -> None:
    torch.save({"state": {}, "param_groups": []}, path)


def old_torch_file(path: Path) -> None:
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def nemo_file(path: Path) -> None:
    (path.parent / "model_config.yaml").write_text("x: 1")
    with tarfile.open(path, "w") as archive:
        archive.add(path.parent / "model_config.yaml", "model_config.yaml")


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("optimizer.pt", optimizer_file, "the state of an optimizer"),
        ("m.pth", old_torch_file, "a pickle"),
        ("m.nemo", nemo_file, ".nemo"),
        ("m.gguf", lambda path: path.write_bytes(b"GGUF" + bytes(20)), "this GGUF file"),
        ("m.npz", lambda path: np.savez(path, w=np.ones(2)), "NumPy"),
        ("empty.pt", lambda path: path.write_bytes(b""), "unknown"),
        ("m.safetensors", lambda path: path.write_bytes(b"\x05"), "too few for a header"),
        ("p.safetensors", lambda path: path.write_text(LFS_POINTER), "git lfs pull"),
    ],
)
def test_a_single_file_is_refused_by_the_name_of_its_format(
    tmp_path: Path, capsys: Capture, name: str, write: Callable[[Path], object], said: str
) -> None:
    write(tmp_path / name)
    assert said in refused(capsys, tmp_path / name, tmp_path / "run")
    assert main(["consolidate", str(tmp_path / name), "-o", str(tmp_path / "export")]) == 3
    assert said in capsys.readouterr().err


def test_weights_do_not_become_the_newest_checkpoint_of_a_run_that_trains(
    tmp_path: Path, capsys: Capture
) -> None:
    made = tiny.recipe()
    tiny.save(tmp_path / "run", made, step=20, losses={}, validated=False)
    source = hugging_face(tmp_path / "source", weights())
    assert main(["import", str(source), str(tmp_path / "run"), "--step", "30"]) == 3
    assert "weights without an optimizer would become the newest" in capsys.readouterr().err
    killed = tmp_path / "run" / f".epoch_0_step_0.staging-{'0' * 32}"
    killed.mkdir()  # an import that was killed
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    # The directory of the run means its newest checkpoint.
    assert f"--init_from.path {tmp_path}/run/epoch_0_step_0\n" in capsys.readouterr().out
    assert os.readlink(tmp_path / "run" / "LATEST") == "epoch_0_step_20" and not killed.exists()


def test_a_negative_step_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert "--step" in refused(capsys, tmp_path, tmp_path / "run", "--step", "-1")


def test_a_recipe_resumes_from_it_when_told_what_it_lacks(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    recipe = SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), steps=tiny.Counter(3)
    )
    save_file(
        {name: t.clone() for name, t in recipe.model.state_dict().items()},
        _made(tmp_path) / "m.safetensors",
    )
    assert main(["import", str(tmp_path / "source"), str(tmp_path / "run")]) == 0
    before = recipe.model.weight.detach().clone()
    with torch.no_grad():
        recipe.model.weight.zero_()
    names = [name for name in discover(recipe) if name != "model"]
    checkpointer = tiny.checkpointer(tmp_path / "run", allow_missing_state=names)
    resumed = checkpointer.load(discover(recipe))
    checkpointer.close()
    assert resumed is not None and resumed.step == 0 and torch.equal(recipe.model.weight, before)


def test_only_the_weights_of_deepspeed_and_accelerate_are_imported(
    tmp_path: Path, capsys: Capture
) -> None:
    fixtures = Path(__file__).parents[2] / "fixtures"
    for name in ("deepspeed/stage3-float32", "fsdp/fsdp2-sharded", "fsdp/fsdp2-full"):
        command = ["import", str(fixtures / name), str(tmp_path / "run")]
        assert main([*command, "--dry-run"]) == 0
        assert "not imported: only the weights of" in capsys.readouterr().out
        assert main([*command, "--training-state"]) == 3
        assert "only the weights of" in capsys.readouterr().err


def _made(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.mark.parametrize(
    ("source", "step"),
    [
        # The recipe's step scheduler counts finished steps; AutoModel's name is that of the last one, from 0.
        ("automodel/run/epoch_0_step_4", 5),
        ("deepspeed/stage3-float32", 3),
        ("fsdp/torch-flattened", 5),
        ("fsdp/torch-nested", 5),
        ("megatron/llama", 20),
    ],
)
def test_the_step_is_that_of_the_other_programs_counters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, step: int
) -> None:
    # The name of the directory states another step.
    copy = tmp_path / "step-70"
    shutil.copytree(Path(__file__).parents[2] / "fixtures" / source, copy)
    command = ["import", str(copy), str(tmp_path / "run"), "--dry-run", "--json"]
    if source.startswith("megatron"):
        command += ["--config", str(copy / "expected")]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["position_from"]) == (step, "stated in the files")
    assert main(["ls", str(copy), "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [step]
