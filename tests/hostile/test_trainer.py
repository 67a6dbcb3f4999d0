"""Checkpoints of transformers' Trainer that an attacker wrote: nothing in them is executed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.cli import ckpt

FIXTURE = Path(__file__).parents[1] / "fixtures" / "trainer" / "checkpoint-5"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("global_step", -1),
        ("global_step", 1.5),
        ("global_step", True),
        ("global_step", 10**30),
        ("epoch", "x"),
        ("epoch", float("inf")),
        ("epoch", -3.0),
        ("train_batch_size", 10**18),
        ("log_history", {"loss": 1}),
        ("log_history", [[["loss"]]]),
    ],
)
def test_absurd_counters_are_rejected_or_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object
) -> None:
    source = shutil.copytree(FIXTURE, tmp_path / "source")
    state = json.loads((source / "trainer_state.json").read_text())
    (source / "trainer_state.json").write_text(json.dumps({**state, key: value}))
    command = ["import", str(source), str(tmp_path / "run"), "--training-state", "--dry-run"]
    assert ckpt.main(command) == (3 if key == "global_step" else 0)
    assert ckpt.main(["ls", str(source)]) == 0
    assert ckpt.main(["show", str(source)]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_links_in_place_of_the_files_are_not_followed(tmp_path: Path, file: str) -> None:
    source = shutil.copytree(FIXTURE, tmp_path / "source")
    (source / file).rename(tmp_path / file)
    (source / file).symlink_to(tmp_path / file)
    command = ["import", str(source), str(tmp_path / "run"), "--training-state", "--dry-run"]
    assert ckpt.main(command) == 3


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
def test_a_truncated_optimizer_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fraction: float
) -> None:
    source = shutil.copytree(FIXTURE, tmp_path / "source")
    content = (source / "optimizer.pt").read_bytes()
    (source / "optimizer.pt").write_bytes(content[: int(len(content) * fraction)])
    assert ckpt.main(["import", str(source), str(tmp_path / "run"), "--training-state"]) == 3
    assert "optimizer.pt" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("epoch_*"))


ADAPTER = FIXTURE.parent / "adapter"
HOSTILE_OPTIONS: dict[str, dict[str, Any]] = {
    # peft would import the module.
    "module": {"megatron_core": "evil", "megatron_config": {"a": 1}},
    "rank": {"r": 1 << 60},
    "negative rank": {"r": -1},
    "text as rank": {"r": "8"},
    # peft would match it with every name, for hours.
    "expression": {"target_modules": "(a|a|aa)*$", "exclude_modules": "(.*)*$"},
    "layers": {"layer_replication": [[0, 1 << 40]]},
    "file": {"eva_config": {"path": "/etc/passwd"}, "init_lora_weights": "eva"},
    "method": {"peft_type": "PREFIX_TUNING"},
    "base": {"base_model_name_or_path": ["a"]},
    "saved": {"modules_to_save": [["a"]]},
    "all saved": {"modules_to_save": ["", "t"]},
    "bias": {"bias": {"a": 1}},
    "task": {"task_type": 5},
}


@pytest.mark.parametrize("name", HOSTILE_OPTIONS)
def test_a_hostile_description_of_an_adapter_does_no_harm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(ADAPTER / "checkpoint-5", tmp_path / "source")
    marker = tmp_path / "executed"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    path = source / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **HOSTILE_OPTIONS[name]}))
    command = ["import", str(source), str(tmp_path / "run"), f"--base={ADAPTER / 'base'}"]
    # The expressions are not used: the names of the tensors state which layers have an adapter.
    assert ckpt.main(command) == (0 if name == "expression" else 3)
    assert not marker.exists()


def test_names_of_an_adapters_tensors_are_not_patterns(tmp_path: Path) -> None:
    source = shutil.copytree(ADAPTER / "checkpoint-5", tmp_path / "source")
    path = source / "adapter_model.safetensors"
    # The same length: the header stays valid.
    content = path.read_bytes().replace(
        b"layers.0.self_attn.q_proj.", b"*ayers.?.*elf_attn.q_proj*"
    )
    assert content != path.read_bytes()
    path.write_bytes(content)
    command = ["import", str(source), str(tmp_path / "run"), f"--base={ADAPTER / 'base'}"]
    assert ckpt.main(command) == 3
    assert not (tmp_path / "run").exists()
