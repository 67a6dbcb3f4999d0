"""Weights in checkpoints of DeepSpeed are described as slices of the ranks' files, equal to DeepSpeed's own conversion.

The files in tests/fixtures/deepspeed were written by DeepSpeed (make.py there); ``expected.safetensors`` has the
tensors of its zero_to_fp32. Damage that needs other sizes is made in files of the same structure, written here.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from automodel_ckpt.cli import ckpt
from tests.support.external_tensors import described, error_of, kind_of, values

FIXTURES = Path(__file__).parents[3] / "fixtures" / "deepspeed"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if (path / "expected.safetensors").exists())
TAG = "global_step3"

Groups = list[dict[str, torch.Tensor]]


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name].to(value.dtype), value), name


def copied(name: str, directory: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, directory / name))


# ---------------------------------------------------------------- files of DeepSpeed


@pytest.mark.parametrize("name", NAMES)
def test_the_tensors_are_bit_equal_to_those_of_deepspeeds_own_conversion(name: str) -> None:
    found = values(FIXTURES / name)
    expected = load_file(FIXTURES / name / "expected.safetensors")
    if "stage1" in name:
        # zero_to_fp32 loses the frozen parameters of stage 1. They are in the model's states.
        frozen = found.pop("inner.bias")
        other = name.removeprefix("universal-").replace("stage1", "stage2")
        stage2 = load_file(FIXTURES / other / "expected.safetensors")
        assert torch.equal(frozen.to(stage2["inner.bias"].dtype), stage2["inner.bias"])
    assert_equal(found, expected)
    # Buffers keep their dtype; DeepSpeed converts those of floats to float32.
    assert found["count"].dtype == torch.int64 and found["offsets"].dtype == torch.float32
    assert found["embed.weight"].dtype == torch.float32


@pytest.mark.parametrize("name", ["stage1-bfloat16", "stage2-float32", "stage3-float32"])
def test_the_directory_of_a_tag_is_read_like_that_of_its_run(name: str) -> None:
    assert_equal(values(FIXTURES / name / TAG), values(FIXTURES / name))
    source = described(FIXTURES / name)
    assert source.tied == {"head.weight": "embed.weight"}
    text = ", ".join(source.omitted)
    for word in ("optimizer state of 2 ranks", "lr_scheduler", "global_steps", "note"):
        assert word in text
    assert any("master weights, from the files of 2 ranks" in note for note in source.notes)


def test_a_run_is_imported_and_what_is_not_imported_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied("stage3-bfloat16", tmp_path)
    (run / "config.json").write_text('{"model_type": "llama"}')
    shutil.copytree(run / TAG, run / "global_step1")
    assert ckpt.main(["import", "--json", str(run), str(tmp_path / "imported")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "DeepSpeed" and document["has_config"]
    assert document["left_out"][0] == "global_step1: DeepSpeed"
    assert (document["step"], document["position_from"]) == (3, "stated in the files")
    found = values(run)
    del found["head.weight"]  # tied: it is stored once
    assert_equal(values(tmp_path / "imported"), found)


def test_deepspeed_is_preferred_to_rounded_weights_and_not_to_an_adapter(tmp_path: Path) -> None:
    run = copied("stage2-bfloat16", tmp_path)
    save_file({"embed.weight": torch.zeros(1)}, run / "model.safetensors")
    assert kind_of(run) == "DeepSpeed"
    (run / "adapter_model.safetensors").touch()
    (run / "adapter_config.json").write_text("{}")
    assert kind_of(run) == "PEFT adapter"


def test_without_optimizer_files_the_weights_of_the_model_are_read(tmp_path: Path) -> None:
    run = copied("stage2-bfloat16", tmp_path)
    for file in (run / TAG).glob("*_optim_states.pt"):
        file.unlink()
    found = values(run)
    expected = load_file(run / "expected.safetensors")
    assert found.keys() == expected.keys()
    assert found["embed.weight"].dtype == torch.bfloat16
    assert torch.equal(found["embed.weight"], expected["embed.weight"].bfloat16())
    assert any("no files with the optimizer's master weights" in n for n in described(run).notes)
    run = copied("stage3-bfloat16", tmp_path)
    for file in (run / TAG).glob("*_optim_states.pt"):
        file.unlink()
    assert "with ZeRO stage 3, only they have them" in error_of(run)


def truncate(directory: Path) -> None:
    file = sorted(directory.glob("*_optim_states.pt"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def link(directory: Path) -> None:
    file = sorted(directory.glob("*_optim_states.pt"))[1]
    file.rename(directory.parent / "elsewhere.pt")
    file.symlink_to("../elsewhere.pt")


def touching(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).touch()


def without(pattern: str) -> Callable[[Path], None]:
    return lambda directory: sorted(directory.glob(pattern))[-1].unlink()


def swap(directory: Path) -> None:
    first, second = sorted(directory.glob("*_optim_states.pt"))
    first.rename(directory / "x")
    second.rename(first)
    (directory / "x").rename(second)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (
            "stage1-float32",
            without("*_optim_states.pt"),
            "files of some of the 2 ranks are missing",
        ),
        ("stage3-float32", without("*_optim_states.pt"), "files of 1 rank"),
        ("stage3-float32", without("*1_mp_rank_00_model_states.pt"), "files of 1 rank"),
        ("stage2-float32", without("mp_rank_00_model_states.pt"), "model's states is missing"),
        ("stage2-bfloat16", truncate, "cannot be read"),
        ("stage2-bfloat16", link, "symbolic link"),
        ("stage1-float32", swap, "does not continue the part of the rank before"),
        ("stage2-bfloat16", swap, "does not continue the part of the rank before"),
        ("stage1-float32", touching("mp_rank_01_model_states.pt"), "tensor parallelism"),
        ("stage3-float32", touching("zero_pp_rank_0_mp_rank_01_optim_states.pt"), "tensor paral"),
        ("stage1-float32", touching("layer_00-model_states.pt"), "pipeline or expert parallelism"),
        (
            "stage1-float32",
            touching("layer_1_expert_0_mp_rank_00_model_states.pt"),
            "pipeline or expert parallelism",
        ),
        (
            "stage1-float32",
            touching("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
            "two files claim to belong to rank 0",
        ),
        (
            "stage1-float32",
            touching("zero_pp_rank_1_mp_rank_00_model_states.pt"),
            "of different stages of ZeRO",
        ),
        (
            "universal-stage1-bfloat16",
            lambda tag: shutil.rmtree(tag / "zero" / "conv.bias"),
            "the file of the parameter 'conv.bias' is missing",
        ),
        (
            "universal-stage1-bfloat16",
            lambda tag: shutil.copy(tag / "zero/scale/fp32.pt", tag / "zero/conv.bias/fp32.pt"),
            "of the parameter 'conv.bias'",
        ),
    ],
)
def test_damage_is_an_error_that_names_it(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    run = copied(name, tmp_path)
    damage(run / (f"{TAG}_universal" if "universal" in name else TAG))
    assert message in error_of(run)


@pytest.mark.parametrize(
    "tag", ["", "..", "../stage1-float32/global_step3", "global_step9", "a\0b"]
)
def test_latest_names_a_directory_beside_it(tmp_path: Path, tag: str) -> None:
    run = copied("stage1-float32", tmp_path)
    (run / "latest").write_text(tag)
    assert "latest" in error_of(run)
    assert kind_of(run) == "DeepSpeed"


# ---------------------------------------------------------------- files of the same structure


def write_zero(
    directory: Path, groups: Groups, *, stage: int, num_ranks: int, **states: Any
) -> Path:
    """Write a checkpoint as DeepSpeed does; *states* replace entries of the model's states."""
    directory.mkdir(parents=True)
    whole_module = {name: tensor for group in groups for name, tensor in group.items()}
    if stage == 3:
        whole_module = dict.fromkeys(whole_module, torch.empty(0))
    model = {
        "module": whole_module,
        "buffer_names": [],
        "param_shapes": [{name: t.shape for name, t in group.items()} for group in groups],
        "shared_params": {},
        "dp_world_size": num_ranks,
        "ds_version": "0",
        **states,
    }
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    parts = [parts_of(list(g.values()), stage=stage, num_ranks=num_ranks) for g in groups]
    for rank in range(num_ranks):
        optimizer = {
            "zero_stage": stage,
            "partition_count": num_ranks if stage == 3 else [num_ranks] * len(groups),
            key: [group[rank] for group in parts],
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer}, directory / f"{name}_optim_states.pt")
        if stage == 3:
            torch.save(model, directory / f"{name}_model_states.pt")
    if stage < 3:
        torch.save(model, directory / "mp_rank_00_model_states.pt")
    return directory


