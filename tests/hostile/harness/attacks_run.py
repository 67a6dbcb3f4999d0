"""Attacks on the run directory: pointers, lock, leftovers; and on the recipe that a checkpoint keeps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from automodel_ckpt.checkpoint.run.resume import stamp
from tests.hostile.harness.readers import CHECKS, EXPORTS, LISTS, LOGS, PRUNES, RESUMES
from tests.hostile.harness.victim import NAME, Attacked

Add = Callable[..., None]
LINKS = {
    "outside": "../outside",
    "absolute": "/etc",
    "loop": "LATEST",
    "two_loops": "LOWEST_VAL",
    "device": "/dev/zero",
    "hidden": f"../outside/../run/{NAME}",
    "itself": ".",
    "gone": "epoch_0_step_99",
    "escape": "\x1b[2J",
    "root": "/",
    "proc": "/proc/self/root",
    "digits": "epoch_0_step_" + "9" * 200,
}
POINTED = frozenset(
    {"restore_from_LATEST", "resume", "ls", "ls_json", "show_LATEST", "verify_deep", *PRUNES}
)


def _link(case: Attacked, pointer: str, target: str) -> None:
    path = case.run / pointer
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _pointers(add: Add) -> None:
    from tests.hostile.harness.attacks import SPECIALS

    for name, target in LINKS.items():
        refusing = {"show_LATEST"}  # a trainer first repairs the pointers of its directory
        for pointer in ("LATEST", "LOWEST_VAL", f"pin-{NAME}", "mine"):
            add(
                f"pointer_{pointer.split('-')[0]}",
                name,
                partial(_link, pointer=pointer, target=target),
                POINTED,
                refusing if pointer == "LATEST" else (),
            )
        add("pointer_text", name, partial(_text, content=target.encode()), POINTED, {"show_LATEST"})
        add(
            "pointer_text",
            f"{name}_LOWEST_VAL",
            partial(_text, content=target.encode(), pointer="LOWEST_VAL"),
            POINTED,
        )
    for name, content in {
        "nul": b"a\0b",
        "binary": bytes(range(256)),
        "lines": b"epoch_0_step_20\nepoch_0_step_1",
    }.items():
        add("pointer_text", name, partial(_text, content=content), POINTED)
    for kind in SPECIALS:
        for path in ("LATEST", "LATEST.txt", f"pin-{NAME}.txt", "notes.txt", "training.jsonl"):
            add("special_in_run", f"{kind}_{path}", partial(_in_run, path=path, kind=kind), POINTED)
        add(
            "special_as_averages",
            kind,
            partial(_in_run, path="averaged", kind=kind),
            POINTED | RESUMES,
        )
        add(
            "special_as_lock",
            kind,
            partial(_in_run, path=".run.lock", kind=kind),
            {"resume", *PRUNES},
        )
        add(
            "special_as_checkpoint",
            kind,
            partial(_in_run, path="epoch_0_step_25", kind=kind),
            POINTED | RESUMES,
        )
    add("special_large_in_run", "notes.txt", _large_text, POINTED)
    for file in ("", "MANIFEST.json", "config.yaml", "step_scheduler.pt"):
        refusing = {"verify_deep"} if file else ()
        add(
            "checkpoint_is_a_link",
            file or "whole",
            partial(_moved_checkpoint, file=file),
            POINTED,
            refusing,
        )


def _text(case: Attacked, content: bytes, pointer: str = "LATEST") -> None:
    (case.run / pointer).unlink(missing_ok=True)
    (case.run / f"{pointer}.txt").write_bytes(content)


def _in_run(case: Attacked, path: str, kind: str) -> None:
    from tests.hostile.harness.attacks import _special

    if path == "LATEST.txt":
        (case.run / "LATEST").unlink()
    _special(case.run / path, kind, case.outside)


def _large_text(case: Attacked) -> None:
    (case.run / "LATEST").unlink()
    for name in ("LATEST.txt", "notes.txt"):
        with open(case.run / name, "wb") as file:
            file.truncate(2 << 30)


def _moved_checkpoint(case: Attacked, file: str) -> None:
    """The checkpoint is a link, as moving it leaves it, and a file of it is one that leads out."""
    (case.run / "archive").mkdir()
    case.checkpoint.rename(case.run / "archive" / NAME)
    case.checkpoint.symlink_to(f"archive/{NAME}")
    if file:
        (case.checkpoint / file).unlink()
        (case.checkpoint / file).symlink_to(case.secret)


def _leftovers(add: Add) -> None:
    unique = "0123456789abcdef" * 2
    names: dict[str, str | bytes] = {
        "staging": f".{NAME}.staging-{unique}",
        "trash": f".trash-{unique}",
        "pointer": f".LATEST.{unique}",
        "pin": f".pin-{NAME}.{unique}",
        "followed": f".link-{unique}",
        "superseded": f"{NAME}.superseded-1",
        "fetched": ".fetched",
        "unusable": f".unusable-{NAME}",
        "logs": ".earlier-logs-1",
        "export_to_upload": f".hub.staging-{unique}",
        "strange": "epoch_0_step_7\x1b[2J",
        "new_line": "epoch_0_step_7\nx",
        "bytes": b"epoch_0_step_\xff\xfe",
    }
    for label, name in names.items():
        for kind in ("link", "directory", "directory_of_links"):
            add(
                "leftover",
                f"{label}_{kind}",
                partial(_leftover, name=os.fsencode(name), kind=kind),
                RESUMES | POINTED | {"generation"},
            )


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
    bomb = "a0: &a0 [x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 15)
    )
    texts = {
        "python_object": "!!python/object/apply:os.system ['touch marker']\n",
        "python_name": "a: !!python/name:os.system\n",
        "python_module": "!!python/module:hostile_module\n",
        "python_new": "!!python/object/new:subprocess.Popen [[touch, marker]]\n",
        "alias_bomb": bomb,
        "deep": "[" * 100_000,
        "oc_env": "a: ${oc.env:HOME}\nb: ${oc.env:PATH}\n",
        "oc_decode": "a: ${oc.decode:${oc.env:HOME}}\n",
        "oc_create": "a: ${oc.create:'x'}\n",
        "resolver": "a: ${b:c}\n",
        "reference": "a: ${b}\nb: ${a}\n",
        "target": "model:\n  _target_: os.system\n  command: touch marker\n",
        "hydra": "defaults: [/etc/passwd]\n",
        "invalid_utf8": "",
        "recipe_code": "recipe: /tmp/hostile.py:Recipe\n",
    }
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


LATE, NOTES, TRACKERS = "late_validations.json", ".verified.json", ".trackers.json"
GENERATION = ".generation.json"
JSONL = ("training.jsonl", "validation.jsonl")
OF_UPLOADS = (
    ".remote.json",
    ".remote-part.json",
    ".remote.lock",
    ".remote-start.json",
    ".upload-epoch_0_step_20",
    ".upload-epoch_0_step_20.json",
)
OF_PUSHES = (".hub.json", ".hub.lock", ".hub-epoch_0_step_20")
# Who reads which of the run's own files.
READ_BY = {
    LATE: frozenset({"resume", "plot", *LISTS, *PRUNES}),
    NOTES: frozenset({"ls", "ls_json", "verify"}),
    TRACKERS: frozenset({"follow"}),
    "log.txt": frozenset({"text_log"}),
    ".run.lock": frozenset({"resume", "drop_optimizer"}),
    **dict.fromkeys(OF_UPLOADS, frozenset({"uploads"})),
    **dict.fromkeys(OF_PUSHES, frozenset({"pushes"})),
    ".memory.json": frozenset({"memory"}),
    GENERATION: frozenset({"generation"}),
    "hangs": frozenset({"hangs"}),
    ".save-request": frozenset({"save_request"}),
    ".save-answer.json": frozenset({"save_request"}),
    "timeline.jsonl": frozenset({"plot", "goodput", "timeline"}),
    ".timeline.json": frozenset({"plot", "goodput", "timeline"}),
    **dict.fromkeys(JSONL, LOGS),
    **{f"{name}.tmp": LOGS for name in (*JSONL, TRACKERS)},
    ".trackers.log": LOGS,
}


def _own_files(add: Add) -> None:
    """The small files that stand beside the checkpoints."""
    from tests.hostile.harness.attacks import SPECIALS

    for path, readers in READ_BY.items():
        for kind in SPECIALS:
            add(
                "special_own_file",
                f"{kind}_{path}",
                partial(_in_run, path=path, kind=kind),
                readers,
            )
        add("own_file_sparse", path, partial(_sparse, path=path), readers)
        for name, text in _small_texts().items():
            add(
                "own_file_text", f"{name}_{path}", partial(_own_text, path=path, text=text), readers
            )
    deep: Any = 0
    for _ in range(900):
        deep = [deep]
    values = {
        "digits": 10**4200,
        "nan": float("nan"),
        "infinite": float("-inf"),
        "text": "\x1b[31m\ud800",
        "deep": deep,
        "null": None,
        "true": True,
        "mapping": {"\x1b[2J": 1},
        "long": "x" * 10**6,
    }
    for name, value in values.items():
        add(
            "late_validation_values",
            f"{name}_loss",
            partial(_late, losses={"val_loss": value}),
            READ_BY[LATE],
        )
        add("late_validation_values", f"{name}_losses", partial(_late, losses=value), READ_BY[LATE])
        add(
            "late_validation_values",
            f"{name}_manifest",
            partial(_late, losses={}, digest=value),
            READ_BY[LATE],
        )
        for key in ("step", "loss", "event", "timestamp"):
            for path in JSONL:
                add(
                    "log_values",
                    f"{name}_{key}_{path}",
                    partial(_line, path=path, change={key: value}),
                    LOGS,
                )
        add(
            "verified_values",
            f"{name}_time",
            partial(_verified, change={"time": value}),
            READ_BY[NOTES],
        )
        add(
            "verified_values",
            f"{name}_stamp",
            partial(_verified, change={"stamp": value}),
            READ_BY[NOTES],
        )
        for key in ("number", "name", "kept", "has_logs", "postponed"):
            change = {key: value}
            add(
                "generation_values",
                f"{name}_{key}",
                partial(_generation_of, change=change),
                READ_BY[GENERATION],
            )
        for key in ("digest", "number"):
            change = {"postponed": {"digest": "", "number": 0, key: value}}
            add(
                "generation_values",
                f"{name}_postponed_{key}",
                partial(_generation_of, change=change),
                READ_BY[GENERATION],
            )
        add(
            "tracker_values",
            name,
            partial(_tracked, entry={"sent": {"train": value}}),
            READ_BY[TRACKERS],
        )
        add(
            "tracker_values",
            f"{name}_is",
            partial(_tracked, entry={"sent": value, "attempt": value}),
            READ_BY[TRACKERS],
        )
    for name in ("../outside", "/etc", "\x1b[2J", "a\0b", "epoch_0_step_" + "9" * 17, "\ud800"):
        add(
            "late_validation_of_another",
            ascii(name),
            partial(_late, losses={"val_loss": -1}, name=name),
            READ_BY[LATE],
        )
        add(
            "verified_of_another",
            ascii(name),
            partial(_verified, change={}, name=name),
            READ_BY[NOTES],
        )


@cache
def _small_texts() -> dict[str, bytes]:
    return {
        "nothing": b"",
        "torn": b'{"epoch_0_step_20": {"manifest": "xx',
        "list": b"[1]\n",
        "null": b"null\n",
        "deep": b'{"a":' + b"[" * 200_000,
        "deep_short": b"[" * 3000,
        "digits": b'{"step":' + b"9" * 100_000 + b"}\n",
        "invalid_utf8": b'{"\xff":1}\n',
        "surrogate": b'{"\\ud800": {"sent": {"\\ud800": 1}}, "step": 1}\n',
        "zeros": bytes(5000),
        "pickle": b"cos\nsystem\n(S'touch marker'\ntR.",
        "nan": b'{"step": NaN}\n',
        "many": b'{"step":1}\n' * 300_000,
        "many_keys": b"{" + b",".join(b'"%d":{}' % i for i in range(100_000)) + b"}",
    }


def _own_text(case: Attacked, path: str, text: bytes) -> None:
    (case.run / path).write_bytes(text)


def _sparse(case: Attacked, path: str) -> None:
    with open(case.run / path, "wb") as file:
        file.truncate(1 << 40)


def _late(case: Attacked, losses: Any, name: str = NAME, digest: Any = None) -> None:
    """A later validation of a checkpoint, with a digest that fits."""
    entry = {"manifest": case.document()["digest"] if digest is None else digest, "losses": losses}
    _own_json(case, LATE, {name: entry})


def _verified(case: Attacked, change: dict[str, Any], name: str = NAME) -> None:
    _own_json(
        case, NOTES, {name: {"time": 1.0, "ok": True, "stamp": [*stamp(case.checkpoint)], **change}}
    )


def _generation_of(case: Attacked, change: dict[str, Any]) -> None:
    generation = {"number": 1, "name": "a", "kept": [], "has_logs": True}
    _own_json(case, GENERATION, {**generation, **change})


def _tracked(case: Attacked, entry: dict[str, Any]) -> None:
    _line(case, JSONL[0], {})
    _own_json(case, TRACKERS, {"tensorboard": entry})


def _line(case: Attacked, path: str, change: dict[str, Any]) -> None:
    lines = [{"step": step, "loss": 1.0, "timestamp": 1.0, **change} for step in (19, 20, 21)]
    (case.run / path).write_bytes(b"".join(_json(line) + b"\n" for line in lines))


def _own_json(case: Attacked, path: str, value: Any) -> None:
    (case.run / path).write_bytes(_json(value))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def entries(add: Add) -> None:
    """Enter these attacks into the table."""
    _own_files(add)
    _pointers(add)
    _leftovers(add)
    _recipes(add)


__all__ = ["entries"]
