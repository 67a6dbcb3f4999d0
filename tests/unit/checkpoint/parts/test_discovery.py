"""What a recipe's attributes hold, and how each is stored."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint.parts.discovery import classify, discover, left_out
from automodel_ckpt.errors import RecipeError


class Duck:
    """Nothing but the two methods."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def recipe(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(**attributes)


def stored(state: dict[str, Any]) -> dict[str, str]:
    return {item.name: item.path for item in classify(state)}


def test_no_name_is_special() -> None:
    names = ["value_head", "latest_eval", "best_loss", "val_tracker", "_private", "config"]
    found = discover(
        recipe(**{name: Duck() for name in names}, number=3, text="x", duck_class=Duck)
    )
    assert list(found) == names


def test_the_kind_comes_from_the_type_and_the_place_from_the_attribute() -> None:
    model, value_head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *value_head.parameters()], lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    state = discover(
        recipe(
            schedule=schedule, model=model, value_head=value_head, optimizer=optimizer, best=Duck()
        )
    )
    assert stored(state) == {
        "schedule": "optim/",
        "model": "model/",
        "value_head": "value_head/",
        "optimizer": "optim/",
        "best": "best.pt",
    }


def test_lists_and_dicts_of_state_are_found_with_escaped_keys() -> None:
    nested = [{"a.b/../c": Duck(), "plain": [Duck()]}, Duck()]
    assert list(discover(recipe(nested=nested))) == [
        "nested.0.a%2Eb%2F%2E%2E%2Fc",
        "nested.0.plain.0",
        "nested.1",
    ]


def test_a_list_that_holds_itself_is_no_endless_search() -> None:
    loop: list[Any] = [Duck()]
    loop.append(loop)
    assert list(discover(recipe(loop=loop))) == ["loop.0"]


def test_what_is_passed_over_is_told_with_the_reason() -> None:
    held = recipe(
        kept=Duck(),
        table={"a": Duck(), "b": Duck()},
        loss=torch.nn.CrossEntropyLoss(),
        left=Duck(),
        number=3,
    )
    held.untracked = ["left", "table.a", "number", "misspelt"]
    assert list(discover(held)) == ["kept", "table.b"]
    untracked = dict.fromkeys(("left", "number", "table.a"), "it is untracked")
    assert dict(left_out(held)) == {**untracked, "loss": "it has no state"}


def test_state_of_the_recipes_class_counts() -> None:
    class Recipe:
        shared, hidden, duck_class = Duck(), Duck(), Duck

    held = Recipe()
    held.hidden = own = Duck()
    assert discover(held) == {"hidden": own, "shared": Recipe.shared}


@pytest.mark.parametrize(
    "attributes", [{"a": {1: Duck(), "1": Duck()}}, {"a": {"b": Duck()}, "a.b": Duck()}]
)
def test_two_objects_of_one_name_are_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="two objects with state have the same name"):
        discover(recipe(**attributes))


@pytest.mark.parametrize("name", ["MANIFEST.json", "a/b", "../up", "x" * 250])
def test_names_that_no_file_of_a_checkpoint_can_have_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="name in the state cannot be used as a file name"):
        classify({name: torch.nn.Linear(1, 1)})


def test_an_object_that_has_every_attribute_is_plain_state() -> None:
    class Everything(Duck):
        def __getattr__(self, name: str) -> Any:
            return lambda *_: 0

    (item,) = classify({"proxy": Everything()})
    assert item.scope == "replicated"


def test_two_attributes_for_one_place_are_refused_by_name() -> None:
    model = torch.nn.Linear(1, 1)
    state = discover(recipe(optim=model, optimizer=torch.optim.SGD(model.parameters(), lr=1)))
    with pytest.raises(RecipeError, match=r"same place, optim/\n.*'optim' and 'optimizer'"):
        classify(state)


def test_a_schedule_without_its_optimizer_is_refused() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1)
    state = discover(recipe(schedule=torch.optim.lr_scheduler.ConstantLR(optimizer)))
    with pytest.raises(RecipeError, match="drives an optimizer that is not saved"):
        classify(state)


def test_a_module_without_parameters_is_saved_if_it_has_buffers() -> None:
    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(3))

    made = recipe(counted=Counted(), activation=torch.nn.GELU(), linear=torch.nn.Linear(1, 1))
    assert discover(made).keys() >= {"counted", "linear"}
    assert dict(left_out(made)) == {"activation": "it has no state"}