def parts_of(tensors: list[torch.Tensor], *, stage: int, num_ranks: int) -> list[torch.Tensor]:
    """Each rank's flat part of a group, padded as DeepSpeed does it."""
    if stage == 3:
        shares: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
        for tensor in tensors:
            share = -(-tensor.numel() // num_ranks)
            padded = torch.full((share * num_ranks,), 99.0)
            padded[: tensor.numel()] = tensor.flatten()
            for rank, part in enumerate(padded.split(share)):
                shares[rank].append(part)
        return [torch.cat(share) for share in shares]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    size = -(-flat.numel() // (2 * num_ranks)) * 2
    # The padding at the end is not saved.
    return [flat[rank * size : (rank + 1) * size].clone() for rank in range(num_ranks)]


def example(seed: int) -> Groups:
    """Parameters of one to four dimensions whose sizes no number of ranks divides, one without elements."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (8, 4), generator=generator).tolist()
    shapes = [tuple(size[: 1 + index % 4]) for index, size in enumerate(sizes)]
    tensors = {
        f"p{i}.weight": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)
    }
    names = list(tensors)
    return [
        {name: tensors[name] for name in names[:3]},
        {name: tensors[name] for name in names[3:]},
    ]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_any_number_of_ranks_and_any_shapes_are_read(
    tmp_path: Path, stage: int, num_ranks: int
) -> None:
    for seed in range(3):
        groups = example(seed)
        directory = tmp_path / str(seed)
        write_zero(directory, groups, stage=stage, num_ranks=num_ranks)
        assert_equal(values(directory), groups[0] | groups[1])


@pytest.mark.parametrize(
    ("stage", "states", "message"),
    [
        (2, {"param_shapes": [{"a": (1 << 50,)}]}, "do not make it up"),
        (3, {"param_shapes": [{"a": (1,)}]}, "not have the size"),
        (2, {"param_shapes": [{"a": (-1,)}]}, "the shape of a parameter is damaged"),
        (2, {"param_shapes": [{"a": (4,)}, {"a": (4,)}]}, "groups"),
        (2, {"module": {"a": torch.ones(2, 2)}}, "in param_shapes and module are different"),
        (2, {"mp_world_size": 2}, "tensor parallelism"),
        (2, {"frozen_param_shapes": {"f": (3,)}}, "the part of the parameter 'f'"),
        (
            3,
            {"frozen_param_shapes": {"f": (3,)}, "frozen_param_fragments": {"f": torch.ones(3)}},
            "the parts of the parameter 'f' do not have its size",
        ),
    ],
)
def test_damaged_states_of_the_model_are_an_error(
    tmp_path: Path, stage: int, states: dict[str, Any], message: str
) -> None:
    write_zero(tmp_path / "tag", [{"a": torch.ones(4)}], stage=stage, num_ranks=2, **states)
    assert message in error_of(tmp_path / "tag")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"partition_count": [2, 4]}, "expert parallelism"),
        ({"partition_count": [1]}, "ranks disagree"),
        ({"zero_stage": 9}, "stage of ZeRO is unknown"),
        ({"single_partition_of_fp32_groups": [torch.ones(2).half()]}, "ranks disagree"),
        ({"single_partition_of_fp32_groups": [torch.ones(4)[::2]]}, "not a flat tensor"),
        ({"param_alignment_paddings": [[5]]}, "zero_to_fp32.py"),
        ({"zero_stage": None}, "zero_to_fp32.py"),
    ],
)
def test_a_damaged_file_of_one_rank_is_an_error(
    tmp_path: Path, optimizer: dict[str, Any], message: str
) -> None:
    tag = write_zero(tmp_path / "tag", [{"a": torch.ones(4)}], stage=2, num_ranks=2)
    state = {
        "zero_stage": 2,
        "partition_count": [2],
        "single_partition_of_fp32_groups": [torch.ones(2)],
    }
    file = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": state | optimizer}, file)
    assert message in error_of(tag)


def test_prefixes_of_wrappers_are_removed_from_tied_names_too(tmp_path: Path) -> None:
    groups = [{"_forward_module.model.a": torch.ones(4)}]
    tied = {"_forward_module.model.b": "_forward_module.model.a"}
    lightning = {"pytorch-lightning_version": "2.6.0"}
    tag = write_zero(
        tmp_path / "tag", groups, stage=3, num_ranks=2, shared_params=tied, **lightning
    )
    assert_equal(values(tag), {"a": torch.ones(4), "b": torch.ones(4)})
