"""Separate parameters that share memory are an error, unless none of them trains."""

import pytest
import torch
from torch import nn

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.model_checks import check_separate_memory


def with_views(*views: torch.Tensor, trains: bool = True) -> nn.Module:
    model = nn.Module()
    for index, view in enumerate(views):
        model.register_parameter(f"p{index}", nn.Parameter(view, requires_grad=trains))
    return model


def matrix() -> torch.Tensor:
    return torch.zeros(4, 6)


@pytest.mark.parametrize(
    "views",
    [
        lambda x: (x, x.view(6, 4)),
        lambda x: (x, x.t()),
        lambda x: (x[:3], x[2:]),
        lambda x: (x[0], x[1], x),
        lambda x: (x, x[3]),
    ],
    ids=["equal", "transposed", "rows", "a part", "its end"],
)
def test_trainable_parameters_with_common_elements_are_an_error(views: object) -> None:
    assert callable(views)
    model = with_views(*views(matrix()))
    with pytest.raises(RecipeError, match=r"share memory[\s\S]*p\d, p\d"):
        check_separate_memory(model)
    check_separate_memory(with_views(*views(matrix()), trains=False))


def test_two_names_of_one_parameter_are_no_error() -> None:
    model = with_views(matrix())
    model.again = model.p0
    check_separate_memory(model)
