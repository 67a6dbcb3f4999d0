"""Groups of an optimizer are divided among the parameters of a model only if there is a single way to do so."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence

import pytest

from automodel_ckpt.convert.formats.torch.group_division import Division, Shape, divide

Positions = tuple[tuple[int, ...], ...]


def all_divisions(
    groups: Sequence[Sequence[Shape | None]],
    model: Sequence[Shape],
    allowed: Sequence[Collection[int]],
) -> set[Positions]:
    """Find all divisions by trying every parameter in every group that may have it."""

    def following(position: int, found: list[list[int]]) -> Iterator[Positions]:
        if position == len(model):
            if [len(each) for each in found] == [len(group) for group in groups]:
                yield tuple(tuple(each) for each in found)
            return
        yield from following(position + 1, found)
        for group, members, places in zip(groups, found, allowed, strict=True):
            if position not in places or len(members) == len(group):
                continue
            if group[len(members)] in (None, model[position]):
                members.append(position)
                yield from following(position + 1, found)
                members.pop()

    return set(following(0, [[] for _ in groups]))


def random_case(rng: random.Random) -> tuple[list[list[Shape | None]], list[Shape], Positions]:
    """Return groups, a model, and the division that the groups were made by."""
    shapes = [(3,), (4,), (4, 4), (4, 3)][: rng.randint(1, 4)]
    model: list[Shape] = []
    layer = [rng.choice(shapes) for _ in range(rng.randint(1, 4))]
    while len(model) < 7:
        # Layers repeat, as in real models, and differ now and then.
        model += layer if rng.random() < 0.7 else [rng.choice(shapes)]
    model = model[:8]
    num_groups = rng.randint(1, 4)
    is_by_shape = rng.random() < 0.5
    group_of_shape = {shape: rng.randrange(num_groups) for shape in shapes}
    truth: list[list[int]] = [[] for _ in range(num_groups)]
    frozen = rng.choice([0.0, 0.0, 0.2])
    for position, shape in enumerate(model):
        if rng.random() >= frozen:
            is_usual = is_by_shape and rng.random() < 0.9
            truth[group_of_shape[shape] if is_usual else rng.randrange(num_groups)].append(position)
    untrained = rng.choice([0.0, 0.0, 0.1])
    groups: list[list[Shape | None]] = []
    for positions in truth:
        groups.append([None if rng.random() < untrained else model[at] for at in positions])
    return groups, model, tuple(tuple(positions) for positions in truth)


def random_statement(
    rng: random.Random, truth: Positions, num_parameters: int
) -> list[frozenset[int]]:
    """Return for each group some of the positions of others, and its own."""
    share = rng.choice([0.0, 0.3, 0.7, 1.0])
    stated = []
    for positions in truth:
        others = {at for at in range(num_parameters) if rng.random() < share}
        stated.append(frozenset(others.union(positions)))
    return stated


@pytest.mark.parametrize("is_stated", [False, True])
def test_a_division_is_found_exactly_if_no_other_one_fits(is_stated: bool) -> None:
    rng = random.Random(0)
    num_found = num_ambiguous = 0
    for _ in range(300):
        groups, model, truth = random_case(rng)
        anywhere = [frozenset(range(len(model)))] * len(groups)
        allowed = random_statement(rng, truth, len(model)) if is_stated else None
        division = divide(groups, model, allowed)
        possible = all_divisions(groups, model, allowed or anywhere)
        assert truth in possible
        if len(possible) == 1:
            assert division.positions == truth and not division.is_ambiguous
            num_found += 1
            continue
        assert division.positions is None and division.is_ambiguous
        num_ambiguous += 1
        if division.choice is not None:
            (group, number), one, other = division.choice
            assert one != other
            assert {one, other} <= {positions[group][number] for positions in possible}
    assert num_found > 50 and num_ambiguous > 50


def test_shapes_that_fit_in_no_way_are_not_ambiguous() -> None:
    rng = random.Random(1)
    num_unfitting = 0
    for _ in range(300):
        groups, _, _ = random_case(rng)
        _, model, _ = random_case(rng)
        if not all_divisions(groups, model, [range(len(model))] * len(groups)):
            division = divide(groups, model)
            assert division.positions is None
            # Equal groups are reported before it is known whether they fit.
            assert not division.is_ambiguous or division.equal_groups is not None
            num_unfitting += 1
    assert num_unfitting > 100


def test_a_large_model_is_divided_fast_and_a_hopeless_one_is_given_up() -> None:
    layer: list[Shape] = [(8,), (16, 8), (8,), (8, 16), (16,)]
    model = [(99, 8), *layer * 2000]
    decayed: list[Shape] = [shape for shape in model if len(shape) == 2]
    first = [shape for shape in model if shape == (8,)]
    second = [shape for shape in model if shape == (16,)]
    found = divide([decayed, first, second], model).positions
    assert found is not None and found[2] == tuple(range(5, len(model), 5))
    # Twelve groups of different lengths, at random, of parameters with one shape.
    rng = random.Random(2)
    vectors: list[Shape] = [(8,)] * 200
    groups: list[list[Shape]] = [[(8,)] * (number + 11) for number in range(12)]
    rng.shuffle(groups)
    assert divide(groups, vectors) == Division(is_too_large=True)
