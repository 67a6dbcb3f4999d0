"""What is written before the workers start is what pytest reads when they import the test modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.support.bytecode import rewrite_assertions


def test_pytest_imports_the_bytecode_that_was_written_in_advance(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "test_it.py"
    module.write_text("value = 3\nassert value\n")
    assert rewrite_assertions(pytestconfig, module).exists()
    monkeypatch.delattr(rewrite, "_rewrite_test")
    hook = rewrite.AssertionRewritingHook(pytestconfig)
    spec = importlib.util.spec_from_file_location("test_it", module, loader=hook)
    assert spec is not None
    imported = importlib.util.module_from_spec(spec)
    hook.exec_module(imported)
    assert imported.value == 3
