"""Attacks on the run directory: pointers, lock, leftovers; and on the recipe that a checkpoint keeps."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from .readers import CHECKS, EXPORTS, LISTS, PRUNES, RESUMES
from .victim import NAME, Attacked

Add = Callable[..., None]
LINKS = {
    "outside": "../outside", "absolute": "/etc", "loop": "LATEST", "two_loops": "LOWEST_VAL", "device": "/dev/zero",
    "hidden": f"../outside/../run/{NAME}", "itself": ".", "gone": "epoch_0_step_99", "escape": "\x1b[2J",
    "root": "/", "proc": "/proc/self/root", "digits": "epoch_0_step_" + "9" * 200,
}  # fmt: skip
POINTED = frozenset({"restore_from_LATEST", "resume", "ls", "ls_json", "show_LATEST", "verify_deep", *PRUNES})


def _link(case: Attacked, pointer: str, target: str) -> None:
    path = case.run / pointer
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _pointers(add: Add) -> None:
    from .attacks import SPECIALS

    for name, target in LINKS.items():
        refusing = {"show_LATEST"}  # a trainer first mends the pointers of its own directory
        for pointer in ("LATEST", "LOWEST_VAL", f"pin-{NAME}", "mine"):
            add(
                f"pointer_{pointer.split('-')[0]}",
                name,
                partial(_link, pointer=pointer, target=target),
                POINTED,
                refusing if pointer == "LATEST" else (),
            )
        add("pointer_text", name, partial(_text, content=target.encode()), POINTED, {"show_LATEST"})
    for name, content in {
        "nul": b"a\0b",
        "binary": bytes(range(256)),
        "lines": b"epoch_0_step_20\nepoch_0_step_1",
    }.items():
        add("pointer_text", name, partial(_text, content=content), POINTED)
    for kind in SPECIALS:
        for path in ("LATEST", "LATEST.txt", f"pin-{NAME}.txt", "notes.txt", "training.jsonl"):
            add("special_in_run", f"{kind}_{path}", partial(_in_run, path=path, kind=kind), POINTED)
        add("special_as_lock", kind, partial(_in_run, path=".run.lock", kind=kind), {"resume", *PRUNES})
        add("special_as_checkpoint", kind, partial(_in_run, path="epoch_0_step_25", kind=kind), POINTED | RESUMES)
    add("special_large_in_run", "notes.txt", _large_text, POINTED)
    add("checkpoint_is_a_link", "LATEST", _linked_checkpoint, POINTED, {"restore_from_LATEST", "show_LATEST"})


def _text(case: Attacked, content: bytes) -> None:
    (case.run / "LATEST").unlink()
    (case.run / "LATEST.txt").write_bytes(content)


def _in_run(case: Attacked, path: str, kind: str) -> None:
    from .attacks import _special

    if path == "LATEST.txt":
        (case.run / "LATEST").unlink()
    _special(case.run / path, kind, case.outside)


def _large_text(case: Attacked) -> None:
    (case.run / "LATEST").unlink()
    for name in ("LATEST.txt", "notes.txt"):
        with open(case.run / name, "wb") as file:
            file.truncate(2 << 30)


def _linked_checkpoint(case: Attacked) -> None:
    """LATEST names a checkpoint as it should, and that name is a link to elsewhere."""
    case.checkpoint.rename(case.outside / NAME)
    case.checkpoint.symlink_to(case.outside / NAME)


def _leftovers(add: Add) -> None:
    unique = "0123456789abcdef" * 2
    names: dict[str, str | bytes] = {
        "staging": f".{NAME}.staging-{unique}", "trash": f".trash-{unique}", "pointer": f".LATEST.{unique}",
        "superseded": f"{NAME}.superseded-1", "strange": "epoch_0_step_7\x1b[2J", "new_line": "epoch_0_step_7\nx",
        "bytes": b"epoch_0_step_\xff\xfe",
    }  # fmt: skip
    for label, name in names.items():
        for kind in ("link", "directory", "directory_of_links"):
            add("leftover", f"{label}_{kind}", partial(_leftover, name=os.fsencode(name), kind=kind), RESUMES | POINTED)


def _leftover(case: Attacked, name: bytes, kind: str) -> None:
    path = os.path.join(os.fsencode(case.run), name)
    if kind == "link":
        os.symlink(os.fsencode(case.outside), path)
        return
    os.mkdir(path)
    if kind == "directory_of_links":
        os.symlink(os.fsencode(case.outside), os.path.join(path, b"model"))
        os.symlink(os.fsencode(case.secret), os.path.join(path, b"MANIFEST.json"))


def _recipes(add: Add) -> None:
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 15))
    texts = {
        "python_object": "!!python/object/apply:os.system ['touch marker']\n",
        "python_name": "a: !!python/name:os.system\n", "python_module": "!!python/module:hostile_module\n",
        "python_new": "!!python/object/new:subprocess.Popen [[touch, marker]]\n",
        "alias_bomb": bomb, "deep": "[" * 100_000, "oc_env": "a: ${oc.env:HOME}\nb: ${oc.env:PATH}\n",
        "oc_decode": "a: ${oc.decode:${oc.env:HOME}}\n", "oc_create": "a: ${oc.create:'x'}\n",
        "resolver": "a: ${b:c}\n",
        "reference": "a: ${b}\nb: ${a}\n", "target": "model:\n  _target_: os.system\n  command: touch marker\n",
        "hydra": "defaults: [/etc/passwd]\n", "invalid_utf8": "", "recipe_code": "recipe: /tmp/hostile.py:Recipe\n",
    }  # fmt: skip
    readers = RESUMES | CHECKS | LISTS | EXPORTS
    for name, text in texts.items():
        data = text.encode() or b"\xff\xfe\xc0"
        sort = "recipe_tags" if text.startswith(("!!", "a: !!")) else "recipe_text"
        add(
            sort,
            f"{name}_config.yaml",
            partial(lambda case, data: case.replace("config.yaml", data), data=data),
            readers,
        )
        add(
            sort,
            f"{name}_losses.json",
            partial(lambda case, data: case.replace("losses.json", data), data=data),
            readers,
        )


def entries(add: Add) -> None:
    """Enter these attacks into the table."""
    _pointers(add)
    _leftovers(add)
    _recipes(add)


__all__ = ["entries"]
