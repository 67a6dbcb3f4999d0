"""Attacks on the run directory: pointers, lock, leftovers; and on the recipe that a checkpoint keeps."""

import json
import os
from collections.abc import Callable
from functools import cache
from typing import Any

from automodel_ckpt.checkpoint.parts.commit import stamp
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
        for pointer in ("LATEST", "LOWEST_VAL", f"pin-{NAME}", "mine"):
            # A trainer first repairs the pointers of its directory.
            refusing = {"show_LATEST"} if pointer == "LATEST" else ()
            kind = f"pointer_{pointer.split('-')[0]}"
            add(kind, name, _link, POINTED, refusing, pointer=pointer, target=target)
        text = target.encode()
        add("pointer_text", name, _text, POINTED, {"show_LATEST"}, content=text)
        of_other = {"content": text, "pointer": "LOWEST_VAL"}
        add("pointer_text", f"{name}_LOWEST_VAL", _text, POINTED, **of_other)
    contents = {"nul": b"a\0b", "binary": bytes(range(256))}
    contents["lines"] = b"epoch_0_step_20\nepoch_0_step_1"
    for name, content in contents.items():
        add("pointer_text", name, _text, POINTED, content=content)
    in_place_of = {
        "special_as_averages": ("averaged", POINTED | RESUMES),
        "special_as_lock": (".run.lock", {"resume", *PRUNES}),
        "special_as_checkpoint": ("epoch_0_step_25", POINTED | RESUMES),
    }
    for special in SPECIALS:
        for path in ("LATEST", "LATEST.txt", f"pin-{NAME}.txt", "notes.txt", "training.jsonl"):
            name = f"{special}_{path}"
            add("special_in_run", name, _in_run, POINTED, path=path, special=special)
        for kind, (path, readers) in in_place_of.items():
            add(kind, special, _in_run, readers, path=path, special=special)
    add("special_large_in_run", "notes.txt", _large_text, POINTED)
    for file in ("", "MANIFEST.json", "config.yaml", "step_scheduler.pt"):
        refusing = {"verify_deep"} if file else ()
        name = file or "whole"
        add("checkpoint_is_a_link", name, _moved_checkpoint, POINTED, refusing, file=file)


def _text(case: Attacked, content: bytes, pointer: str = "LATEST") -> None:
    (case.run / pointer).unlink(missing_ok=True)
    (case.run / f"{pointer}.txt").write_bytes(content)


def _in_run(case: Attacked, path: str, special: str) -> None:
    from tests.hostile.harness import attacks

    if path == "LATEST.txt":
        (case.run / "LATEST").unlink()
    attacks.special(case.run / path, special, case.outside)


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
    readers = RESUMES | POINTED | {"generation"}
    for label, name in names.items():
        for what in ("link", "directory", "directory_of_links"):
            left = os.fsencode(name)
            add("leftover", f"{label}_{what}", _leftover, readers, left=left, what=what)


def _leftover(case: Attacked, left: bytes, what: str) -> None:
    path = os.path.join(os.fsencode(case.run), left)
    if what == "link":
        os.symlink(os.fsencode(case.outside), path)
        return
    os.mkdir(path)
    if what == "directory_of_links":
        os.symlink(os.fsencode(case.outside), os.path.join(path, b"model"))
        os.symlink(os.fsencode(case.secret), os.path.join(path, b"MANIFEST.json"))


def _recipes(add: Add) -> None:
    from tests.hostile.harness.attacks import put

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
        for path in ("config.yaml", "losses.json"):
            add(sort, f"{name}_{path}", put, readers, path=path, data=data)


