"""The divisions of a model's parameters into the groups of an optimizer that their shapes permit. Imports no torch.

The optimizer's groups are known as lists of shapes, without names. The search assumes that each group lists its
parameters in the order of ``named_parameters()``; which group a parameter is in, and which parameters are in none
because they were frozen, is unknown, unless the user states it. :func:`divide` returns a division only if no other one
fits.

It visits the model's parameters in order, and keeps for every point the set of states that can be reached: how many
members of each group have been found. A state that can be reached in two ways has two divisions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

Shape = tuple[int, ...]
Member = tuple[int, int]
"""A parameter of the optimizer: the number of its group, and its position in the group."""
_State = tuple[int, ...]
_MAX_STATES = 50_000
"""States of one search. Groups with more are rejected like ambiguous ones: their search takes too long."""
_STATES_PER_PARAMETER = 4


@dataclass(frozen=True, slots=True)
class Division:
    """The result of a search: for each group, the *positions* of its parameters in the model; None if there is not one.

    *choice*: a member of a group and two positions that it has in two divisions that both fit.
    *equal_groups*: two groups with the same shapes, which fit in both orders. *is_too_large*: the search was given up.
    If no division fits, *positions* is None and nothing else is set.
    """

    positions: tuple[tuple[int, ...], ...] | None = None
    choice: tuple[Member, int, int] | None = None
    equal_groups: tuple[int, int] | None = None
    is_too_large: bool = False

    @property
    def is_ambiguous(self) -> bool:
        """Whether several divisions fit, as far as the search shows."""
        return self.choice is not None or self.equal_groups is not None or self.is_too_large


def divide(
    groups: Sequence[Sequence[Shape | None]],
    model: Sequence[Shape],
    allowed: Sequence[Collection[int]] | None = None,
) -> Division:
    """Divide the parameters of a model with the shapes *model* into *groups*; a shape of None fits any parameter.

    *allowed* has, for each group, the positions in the model that its parameters can have; by default all.
    """
    num_members = sum(len(group) for group in groups)
    # For each group, the shapes of the parameters that it can have, and None in the places of others.
    available: list[Sequence[Shape | None]] = [model] * len(groups)
    if allowed is not None:
        available = [only_allowed(model, positions) for positions in allowed]
    windows = [_windows(*pair) for pair in zip(groups, available, strict=True)]
    if num_members > len(model) or None in windows:
        return Division()
    if (pair := _equal_groups(groups, available)) is not None:
        return Division(equal_groups=pair)
    found = [each for each in windows if each is not None]
    if _are_independent(groups, available):
        return _from_windows(found)
    return _Search(groups, available, found).result()


def only_allowed(model: Sequence[Shape], allowed: Collection[int]) -> list[Shape | None]:
    """Return the shapes of *model* at the positions *allowed*, and None at others."""
    return [shape if position in allowed else None for position, shape in enumerate(model)]


def _are_independent(
    groups: Sequence[Sequence[Shape | None]], available: Sequence[Sequence[Shape | None]]
) -> bool:
    """Whether no parameter fits members of two groups."""
    taken: set[int] = set()
    for group, shapes in zip(groups, available, strict=True):
        wanted = set(group)
        fitting: set[int] = set()
        for position, shape in enumerate(shapes):
            if shape is not None and (shape in wanted or None in wanted):
                fitting.add(position)
        if taken & fitting:
            return False
        taken |= fitting
    return True


def _from_windows(windows: Sequence[Sequence[range]]) -> Division:
    """Return the division into independent groups whose members have these possible positions."""
    for group, members in enumerate(windows):
        for number, window in enumerate(members):
            if len(window) > 1:
                return Division(choice=((group, number), window[0], window[-1]))
    return Division(tuple(tuple(window[0] for window in members) for members in windows))


def _equal_groups(
    groups: Sequence[Sequence[Shape | None]], available: Sequence[Sequence[Shape | None]]
) -> tuple[int, int] | None:
    """Return the numbers of two groups with the same shapes: whatever fits one of them fits the other one."""
    seen: dict[tuple[tuple[Shape | None, ...], tuple[Shape | None, ...]], int] = {}
    for number, (group, shapes) in enumerate(zip(groups, available, strict=True)):
        if group:
            first = seen.setdefault((tuple(group), tuple(shapes)), number)
            if first != number:
                return first, number
    return None


def _windows(
    group: Sequence[Shape | None], available: Sequence[Shape | None]
) -> list[range] | None:
    """Return the positions that each member of a group can have if there were no other groups; None if it has none."""
    first = first_positions(group, available)
    if first is None:
        return None
    last = last_positions(group, available)
    return [range(begin, end + 1) for begin, end in zip(first, last, strict=True)]


def fits(wanted: Shape | None, available: Shape | None) -> bool:
    """Whether a member with the shape *wanted* (None: any) can be the parameter *available* (None: none)."""
    return available is not None and wanted in (None, available)


def first_positions(
    wanted: Sequence[Shape | None], available: Sequence[Shape | None]
) -> list[int] | None:
    """Return the first possible position of each of the *wanted* shapes, in order; None if they do not fit.

    They are a subsequence of those that are *available*, because frozen parameters have no number. None among those is
    the place of a parameter that cannot be a member.
    """
    positions: list[int] = []
    position = 0
    for shape in wanted:
        while position < len(available) and not fits(shape, available[position]):
            position += 1
        if position == len(available):
            return None
        positions.append(position)
        position += 1
    return positions


def last_positions(wanted: Sequence[Shape | None], available: Sequence[Shape | None]) -> list[int]:
    """Return the last possible position of each of the *wanted* shapes, which fit.

    Where it equals the first possible position of all of them, there is only one way to assign them.
    """
    backward = first_positions(wanted[::-1], available[::-1])
    assert backward is not None, "shapes that fit in one direction fit in the other one"
    return [len(available) - 1 - position for position in reversed(backward)]


class _Search:
    """All divisions of a model, as a graph: its nodes are the states before each parameter."""

    def __init__(
        self,
        groups: Sequence[Sequence[Shape | None]],
        available: Sequence[Sequence[Shape | None]],
        windows: Sequence[Sequence[range]],
    ) -> None:
        self._groups, self._available, self._windows = groups, available, windows
        self._num_parameters = len(available[0])
        self._num_frozen = self._num_parameters - sum(len(group) for group in groups)
        # For each parameter, the states after it with the one or two states that lead to each.
        self._steps: list[dict[_State, list[_State]]] = []

    def result(self) -> Division:
        start = tuple(0 for _ in self._groups)
        reached = [start]
        num_states = 0
        max_states = max(_MAX_STATES, _STATES_PER_PARAMETER * self._num_parameters)
        for position in range(self._num_parameters):
            step: dict[_State, list[_State]] = {}
            for state in reached:
                for following in self._following(state, position):
                    before = step.setdefault(following, [])
                    if len(before) < 2:
                        before.append(state)
            self._steps.append(step)
            reached = list(step)
            num_states += len(reached)
            if num_states > max_states:
                return Division(is_too_large=True)
        end = tuple(len(group) for group in self._groups)
        if end not in reached:
            return Division()
        first, second = self._paths(end)
        if second is None:
            return Division(self._positions(first))
        return Division(choice=self._difference(first, second))

    def _following(self, state: _State, position: int) -> Iterator[_State]:
        """Yield the states that the parameter at *position* leads to."""
        num_found = sum(state)
        # A member whose last possible position has passed will not be found.
        late = [
            group
            for group, found in enumerate(state)
            if found < len(self._groups[group]) and self._windows[group][found][-1] <= position
        ]
        if len(late) > 1:
            return
        if not late and position - num_found < self._num_frozen:
            yield state
        for group, found in enumerate(state):
            if late and group != late[0]:
                continue
            if found == len(self._groups[group]) or position not in self._windows[group][found]:
                continue
            if fits(self._groups[group][found], self._available[group][position]):
                yield (*state[:group], found + 1, *state[group + 1 :])

    def _paths(self, end: _State) -> tuple[list[_State], list[_State] | None]:
        """Return one or two different sequences of states that lead to *end*."""
        first = [end]
        for step in reversed(self._steps):
            first.append(step[first[-1]][0])
        second: list[_State] = []
        for step in reversed(self._steps):
            state = first[len(second)]
            second.append(state)
            if len(step[state]) > 1:
                break
        else:
            return first[::-1], None
        # From there on, another way.
        second.append(self._steps[self._num_parameters - len(second)][second[-1]][1])
        for step in reversed(self._steps[: self._num_parameters + 1 - len(second)]):
            second.append(step[second[-1]][0])
        return first[::-1], second[::-1]

    def _positions(self, path: Sequence[_State]) -> tuple[tuple[int, ...], ...]:
        """Return the positions of each group's members on a path."""
        found: list[list[int]] = [[] for _ in self._groups]
        for position, (before, after) in enumerate(pairwise(path)):
            for group, (old, new) in enumerate(zip(before, after, strict=True)):
                if new > old:
                    found[group].append(position)
        return tuple(tuple(positions) for positions in found)

    def _difference(
        self, first: Sequence[_State], second: Sequence[_State]
    ) -> tuple[Member, int, int]:
        """Return the first member that has different positions on two paths."""
        pairs = zip(self._positions(first), self._positions(second), strict=True)
        for group, (here, there) in enumerate(pairs):
            for number, (one, other) in enumerate(zip(here, there, strict=True)):
                if one != other:
                    return (group, number), one, other
        raise AssertionError("two paths differ in a position")
