"""Checkpoints of TensorFlow are read without TensorFlow, which wrote the files in tests/fixtures/tensorflow.

``expected.npz`` there has the values of all variables as TensorFlow's own reader returns them.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from automodel_ckpt.cli import ckpt
from tests.support.external_tensors import described, error_of, values

FIXTURES = Path(__file__).parents[3] / "fixtures" / "tensorflow"
NOT_WEIGHTS = {"global_step", "save_counter", "bert/encoder/layer_0/kernel/adam_m"}
Capture = pytest.CaptureFixture[str]


def expected_weights(name: str) -> dict[str, np.ndarray]:
    found = {}
    with np.load(FIXTURES / name / "expected.npz") as file:
        for variable, value in file.items():
            if variable not in NOT_WEIGHTS and not variable.startswith("optimizer/"):
                found[variable] = value
    return found


def array(value: torch.Tensor) -> np.ndarray:
    if value.dtype == torch.bfloat16:
        value = value.view(torch.uint16)
    return value.numpy()


def copied(name: str, directory: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, directory / name))


@pytest.mark.parametrize("name", ["objects", "saver"])
def test_the_variables_equal_those_that_tensorflow_reads(name: str) -> None:
    found = values(FIXTURES / name)
    expected = expected_weights(name)
    assert found.keys() == expected.keys()
    for variable, value in expected.items():
        assert np.array_equal(array(found[variable]), value), variable
        assert found[variable].shape == value.shape


def test_a_directory_means_its_newest_checkpoint_and_an_index_file_its_own(tmp_path: Path) -> None:
    newest = values(FIXTURES / "objects")
    older = values(FIXTURES / "objects" / "ckpt-1.index")
    assert torch.equal(
        newest["model/kernel"], values(FIXTURES / "objects" / "ckpt-2.index")["model/kernel"]
    )
    assert not torch.equal(newest["model/kernel"], older["model/kernel"])
    directory = copied("objects", tmp_path)
    (directory / "checkpoint").unlink()
    assert "several checkpoints" in error_of(directory)


def test_import_reports_the_variables_of_the_optimizer(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    assert ckpt.main(["import", str(FIXTURES / "objects"), str(run)]) == 0
    text = capsys.readouterr().out
    assert "7 tensors" in text and "1 value" in text
    assert values(run / "epoch_0_step_0").keys() == {"model/kernel", "model/bias"}


def test_names_are_mapped_by_a_file(tmp_path: Path, capsys: Capture) -> None:
    names = tmp_path / "names.yaml"
    names.write_text(
        '"bert/encoder/layer_{i}/attention/self/query/kernel": layers.{i}.q.weight\n'
        "scalar: factor\n"
        "typed/bool:\n"
    )
    run = tmp_path / "run"
    source = str(FIXTURES / "saver")
    assert ckpt.main(["import", source, str(run), "--names", str(names)]) == 0
    assert "1 tensor that names.yaml leaves out" in capsys.readouterr().out
    found, expected = values(run / "epoch_0_step_0"), expected_weights("saver")
    assert found["factor"].item() == 2.5 and "typed/bool" not in found and "empty" in found
    for number in range(40):
        stored = expected[f"bert/encoder/layer_{number}/attention/self/query/kernel"]
        assert np.array_equal(array(found[f"layers.{number}.q.weight"]), stored)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unknown: x\n", "no tensor has the name 'unknown'"),
        ("scalar: empty\n", "two tensors get the name 'empty'"),
        ("scalar: a.{i}\n", "only in the new name"),
        ("- scalar\n", "not a mapping"),
        ("scalar: [1]\n", "is not text"),
    ],
)
def test_a_wrong_file_of_names_is_an_error(
    text: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    names = tmp_path / "names.yaml"
    names.write_text(text)
    command = ["import", str(FIXTURES / "saver"), str(tmp_path / "run"), "--names", str(names)]
    assert ckpt.main(command) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_other_commands_accept_a_checkpoint_of_tensorflow(tmp_path: Path, capsys: Capture) -> None:
    source = FIXTURES / "objects"
    assert ckpt.main(["show", str(source), "--stats"]) == 0
    assert "optimizer/_iterations" in capsys.readouterr().out
    assert ckpt.main(["export", str(source), "-o", str(tmp_path / "out")]) == 0
    assert values(tmp_path / "out").keys() == described(source).tensors.keys()


def test_a_partitioned_variable_is_an_error_that_names_it() -> None:
    message = error_of(FIXTURES / "partitioned")
    assert "partitioned" in message and "table" in message


def test_missing_truncated_and_linked_data_files_are_errors(tmp_path: Path) -> None:
    directory = copied("saver", tmp_path)
    second = directory / "model.ckpt.data-00001-of-00002"
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    assert "truncated" in error_of(directory)
    second.unlink()
    assert second.name in error_of(directory)
    (tmp_path / "elsewhere").write_bytes(content)
    second.symlink_to(tmp_path / "elsewhere")
    assert "not a regular file" in error_of(directory)


def test_a_changed_byte_of_an_index_is_an_error(tmp_path: Path) -> None:
    directory = copied("objects", tmp_path)
    index = directory / "ckpt-2.index"
    content = index.read_bytes()
    # Without the footer, whose magic number identifies the format.
    for position in range(0, len(content) - 48, 7):
        changed = bytearray(content)
        changed[position] ^= 0x41
        index.write_bytes(changed)
        assert "cannot be read" in error_of(index), position
