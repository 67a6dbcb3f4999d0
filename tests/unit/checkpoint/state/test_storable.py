"""What a checkpoint takes comes back as it was; what could not is refused by attribute and key, before it is saved."""

from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from automodel_ckpt.checkpoint import discover
from automodel_ckpt.checkpoint.pickles import pickle_reader
from automodel_ckpt.checkpoint.state import storable
from automodel_ckpt.checkpoint.state.storable import check_safe, saved
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from tests.support.models import tiny


def with_attribute(value: Any, attribute: object) -> Any:
    value.note = attribute
    return value


def in_each_other(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "key", "found"),
    [
        ({"deep": [1, deque([1])]}, "value.deep[1]", "collections.deque"),
        (lambda: None, "value", "builtins.function"),
        ({SimpleNamespace: 1}, "the key", "builtins.type"),
        ({(1, frozenset()): 1}, "the key", "builtins.frozenset"),
        ([np.array(["text"])], "value[0]", "numpy.ndarray"),
        ([np.datetime64(0, "s")], "value[0]", "numpy.datetime64"),
        (with_attribute(torch.ones(1), deque()), "value.note", "collections.deque"),
        (with_attribute(OrderedDict(), deque()), "value.note", "collections.deque"),
        (torch.empty(1, dtype=torch.uint4), "value", "torch.uint4"),
        (torch.eye(2).to_sparse(), "value", "sparse"),
        (torch.ones(1).expand(1000), "value", "share memory"),
        (
            [t := torch.ones(2), t.view(torch.int32)],
            "value[1]",
            "shares memory with a tensor of another type",
        ),
        (in_each_other(40), "value", "nested more than 25 levels"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_state_that_could_not_be_read_back_is_refused_by_attribute_and_key(
    value: Any, key: str, found: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        check_safe("tracker", {"value": value})
    message = str(caught.value)
    assert "'tracker'" in message and key in message and found in message and "untracked" in message


def test_containers_that_hold_each_other_without_end_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storable, "_MAX_REPEATED", 1000)
    value: list[Any] = [1]
    for _ in range(22):
        value = [value, value]
    with pytest.raises(RecipeError, match="more than a million times"):
        check_safe("tracker", {"value": value})


@pytest.mark.parametrize(
    "value",
    [
        [[0.0] * 300] * 300,
        10**5000,
        "a lone \ud800",
        {(1, "x"): 1},
        with_attribute(torch.ones(1), [1]),
        with_attribute(torch.nn.Parameter(torch.ones(1)), "x"),
        with_attribute(OrderedDict(a=1), 2),
    ],
    ids=[
        "rows held twice",
        "large number",
        "surrogate",
        "tuple key",
        "tensor",
        "parameter",
        "mapping",
    ],
)
def test_what_is_not_refused_comes_back_as_it_was(value: Any) -> None:
    check_safe("tracker", value)
    read = pickle_reader.load(bytes(saved(value)), "here")
    assert read == value and type(read) is type(value)
    assert getattr(read, "__dict__", None) == getattr(value, "__dict__", None)


ARRAYS = [
    np.arange(6.0).reshape(2, 3)[:, ::-1],
    np.array(3),
    np.empty((0, 2), np.float16),
    np.array([True]),
    np.array([1j], np.complex64),
    np.array([2**64 - 1], np.uint64),
]


@pytest.mark.parametrize(
    "value", [*ARRAYS, *(a.reshape(-1)[0] for a in ARRAYS if a.size)], ids=repr
)
def test_numpy_comes_back_as_numpy_and_other_readers_find_tensors(
    value: Any, tmp_path: Path
) -> None:
    check_safe("tracker", {"value": value})
    (tmp_path / "file").write_bytes(saved({"value": value}))
    read = pickle_reader.load((tmp_path / "file").read_bytes(), "here")["value"]
    assert (type(read), read.dtype, read.shape, read.tobytes()) == (
        type(value),
        value.dtype,
        value.shape,
        value.tobytes(),
    )
    elsewhere = torch.load(tmp_path / "file", weights_only=True)["value"]
    assert type(elsewhere) is torch.Tensor and elsewhere.tolist() == value.tolist()


def test_numpys_generators_and_keys_come_back() -> None:
    state = {"generator": np.random.RandomState(3).get_state(), np.int64(3): 1}
    check_safe("tracker", state)
    read = pickle_reader.load(bytes(saved(state)), "here")
    assert read[np.int64(3)] == 1 and [type(key) for key in read] == [str, np.int64]
    again = np.random.RandomState(0)
    again.set_state(read["generator"])
    assert again.random_sample() == np.random.RandomState(3).random_sample()


# ---------------------------------------------------------------- what modules and optimizers hold


class Stubborn(torch.optim.SGD):
    """An optimizer as people write them: no closure, and a decay that asks neither gradient nor learning rate."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)
                entry = self.state[parameter]
                entry["mean"] = entry.get("mean", torch.zeros_like(parameter)) + parameter.detach()


def stubborn(seed: int) -> SimpleNamespace:
    made = tiny.recipe(seed)
    made.optimizer = Stubborn(made.optimizer.param_groups[0]["params"], lr=0.1)
    made.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        made.optimizer, lambda step: np.cos(step / 10)
    )
    return made


def test_an_optimizer_that_changes_weights_whatever_happens_resumes_exactly(tmp_path: Path) -> None:
    made, other = stubborn(0), stubborn(1)
    for _ in range(2):
        made.optimizer.step()
        made.lr_scheduler.step()
    tiny.checkpointer(tmp_path).check(discover(made))
    tiny.save(tmp_path, made)
    tiny.load(tmp_path, other)
    tiny.assert_equal_state(made, other)
    rate = other.optimizer.param_groups[0]["lr"]
    assert type(rate) is np.float64 and "step" not in vars(Stubborn([torch.ones(1)]))
    other.optimizer.step()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda made: made.optimizer.param_groups[0].update(where=Path("/")),
            "'optimizer.param_groups.0.where'",
        ),
        (
            lambda made: made.model.register_buffer("odd", torch.eye(2).to_sparse()),
            "odd(.|\n)*sparse",
        ),
        (
            lambda made: made.model.register_buffer("odd", torch.empty(2, dtype=torch.uint4)),
            "odd(.|\n)*uint4",
        ),
        (
            lambda made: made.model.register_buffer("odd", torch.ones(1).expand(9)),
            "odd(.|\n)*share memory",
        ),
    ],
    ids=["option", "sparse", "type", "expanded"],
)
def test_what_modules_and_optimizers_cannot_have_saved_is_refused_before_training(
    tmp_path: Path, change: Any, said: str
) -> None:
    made = tiny.recipe()
    change(made)
    with pytest.raises(RecipeError, match=said):
        tiny.checkpointer(tmp_path).check(discover(made))


# ---------------------------------------------------------------- attributes that come and go


def with_head(seed: int = 0) -> SimpleNamespace:
    made = tiny.recipe(seed)
    made.value_head = torch.nn.Linear(2, 1)
    parameters = made.optimizer.param_groups[0]["params"]
    made.optimizer = torch.optim.AdamW([*parameters, *made.value_head.parameters()], lr=0.1)
    del made.lr_scheduler
    return made


def step(made: SimpleNamespace) -> SimpleNamespace:
    for group in made.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    made.optimizer.step()
    return made


def without_schedule(seed: int = 0) -> SimpleNamespace:
    made = tiny.recipe(seed)
    made.optimizer = torch.optim.AdamW(made.optimizer.param_groups[0]["params"], lr=0.1)
    del made.lr_scheduler
    return made


def test_a_module_that_is_new_or_gone_needs_leave_for_its_optimizer_too(tmp_path: Path) -> None:
    tiny.save(tmp_path / "without", saved_one := step(without_schedule()))
    tiny.save(tmp_path / "with", step(with_head()))
    for run, made in (("without", with_head(1)), ("with", without_schedule(1))):
        with pytest.raises(CheckpointUnusable, match=r"[+-] value_head: "):
            tiny.load(tmp_path / run, made)
        with pytest.raises(CheckpointUnusable, match=r"allow_missing_state '\[optimizer\]'"):
            tiny.load(tmp_path / run, made, allow_missing_state=["value_head"])
        tiny.load(tmp_path / run, made, allow_missing_state=["value_head", "optimizer"])
        assert torch.equal(made.model.one_row, saved_one.model.one_row)
        assert not made.optimizer.state
        step(made)


def test_groups_that_were_cut_otherwise_are_refused_and_those_in_another_order_are_not(
    tmp_path: Path,
) -> None:
    def grouped(*groups: list[int]) -> SimpleNamespace:
        made = without_schedule()
        every = made.optimizer.param_groups[0]["params"]
        made.optimizer = torch.optim.AdamW(
            [{"params": [every[i] for i in group], "lr": 0.1 + group[0]} for group in groups]
        )
        return made

    tiny.save(tmp_path, step(grouped([0, 1], [2, 3])))
    with pytest.raises(
        CheckpointUnusable, match=r"param_groups\.1: saved as groups 0 and 1 with different options"
    ):
        tiny.load(tmp_path, grouped([0], [1, 2, 3]))
    with pytest.raises(
        CheckpointUnusable,
        match=r"- optimizer\.param_groups\.1: trained model\.brief, which is not",
    ):
        tiny.load(tmp_path, grouped([0, 1], [2]))
    for groups, rates in (
        (([3, 2], [1, 0]), [2.1, 0.1]),
        (([1], [3], [2], [0]), [0.1, 2.1, 2.1, 0.1]),
    ):
        made = grouped(*groups)
        tiny.load(tmp_path, made)
        assert [group["lr"] for group in made.optimizer.param_groups] == rates


def test_a_schedules_rates_follow_the_groups_of_their_parameters(tmp_path: Path) -> None:
    def grouped(*groups: list[int]) -> SimpleNamespace:
        made = tiny.recipe()
        every = made.optimizer.param_groups[0]["params"]
        made.optimizer = torch.optim.AdamW(
            [{"params": [every[i] for i in g], "lr": 1 + g[0]} for g in groups]
        )
        schedules = [
            torch.optim.lr_scheduler.ConstantLR(made.optimizer, 0.5, total_iters=9)
            for _ in range(2)
        ]
        made.lr_scheduler = torch.optim.lr_scheduler.SequentialLR(made.optimizer, schedules, [2])
        return made

    saved = grouped([0, 1], [2, 3])
    tiny.train(saved, 3)
    tiny.save(tmp_path, saved)
    made = grouped([2], [3], [1, 0])
    tiny.load(tmp_path, made)
    inner = made.lr_scheduler._schedulers[0]
    assert inner.base_lrs == [3, 3, 1] and made.lr_scheduler._last_lr == [
        g["lr"] for g in made.optimizer.param_groups
    ]
    tiny.train(saved), tiny.train(made)
    rates = [g["lr"] for g in saved.optimizer.param_groups]
    assert [g["lr"] for g in made.optimizer.param_groups] == [rates[1], rates[1], rates[0]]


UNSTORABLE = {
    "sparse": (torch.eye(2).to_sparse(), "sparse or quantized: sparse_coo"),
    "expanded": (torch.zeros(1).expand(4), "its elements share memory"),
    "without values": (torch.zeros(2, device="meta"), "it is without values"),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", UNSTORABLE)
def test_optimizer_state_that_could_not_be_loaded_again_is_not_saved(
    kind: str, is_async: bool, tmp_path: Path
) -> None:
    value, reason = UNSTORABLE[kind]
    made = tiny.recipe()
    made.optimizer.state[made.model.brief]["odd"] = value
    with pytest.raises(RecipeError, match=rf"optimizer\.state\.model\.brief\.odd\n[\s\S]*{reason}"):
        tiny.save(tmp_path, made, is_async=is_async)
    assert not list(tmp_path.glob("epoch*"))


def test_what_is_on_one_side_only_or_of_another_kind_is_listed(tmp_path: Path) -> None:
    tiny.save(tmp_path, tiny.recipe(gone=tiny.Counter(1), kind=torch.nn.Linear(1, 1)))
    other = tiny.recipe(1, new=tiny.Counter(), kind=tiny.Counter())
    with pytest.raises(
        CheckpointUnusable, match=r"allow_missing_state '\[gone, kind, new\]'"
    ) as caught:
        tiny.load(tmp_path, other)
    for line in (
        "+ new: here, but not saved",
        "~ kind: saved as module, here object",
        "- gone: saved, but not here",
    ):
        assert line in str(caught.value)
    assert tiny.load(tmp_path, other, allow_missing_state=["gone", "kind", "new"]) is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    ],
    ids=["StepLR", "ExponentialLR", "LambdaLR", "OneCycleLR"],
)
def test_a_schedule_of_another_kind_is_an_error_or_keeps_its_own_state(
    tmp_path: Path, make: Any
) -> None:
    saved = tiny.recipe()
    tiny.train(saved)
    tiny.save(tmp_path, saved)
    other = tiny.recipe(1)
    other.lr_scheduler = make(other.optimizer)
    before = other.lr_scheduler.state_dict()
    with pytest.raises(
        CheckpointUnusable, match=r"another kind[\s\S]*saved with gamma, milestones; "
    ):
        tiny.load(tmp_path, other)
    resumed = tiny.load(tmp_path, other, allow_missing_state=["lr_scheduler"])
    assert resumed is not None and resumed.loaded == {"model", "optimizer"}
    assert other.lr_scheduler.state_dict() == before
    assert torch.equal(other.model.embed, saved.model.embed)


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_schedule_on_one_side_only_is_an_error_or_left_out(
    tmp_path: Path, is_saved: bool
) -> None:
    saved, other = tiny.recipe(), tiny.recipe(1)
    tiny.train(saved)
    without = other if is_saved else saved
    del without.lr_scheduler
    # The schedule has added it.
    del without.optimizer.param_groups[0]["initial_lr"]
    tiny.save(tmp_path, saved)
    with pytest.raises(CheckpointUnusable, match=r"allow_missing_state '\[lr_scheduler\]'"):
        tiny.load(tmp_path, other)
    resumed = tiny.load(tmp_path, other, allow_missing_state=["lr_scheduler"])
    assert resumed is not None and resumed.loaded >= {"model", "optimizer"}
    moments, loaded = tiny.tensors_of(saved), tiny.tensors_of(other)
    assert all(torch.equal(loaded[name], moments[name]) for name in moments)
