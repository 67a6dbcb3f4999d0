"""`ckpt average` combines checkpoints; float64 references in torch are written out here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from automodel_ckpt.cli.ckpt import main
from tests.support.checkpoints import manifest_of
from tests.support.external_tensors import values
from tests.support.models.shards import checkpoint_in, cut, write_checkpoint

Capture = pytest.CaptureFixture[str]
Tensors = dict[str, torch.Tensor]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def weights(seed: int, scale: float = 1.0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    return {
        "embed.weight": random(700, 501),  # more elements than a block
        "layer.weight": random(33, 7).to(torch.bfloat16),
        "half": random(5, 3).to(torch.float16),
        "wide": random(4).double(),
        "scalar": random(1).reshape(()),
        "empty": torch.empty(0, 3),
        "ids": torch.tensor([3, 4]),
        "mask": torch.tensor([True, False]),
    }


def save(path: Path, tensors: Tensors) -> Path:
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "name": path.name}))
    (path / "tokenizer.json").write_text(f'"{path.name}"')
    return path


def models(tmp_path: Path, count: int) -> tuple[list[str], list[Tensors]]:
    """*count* models near a base model: their paths and tensors."""
    base = weights(0)
    tensors = []
    for number in range(count):
        moved = dict(base)
        for name, change in weights(number + 1, 0.1).items():
            if change.is_floating_point():
                moved[name] = (base[name].double() + change.double()).to(change.dtype)
        tensors.append(moved)
    paths = [str(save(tmp_path / f"m{number}", held)) for number, held in enumerate(tensors)]
    return paths, tensors


def averaged(tmp_path: Path, *arguments: str) -> Tensors:
    run = tmp_path / "out"
    assert main(["average", *arguments, "-o", str(run)]) == 0
    (checkpoint,) = run.glob("epoch_*")
    assert main(["verify", "--deep", str(run)]) == 0
    found: Tensors = {}
    for path in sorted((checkpoint / "model").glob("*.safetensors")):
        found |= load_file(path)
    return found


def rejected(capsys: Capture, *arguments: str) -> str:
    assert main(["average", *arguments]) in (2, 3)
    return capsys.readouterr().err


def assert_close(found: Tensors, expected: Tensors) -> None:
    """Compare with *expected* in float64, to the precision of each tensor's dtype."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        reference = expected[name]
        if not tensor.is_floating_point():
            assert torch.equal(tensor, reference)
            continue
        tolerance = TOLERANCE[tensor.dtype]
        torch.testing.assert_close(
            tensor.double(), reference.double(), rtol=tolerance, atol=tolerance, msg=name
        )


def combine(sources: list[Tensors], formula: Any) -> Tensors:
    """Apply *formula* to each tensor of floats of all sources, in float64."""
    result: Tensors = {}
    for name, tensor in sources[0].items():
        result[name] = tensor
        if tensor.is_floating_point() and tensor.numel():
            result[name] = formula(name, [held[name].double() for held in sources])
    return result


def test_a_weighted_average_is_the_weighted_mean_and_keeps_dtypes_and_side_files(
    tmp_path: Path,
) -> None:
    paths, tensors = models(tmp_path, 3)
    found = averaged(tmp_path, *paths, "--weights", "2,1,1")
    expected = combine(tensors, lambda _, x: 0.5 * x[0] + 0.25 * x[1] + 0.25 * x[2])
    assert_close(found, expected)
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in tensors[0].items()}
    checkpoint = tmp_path / "out" / "epoch_0_step_0"
    assert (checkpoint / "model" / "tokenizer.json").read_text() == '"m0"'
    lineage = manifest_of(checkpoint)["lineage"]
    assert [source["weight"] for source in lineage["averaged_from"]] == [0.5, 0.25, 0.25]
    assert [source["path"] for source in lineage["averaged_from"]] == paths
    # Other programs and a new run read the result.
    assert values(tmp_path / "out").keys() == found.keys()


def test_a_moving_average_of_the_last_checkpoints_of_a_run_is_that_of_training(
    tmp_path: Path,
) -> None:
    tensors = [weights(seed) for seed in range(4)]
    for number, held in enumerate(tensors):
        pieces = [piece for name, tensor in held.items() for piece in cut(name, tensor, 2)]
        path = tmp_path / "run" / f"epoch_0_step_{number + 1}"
        write_checkpoint(path, held, pieces, step=number + 1)
    found = averaged(tmp_path, str(tmp_path / "run"), "--last", "3", "--ema", "0.9")

    def moving(_: str, x: list[torch.Tensor]) -> torch.Tensor:
        average = x[0]
        for value in x[1:]:
            average = 0.9 * average + 0.1 * value
        return average

    assert_close(found, combine(tensors[1:], moving))
    # The result has the name of the newest source.
    assert (tmp_path / "out" / "epoch_0_step_4").is_dir()


