"""Whatever a checkpoint holds: reading it runs nothing of it, stays within it, and ends soon, with a plain answer.

Attack classes times readers. Each case is a checkpoint changed by one attack (with digests that fit where the attacker
could make them fit) and one program that reads it, in a forked child whose audit hook watches what it opens and starts.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.harness import attacks, bombs, files, sandbox, victim
from tests.hostile.harness.readers import (
    CHECKS,
    EXPORTS,
    GGUF,
    IMPORTS,
    LOGS,
    MERGES,
    OF_EXPORTS,
    READERS,
    RESUMES,
    form_for,
    prepare,
)
from tests.hostile.harness.victim import Attacked
from tests.support.logging_state import kept_logging

attacks.entries()
# HOSTILE=all (make hostile) runs every attack with every reader, at full size; else each class meets every sixth of its
# readers, by turns with another of its attacks, and each reader meets one.
EVERY = [(attack, reader) for attack in attacks.ATTACKS for reader in sorted(attack.readers)]
# 4: an export's place is taken by what no export made, or a log's.
WRITE = {"uploads", "pushes", "memory", "generation"}
"""Readers of records that they also replace."""
CLEAN = dict.fromkeys(READERS, (0, 2, 3)) | dict.fromkeys(
    EXPORTS | IMPORTS | OF_EXPORTS | MERGES | GGUF | LOGS | WRITE, (0, 2, 3, 4)
)


def _by_turns() -> list[tuple[attacks.Attack, str]]:
    chosen = []
    for turn, (kind, readers) in enumerate(attacks.KINDS.items()):
        for place, reader in enumerate(sorted(readers)[turn % 6 :: 6] or sorted(readers)):
            able = [
                attack
                for attack in attacks.ATTACKS
                if attack.kind == kind and reader in attack.readers
            ]
            chosen.append((able[(turn + 7 * place) % len(able)], reader))
    for reader in sorted(READERS.keys() - {reader for _, reader in chosen}):
        first = next(attack for attack in attacks.ATTACKS if reader in attack.readers)
        chosen.append((first, reader))
    return chosen


CASES = EVERY if bombs.EVERY else _by_turns()


def unread(reader: str, case: Attacked) -> tuple[str, ...]:
    """The pickle that no command opens where there is a manifest; only those that compare digests read its bytes."""
    bytewise = reader in CHECKS | RESUMES - {"resume_unverified"}
    return () if bytewise or not os.path.lexists(case.manifest) else ("/.metadata",)


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever a reader imports is imported here, once, and not in each child."""
    with kept_logging():
        for name in READERS:
            # Not a TemporaryDirectory, which an interrupted run would leave: pytest removes this one later.
            case = Attacked(tmp_path_factory.mktemp("warm"), form_for(name))
            prepare(name, case.run)
            with contextlib.suppress(SystemExit):
                READERS[name](case.run)
        logging.basicConfig(force=True)
        yield


@pytest.mark.parametrize(
    ("attack", "reader"),
    CASES,
    ids=[f"{attack.kind}-{attack.name}-{reader}" for attack, reader in CASES],
)
def test_a_hostile_checkpoint_does_no_harm(
    attack: attacks.Attack, reader: str, tmp_path: Path
) -> None:
    case = Attacked(tmp_path, attack.form)
    try:
        attack.change(case)
    except PermissionError:
        pytest.skip("needs the right to make device nodes")
    prepare(reader, case.run)
    untouched = sorted(os.listdir(case.outside))
    outcome = sandbox.run(
        lambda: READERS[reader](case.run), case.run, forbidden=unread(reader, case)
    )
    said = f"{outcome.text[-3000:]}\n{outcome}"[:4000]
    assert not outcome.violations, said
    assert not case.marker.exists() and sorted(os.listdir(case.outside)) == untouched
    assert outcome.code in CLEAN[reader] and "Traceback" not in outcome.text, said
    assert "this is a bug" not in outcome.text, said
    assert outcome.seconds < sandbox.SECONDS and outcome.extra_bytes < sandbox.EXTRA_BYTES, said
    assert not any(ord(character) < 32 and character not in "\n\t" for character in outcome.text), (
        said
    )
    if reader in attack.refusing:
        assert outcome.code != 0, f"{reader} took it\n{said}"


def test_every_kind_of_file_that_a_run_holds_is_attacked() -> None:
    from tests.contract.repository.test_trees import CASES as TREES
    from tests.contract.repository.test_trees import expected_tree

    held = {
        f"epoch_0_step_20/{path}"
        for case in TREES
        for ranks in (1, 2)
        for path in expected_tree(case, ranks, last=True)
    }
    held |= files.documented((Path(__file__).parents[2] / "docs/format.md").read_text())
    assert len(held) > 60 and sorted(path for path in held if files.class_for(path) is None) == []


@pytest.mark.parametrize("reader", sorted(READERS))
def test_no_reader_opens_the_pickle_that_other_programs_need(reader: str, tmp_path: Path) -> None:
    case = Attacked(tmp_path, form_for(reader))
    prepare(reader, case.run)
    outcome = sandbox.run(
        lambda: READERS[reader](case.run), case.run, forbidden=unread(reader, case)
    )
    assert outcome.code == 0 and not outcome.violations, outcome


def test_the_watch_notices_what_it_is_there_for(tmp_path: Path) -> None:
    case = Attacked(tmp_path)

    def harmful() -> int:
        os.system("true")
        case.secret.read_text()
        (case.outside / "new").write_text("")
        exec(compile("1", str(case.run / "code.py"), "exec"))
        held = bytearray(sandbox.EXTRA_BYTES)
        held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
        return 0

    outcome = sandbox.run(harmful, case.run)
    assert [text.split()[0] for text in outcome.violations] == [
        "os.system",
        "open",
        "open",
        "exec",
    ], outcome
    assert outcome.extra_bytes > sandbox.EXTRA_BYTES
    assert victim.NAME in str(case.checkpoint)
