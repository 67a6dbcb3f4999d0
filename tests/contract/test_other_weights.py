"""Weights of other programs: what each command says of those that it cannot read, and what it reads."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from automodel_ckpt.cli.ckpt import main as ckpt_main
from automodel_ckpt.cli.train import main as train_main
from tests.support.models.stand_ins import LLAMA_CHAT, write_model

OTHERS = {
    "model.pt2": "torch.export",
    "model.keras": "Keras",
    "flax_model.msgpack": "Flax",
    "tf_model.h5": "TensorFlow weights of transformers",
    "saved_model.pb": "SavedModel",
    "0/_CHECKPOINT_METADATA": "Orbax",
    "script.pt": "TorchScript",
    "script.pth": "TorchScript",
    "pytorch_model.bin": "TorchScript",
    "flax_model.msgpack.index.json": "Flax",
    "tf_model.h5.index.json": "TensorFlow weights of transformers",
    "params/manifest.ocdbt": "Orbax",
    "100/params/manifest.ocdbt": "Orbax",
    "adapters.safetensors": "adapter of MLX",
}


@pytest.mark.parametrize("name", OTHERS)
def test_weights_of_other_programs_are_named_by_each_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    base = tmp_path / "base"
    write_model(base, {"model_type": "llama"}, LLAMA_CHAT)
    for weights in base.glob("*.safetensors*"):
        weights.unlink()
    (base / name).parent.mkdir(exist_ok=True, parents=True)
    (base / name).write_bytes(b"weights")
    # Files of the same weights in parts, and of an adapter.
    if name.endswith(".index.json"):
        part = name.removesuffix(".index.json").replace("_model.", "_model-00001-of-00001.")
        (base / part).write_bytes(b"weights")
    if name == "adapters.safetensors":
        (base / "adapter_config.json").write_text('{"fine_tune_type": "lora"}')
        for file in (name, f"0000100_{name}"):
            save_file({"w.lora_a": torch.ones(2)}, base / file)
    if name.endswith((".pt", ".pth", ".bin")):
        with zipfile.ZipFile(base / name, "w") as archive:
            archive.writestr("model/code/__torch__.py", "")
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c"}\n')
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{from_pretrained: {base}}}\n"
        f"dataset: {{_target_: automodel_ckpt.data.text.text, path: {tmp_path}/rows.jsonl, seq_length: 8}}\n"
        f"checkpoint: {{checkpoint_dir: {tmp_path}/run}}\n"
    )
    assert ckpt_main(["import", str(base), str(tmp_path / "out")]) == 3
    assert ckpt_main(["show", str(base)]) == 3
    assert train_main([str(tmp_path / "recipe.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.count(OTHERS[name]) == 3


def test_a_pipe_among_the_files_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    os.mkfifo(tmp_path / "files" / "model.pt")
    command = [sys.executable, "-m", "automodel_ckpt.cli.ckpt", "show", "files"]
    assert subprocess.run(command, cwd=tmp_path, timeout=60, check=False).returncode == 3


def test_headers_without_metadata_are_read_as_mlx_writes_them(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": None, "w": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert ckpt_main(["import", str(tmp_path), str(tmp_path / "out")]) == 0
    assert ckpt_main(["verify", "--deep", str(tmp_path / "out")]) == 0


def test_checkpoints_of_another_program_in_the_run_directory_are_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    write_model(base, {"model_type": "llama"}, LLAMA_CHAT)
    model = tmp_path / "run" / "epoch_0_step_5" / "model"
    model.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, model / "model.safetensors")
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c"}\n')
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{from_pretrained: {base}}}\n"
        "dataset: {_target_: automodel_ckpt.data.text.text, seq_length: 8}\n"
        f"checkpoint: {{checkpoint_dir: {tmp_path}/run, restore_from: epoch_0_step_5}}\n"
        "step_scheduler: {max_steps: 1}\n"
    )
    words = [str(tmp_path / "recipe.yaml"), f"--dataset.path={tmp_path}/rows.jsonl"]
    assert train_main(words) == 3
    error = capsys.readouterr().err
    assert "ckpt import" in error


def small_recipe(directory: Path) -> list[str]:
    """Write a base and a recipe of one step, and return the arguments of ckpt-train."""
    write_model(directory / "base", {"model_type": "llama"}, LLAMA_CHAT)
    (directory / "rows.jsonl").write_text('{"text": "a b c"}\n')
    (directory / "recipe.yaml").write_text(
        f"model: {{from_pretrained: {directory}/base}}\n"
        "dataset: {_target_: automodel_ckpt.data.text.text, seq_length: 8}\n"
        f"checkpoint: {{checkpoint_dir: {directory}/run}}\n"
        "step_scheduler: {max_steps: 1, global_batch_size: 1, local_batch_size: 1}\n"
    )
    return [str(directory / "recipe.yaml"), f"--dataset.path={directory}/rows.jsonl"]


def packed(directory: Path) -> list[str]:
    """Replace the matrices of the layers by packed ones, as GPTQ stores them; return their names."""
    names = []
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            names.append(name)
            rows, columns = tensors.pop(name).shape
            stem = name.removesuffix("weight")
            tensors[f"{stem}qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
            tensors[f"{stem}scales"] = torch.ones(1, rows)
        save_file(tensors, path, metadata={"format": "pt"})
    return names


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("trainer", "transformers Trainer"),
        ("lightning", "PyTorch Lightning"),
        ("deepspeed", "DeepSpeed"),
    ],
)
def test_a_new_run_in_the_directory_of_another_program_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, program: str
) -> None:
    words = small_recipe(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    if kind == "trainer":
        shutil.copytree(tmp_path / "base", run / "checkpoint-5")
        (run / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5}')
    elif kind == "lightning":
        state = {"pytorch-lightning_version": "2.6", "state_dict": {"w": torch.ones(2)}}
        torch.save(state, run / "epoch=0-step=5.ckpt")
    else:
        (run / "latest").write_text("global_step5")
        (run / "global_step5").mkdir()
        torch.save(
            {"module": {"w": torch.ones(2)}}, run / "global_step5/mp_rank_00_model_states.pt"
        )
    assert train_main(words) == 0
    text = capsys.readouterr().err
    assert f"checkpoint of another program ({program}" in text and "ckpt import" in text
    assert train_main(words) == 0
    assert "another program" not in capsys.readouterr().err