def test_sources_that_do_not_fit_are_an_error_that_names_the_difference(
    tmp_path: Path, capsys: Capture
) -> None:
    one = {"w": torch.ones(2, 3), "n": torch.tensor(1)}
    first = str(save(tmp_path / "a", one))
    out = ("-o", str(tmp_path / "out"))
    shape = str(save(tmp_path / "b", {**one, "w": torch.ones(3, 2)}))
    assert "w: F32 [3, 2], not F32 [2, 3]" in rejected(capsys, first, shape, *out)
    dtype = str(save(tmp_path / "c", {**one, "w": torch.ones(2, 3).double()}))
    assert "w: F64 [2, 3], not F32 [2, 3]" in rejected(capsys, first, dtype, *out)
    more = str(save(tmp_path / "d", {**one, "extra": torch.ones(1)}))
    assert "extra" in rejected(capsys, first, more, *out)
    assert "extra" in rejected(capsys, more, first, *out)
    integers = str(save(tmp_path / "e", {**one, "n": torch.tensor(2)}))
    assert "n (I64)" in rejected(capsys, first, integers, *out)
    assert not (tmp_path / "out").exists()
    for option, value in (("first", 1), ("last", 2)):
        place = tmp_path / option
        place.mkdir()
        found = averaged(place, first, integers, "--integers", option)
        assert found["n"].item() == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}"], "at least two"),
        (["{a}", "{a}", "--weights", "1"], "value:  1 weight\n"),
        (["{a}", "{a}", "--weights", "1,x"], "not numbers"),
        (["{a}", "{a}", "--weights", "1,-1"], "not negative"),
        (["{a}", "{a}", "--weights", "nan,1"], "finite"),
        (["{a}", "{a}", "--ema", "1"], "less than 1"),
        (["{a}", "{a}", "--ema", "0.5", "--weights", "1,1"], "exclude"),
        (["{a}", "{a}", "--method", "ties"], "unknown arguments"),
        (["{a}", "{a}", "--last", "2"], "one run directory"),
        (["{run}", "--last", "5"], "fewer than 5"),
    ],
)
def test_options_that_make_no_sense_are_an_error(
    tmp_path: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    path = save(tmp_path / "a", {"w": torch.ones(2)})
    checkpoint_in(tmp_path / "run", 1)
    words = [word.format(a=path, run=tmp_path / "run") for word in arguments]
    assert message in rejected(capsys, *words, "-o", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_damage_in_a_source_is_found_and_nothing_is_published(
    tmp_path: Path, capsys: Capture
) -> None:
    first = checkpoint_in(tmp_path / "run", 1)
    second = checkpoint_in(tmp_path / "run", 2)
    for number, shard in enumerate(sorted((second / "model").glob("*.safetensors"))):
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        out = tmp_path / f"out{number}"
        message = rejected(capsys, str(first), str(second), "-o", str(out))
        assert "damaged: its digest differs" in message and str(second) in message
        assert not list(out.glob("epoch*")) and not list(out.glob(".epoch*"))


def test_adapters_are_averaged_as_adapters_if_their_options_agree(
    tmp_path: Path, capsys: Capture
) -> None:
    paths = []
    for number, alpha in enumerate((16, 16, 32)):
        path = tmp_path / f"adapter{number}"
        path.mkdir()
        key = "base_model.model.layer.lora_A.weight"
        save_file({key: torch.full((2, 4), float(number))}, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha}
        (path / "adapter_config.json").write_text(json.dumps(config))
        paths.append(str(path))
    assert "differ in lora_alpha" in rejected(capsys, *paths, "-o", str(tmp_path / "out"))
    found = averaged(tmp_path, *paths[:2])
    assert all((tensor == 0.5).all() for tensor in found.values())
    model = tmp_path / "out" / "epoch_0_step_0" / "model"
    assert sorted(path.name for path in model.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    for damaged in ("[1]", "{"):
        (tmp_path / "adapter1" / "adapter_config.json").write_text(damaged)
        message = rejected(capsys, *paths[:2], "-o", str(tmp_path / "more"))
        assert "not a JSON mapping" in message and paths[1] in message


def test_models_that_compute_something_else_are_reported(tmp_path: Path, capsys: Capture) -> None:
    paths = [save(tmp_path / name, {"w": torch.ones(2)}) for name in "ab"]
    config = {"model_type": "llama", "rope_theta": 5e5}
    for path, theta in zip(paths, (1e4, 5e5), strict=True):
        (path / "config.json").write_text(json.dumps({**config, "rope_theta": theta}))
    assert main(["average", *map(str, paths), "-o", str(tmp_path / "out")]) == 0
    printed = "".join(capsys.readouterr())
    assert "computes something else" in printed and "rope_theta: 500000.0 there" in printed
