"""``ckpt import --group``: the user states the groups of an optimizer that numbers its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.tensors.stored import whole
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.convert.formats.torch.stated_groups import StatedParameters
from automodel_ckpt.errors import AutomodelError
from tests.fixtures.tiny_training import Rows, batch_of, tiny_llama
from tests.unit.convert.formats.test_numbered_optimizer import (
    assert_same,
    parameters_of,
    read,
    trained,
)

Capture = pytest.CaptureFixture[str]
Group = dict[str, Any]
FSDP = Path(__file__).parents[3] / "fixtures" / "fsdp" / "torch-nested"


def split_by_decay(modules: Sequence[nn.Module], lr: float) -> list[Group]:
    """Return a group of matrices and one of vectors; either may be empty."""
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim == 1]
    return [
        {"params": matrices, "lr": lr, "weight_decay": 0.1},
        {"params": vectors, "lr": lr, "weight_decay": 0.0},
    ]


def by_layer(model: Any) -> list[Group]:
    """Return two groups for each layer, from the output down, with a smaller rate for each."""
    groups = split_by_decay([model.lm_head], 0.02)
    for number, layer in enumerate(reversed(model.model.layers)):
        groups += split_by_decay([layer], 0.01 / (number + 1))
    return groups + split_by_decay([model.model.embed_tokens, model.model.norm], 0.001)


BY_LAYER = ["lm_head.*"] * 2
BY_LAYER += [f"model.layers.{layer}.*" for layer in (2, 2, 1, 1, 0, 0)]
BY_LAYER += ["*.embed_tokens.*,model.norm.*"] * 2


def options(groups: Sequence[str]) -> list[str]:
    return [f"--group={group}" for group in groups]


def saved_by_script(directory: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    model = tiny_llama(num_layers=3, tied=False)
    model.config.save_pretrained(directory)
    optimizer = torch.optim.AdamW(by_layer(model))
    for step in range(2):
        model(batch_of(step), labels=batch_of(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    path = directory / "state.pt"
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    torch.save(content, path)
    return path, model, optimizer


def assert_imported(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compare all moments with those of the optimizer, bit for bit."""
    tensors = Manifest.read(checkpoint).trees["optimizer"].tensors
    num_compared = 0
    for name, parameter in model.named_parameters():
        for entry in ("exp_avg", "exp_avg_sq"):
            key = f"optimizer.state.model.{name}.{entry}"
            if parameter.requires_grad:
                value = optimizer.state[parameter][entry]
                assert whole(checkpoint, tensors[key]).tobytes() == value.numpy().tobytes(), key
                num_compared += 1
            else:
                assert key not in tensors
    assert num_compared == 2 * len(optimizer.state)


def test_the_groups_of_a_script_with_a_rate_for_each_layer(tmp_path: Path, capsys: Capture) -> None:
    path, model, optimizer = saved_by_script(tmp_path)
    run = tmp_path / "run"
    command = ["import", str(path), str(run), "--training-state", "--config", str(tmp_path)]
    assert main(command) == 3
    text = capsys.readouterr().err
    assert "in several ways" in text and "with --group" in text
    assert "4: 7 parameters, lr 0.005, weight_decay 0.1" in text

    assert main([*command, *options(BY_LAYER)]) == 0
    text = capsys.readouterr().out
    assert "as --group states" in text
    assert (
        "group 3         2 parameters, lr 0.01, weight_decay 0.0, from model.layers.2.input" in text
    )
    assert_imported(run / "epoch_0_step_2", model, optimizer)

    # Group 1 is empty, and may be left out.
    shorter = ["import", str(path), str(tmp_path / "second"), *command[3:]]
    assert main([*shorter, *options([BY_LAYER[0], *BY_LAYER[2:]])]) == 0
    assert_imported(tmp_path / "second" / "epoch_0_step_2", model, optimizer)


class DecayByLayer(Trainer):
    """A Trainer with a rate for each layer."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(by_layer(self.model))
        return self.optimizer


def test_the_groups_of_a_trainer_with_own_rates_and_frozen_layers(
    tmp_path: Path, capsys: Capture
) -> None:
    model = tiny_llama(num_layers=3, tied=False)
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = DecayByLayer(model, arguments, train_dataset=Rows(8))
    trainer.train()
    run = tmp_path / "run"
    command = ["import", str(tmp_path / "checkpoint-1"), str(run), "--training-state"]
    assert main(command) == 3
    assert "in several ways" in capsys.readouterr().err
    groups = ["lm_head.*", *BY_LAYER[2:6], "model.norm.*"]
    assert main([*command, *options(groups)]) == 0
    inner = trainer.optimizer
    optimizer = getattr(inner, "optimizer", inner)  # accelerate's wrapper
    assert isinstance(optimizer, torch.optim.Optimizer)
    checkpoint = next(run.glob("epoch_*_step_1"))
    assert_imported(checkpoint, model, optimizer)


class Projected(nn.Module):
    """Parts of a vision-language model: a tower, a projector and a decoder with norms, all of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(4, 4)
        self.projector = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tower(tokens.float()[:4])
        return self.norm(self.decoder(self.projector(hidden))).square().sum()


@pytest.mark.parametrize(
    ("groups", "fault"),
    [
        (["!*projector*,!tower*,!*norm*,!*.bias", "*norm*,*.bias,!projector*,!tower*", "projector*", "projector*"], ""),
        (["*decoder.weight", "*decoder.bias,norm*", "*projector*", "*projector*"], ""),
        (["!projector*", "!projector*", "projector*", "projector*"], "in several ways"),
        (["*"], "1 group stated; the groups of the optimizer"),
        (
            ["decoder*", "decoder*", "projector*", "projector*"],
            "'decoder*': it matches 2 parameters, decoder.weight to decoder.bias; the group has 3",
        ),
        (
            ["decoder*", "decoder*,norm*", "projector*", "projector.weight"],
            "projector.weight; 5 needs one with the shape [4], and the next is projector.weight [4, 4]",
        ),
        (["projector.weight", "!tower*", "projector*", "*"], "two of them need a parameter"),
        (["decoder*", "norms*", "*", "*"], "'norms*'; the model has 8 parameters, from tower.weight"),
        (["decoder*,!dec*", "*", "*", "*"], "excludes all parameters"),
    ],
)  # fmt: skip
def test_statements_are_compared_with_the_shapes(
    tmp_path: Path, groups: list[str], fault: str
) -> None:
    model = Projected()
    model.tower.requires_grad_(False)
    rest = [model.decoder, model.norm]
    optimizer = trained(model, split_by_decay(rest, 0.1) + split_by_decay([model.projector], 0.2))
    parameters = StatedParameters(parameters_of(model), tuple(groups))
    if fault:
        with pytest.raises(AutomodelError) as raised:
            read(tmp_path / "o.pt", optimizer.state_dict(), model, parameters=parameters)
        assert fault in str(raised.value)
        return
    state = read(tmp_path / "o.pt", optimizer.state_dict(), model, parameters=parameters)
    assert_same(state, optimizer, model)
    assert state.groups[1].parameters == ("decoder.bias", "norm.weight", "norm.bias")


def test_it_is_an_error_to_state_groups_that_the_files_name(
    tmp_path: Path, capsys: Capture
) -> None:
    command = ["import", str(FSDP), str(tmp_path / "run"), "--group=*"]
    assert main([*command, "--training-state"]) == 2
    assert "the files name the parameters of the optimizer" in capsys.readouterr().err
    assert main(command) == 2
    assert "without --training-state" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
