"""Which tensors a model takes from a source of weights, and what is refused by name."""

import pytest

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.weight_matching import Names, compare

HERE = Names({"model.embed.weight": (8, 4), "model.norm.weight": (4,), "score.weight": (3, 4)})


def there(**changes: tuple[int, ...] | None) -> Names:
    shapes = dict(HERE.shapes) | {name.replace("__", "."): shape for name, shape in changes.items()}
    return Names({name: shape for name, shape in shapes.items() if shape is not None})


def test_what_is_on_one_side_only_or_of_another_shape_is_refused_by_name_with_the_keys_to_allow_it() -> (
    None
):
    verdict = compare(HERE, there(model__norm__weight=None, score__weight=(5, 4), old__weight=(1,)))
    with pytest.raises(RecipeError) as caught:
        verdict.check_allowed("init_from.path", "base", "init_from")
    for text in (
        "+ model.norm.weight: not there",
        "- old.weight: only there",
        "~ score.weight: there [5, 4], here [3, 4]",
        "init_from.allow_missing: ['model.norm.weight', 'score.weight']",
        "init_from.allow_unexpected: ['old.weight']",
    ):
        assert text in str(caught.value)


def test_only_resizable_tensors_may_have_another_number_of_rows_and_no_other_width() -> None:
    rows, width = there(model__embed__weight=(6, 4)), there(model__embed__weight=(8, 5))
    assert compare(HERE, rows).misshapen
    grown = compare(HERE, rows, resizable=["model.embed.weight"])
    assert grown.resized == {"model.embed.weight": ((6, 4), (8, 4))}
    assert grown.matches["model.embed.weight"] == "model.embed.weight"
    assert compare(HERE, width, resizable=["model.embed.weight"]).misshapen


@pytest.mark.parametrize(
    ("here", "source"),
    [
        (Names({"e": (2, 1)}, {"h": "e"}), Names({"h": (2, 1)})),
        (Names({"e": (2, 1)}, {"h": "e"}), Names({"e": (2, 1), "h": (2, 1)})),
        (Names({"e": (2, 1), "h": (2, 1)}), Names({"e": (2, 1)}, {"h": "e"})),
    ],
)
def test_tied_tensors_are_found_under_each_of_their_names(here: Names, source: Names) -> None:
    verdict = compare(here, source)
    assert verdict.matches.keys() == here.shapes.keys()
    assert verdict.lines(allowed=False) == []
