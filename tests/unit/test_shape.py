"""tools/shape.py counts what it says it counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import shape

SOURCE = '''\
"""A module."""


class Thing:
    """As the other."""

    def double(self, values):
        """Return twice the values."""
        # A reason.
        return [2 * value for value in values] if values else []
'''


def test_density_comments_and_docstrings_are_counted(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    found = shape.shape_of([tmp_path / "module.py"])
    (function,) = found.functions
    assert (function.num_lines, function.nodes_per_line) == (1, function.num_nodes)
    assert (found.num_comprehensions, found.num_conditionals, found.num_comments) == (1, 1, 1)
    assert found.elliptical == [f"{tmp_path}/module.py:4 Thing"]
    assert found.classes == [(1, f"{tmp_path}/module.py:4 Thing")]


def test_a_tree_behind_a_symbolic_link_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "module.py").write_text(SOURCE)
    (tmp_path / "link").symlink_to("real")
    assert len(list(shape.python_files([tmp_path]))) == 1


def test_every_figure_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    assert shape.main([str(tmp_path), "--worst", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 10
    assert shape.main([str(tmp_path / "nothing")]) == 2