LATE, NOTES, TRACKERS = "late_validations.json", ".verified.json", ".trackers.json"
GENERATION = ".generation.json"
JSONL = ("training.jsonl", "validation.jsonl")
OF_UPLOADS = (
    *(".remote.json", ".remote-part.json", ".remote.lock", ".remote-start.json"),
    *(".upload-epoch_0_step_20", ".upload-epoch_0_step_20.json"),
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
    from tests.hostile.harness.attacks import SPECIALS

    for path, readers in READ_BY.items():
        for special in SPECIALS:
            name = f"{special}_{path}"
            add("special_own_file", name, _in_run, readers, path=path, special=special)
        add("own_file_sparse", path, _sparse, readers, path=path)
        for name, text in _small_texts().items():
            add("own_file_text", f"{name}_{path}", _own_text, readers, path=path, text=text)
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
    late, notes = READ_BY[LATE], READ_BY[NOTES]
    generation, trackers = READ_BY[GENERATION], READ_BY[TRACKERS]
    for name, value in values.items():
        add("late_validation_values", f"{name}_loss", _late, late, losses={"val_loss": value})
        add("late_validation_values", f"{name}_losses", _late, late, losses=value)
        add("late_validation_values", f"{name}_manifest", _late, late, losses={}, digest=value)
        for key in ("step", "loss", "event", "timestamp"):
            for path in JSONL:
                line = f"{name}_{key}_{path}"
                add("log_values", line, _line, LOGS, path=path, changed={key: value})
        for key in ("time", "stamp"):
            add("verified_values", f"{name}_{key}", _verified, notes, changed={key: value})
        for key in ("number", "name", "kept", "has_logs", "postponed"):
            changed = {key: value}
            add("generation_values", f"{name}_{key}", _generation_of, generation, changed=changed)
        for key in ("digest", "number"):
            changed = {"postponed": {"digest": "", "number": 0, key: value}}
            entry = f"{name}_postponed_{key}"
            add("generation_values", entry, _generation_of, generation, changed=changed)
        add("tracker_values", name, _tracked, trackers, entry={"sent": {"train": value}})
        both = {"sent": value, "attempt": value}
        add("tracker_values", f"{name}_is", _tracked, trackers, entry=both)
    for name in ("../outside", "/etc", "\x1b[2J", "a\0b", "epoch_0_step_" + "9" * 17, "\ud800"):
        of_other = {"checkpoint": name, "losses": {"val_loss": -1}}
        add("late_validation_of_another", ascii(name), _late, late, **of_other)
        add("verified_of_another", ascii(name), _verified, notes, changed={}, checkpoint=name)


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


def _late(case: Attacked, losses: Any, checkpoint: str = NAME, digest: Any = None) -> None:
    """A later validation of a checkpoint, with a digest that fits."""
    entry = {"manifest": case.document()["digest"] if digest is None else digest, "losses": losses}
    _own_json(case, LATE, {checkpoint: entry})


def _verified(case: Attacked, changed: dict[str, Any], checkpoint: str = NAME) -> None:
    entry = {"time": 1.0, "ok": True, "stamp": [*stamp(case.checkpoint)]}
    _own_json(case, NOTES, {checkpoint: {**entry, **changed}})


def _generation_of(case: Attacked, changed: dict[str, Any]) -> None:
    generation = {"number": 1, "name": "a", "kept": [], "has_logs": True}
    _own_json(case, GENERATION, {**generation, **changed})


def _tracked(case: Attacked, entry: dict[str, Any]) -> None:
    _line(case, JSONL[0], {})
    _own_json(case, TRACKERS, {"tensorboard": entry})


def _line(case: Attacked, path: str, changed: dict[str, Any]) -> None:
    lines = [{"step": step, "loss": 1.0, "timestamp": 1.0, **changed} for step in (19, 20, 21)]
    (case.run / path).write_bytes(b"".join(_json(line) + b"\n" for line in lines))


def _own_json(case: Attacked, path: str, value: Any) -> None:
    (case.run / path).write_bytes(_json(value))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def entries(add: Add) -> None:
    _own_files(add)
    _pointers(add)
    _leftovers(add)
    _recipes(add)
