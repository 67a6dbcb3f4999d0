"""The options of ``ckpt-train --write-launcher``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from automodel_ckpt.config.overrides import CommandLine
from automodel_ckpt.errors import Problem, RecipeError

FLAG = "--write-launcher"
KINDS = {
    "slurm": "slurm.sh.jinja",
    "k8s": "trainjob.yaml.jinja",
    "skypilot": "skypilot.yaml.jinja",
}
"""Kind of launcher -> its template."""
USERS = {
    "output": tuple(KINDS),
    "time_limit": ("slurm",),
    "image": ("k8s", "skypilot"),
    "volume_claim": ("k8s",),
}
"""The options, and the kinds of launchers that use each."""
DEFAULT_TIME_LIMIT = "08:00:00"
_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)")
_FORMS = {
    "time_limit": (_TIME, "use [DAYS-]HH:MM:SS, such as 08:00:00 or 2-00:00:00"),
    "image": (
        re.compile(r"[A-Za-z0-9][\w./:@-]*"),
        "use the name of an image, such as registry.example.com/automodel_ckpt:1",
    ),
    "volume_claim": (
        re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"),
        "use lowercase letters, digits, - and .",
    ),
}


@dataclass(frozen=True)
class LauncherOptions:
    """*kind* of the launcher, and the options that it may use; None: not given.

    *output* is the file to write, *time_limit* has the format ``[DAYS-]HH:MM:SS``, *image* is a container image, and
    *volume_claim* the name of a PersistentVolumeClaim.
    """

    kind: str
    output: str | None = None
    time_limit: str = DEFAULT_TIME_LIMIT
    image: str | None = None
    volume_claim: str = "training"

    @property
    def time_limit_seconds(self) -> int:
        found = _TIME.fullmatch(self.time_limit)
        assert found is not None
        days, hours, minutes, seconds = (int(text or 0) for text in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def launcher_options(line: CommandLine) -> LauncherOptions:
    """Return the options of a command line with ``--write-launcher``.

    Raises :class:`RecipeError` with all problems: an unknown kind, options of another kind, and malformed values.
    """
    (kind,) = line.modes["write_launcher"]
    if kind not in KINDS:
        hint = f"use {', '.join(KINDS)}"
        raise RecipeError("unknown kind of launcher", FLAG, kind, hint)
    given = {name: line.modes[name][0] for name in USERS if name in line.modes}
    problems = []
    for name, text in given.items():
        flag = f"--{name.replace('_', '-')}"
        pattern, hint = _FORMS.get(name, (None, ""))
        if kind not in USERS[name]:
            what = f"{flag} is not used with {FLAG} {kind}"
            hint = f"remove it; used with {', '.join(USERS[name])}"
            problems.append(Problem(what, flag, text, hint))
        elif pattern is not None and not pattern.fullmatch(text):
            problems.append(Problem(f"invalid value of {flag}", flag, text, hint))
    RecipeError.check(problems)
    return LauncherOptions(kind, **given)
