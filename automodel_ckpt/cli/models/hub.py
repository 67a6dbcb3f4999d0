"""``ckpt card``, and ``ckpt push`` and ``ckpt pull`` for repositories of the Hugging Face Hub (``hub:ORG/NAME``)."""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.terminal import print_error
from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.cli.common.arguments import WHERE, option_flag, without_effect
from automodel_ckpt.cli.common.output import print_document
from automodel_ckpt.cli.common.paths import download_directory, find_checkpoint
from automodel_ckpt.errors import EXIT_DONE, TO_UTF8, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.hub.bundle import Bundle
    from automodel_ckpt.hub.card import Metric

# The options about the content of a card that is written.
_WRITTEN = ("license", "eval")
_FACTS = """
--base-model ORG/NAME | name of the base model on the Hub, if it was in a local directory
--license ID          | license, instead of the base's
--eval repeat FILE    | results of `ckpt eval --json` for the card; can be repeated
"""
PUSH_OPTIONS = f"""
--public          | with hub:ORG/NAME: publish the model; otherwise a new repository is private, and a public one is an
  error
--revision BRANCH | with hub:ORG/NAME: branch (default: main)
--card FILE       | README.md to upload instead of a written one
{_FACTS}
"""
"""The options of ``ckpt push`` that apply to the Hub."""
USAGE_CARD = f"""
Print the model card (README.md) that `ckpt push` uploads to the Hugging Face Hub with a model, to review it (or to
write it: `ckpt card PATH > README.md`). It contains no paths, users or hosts.

path PATH           | {WHERE}, or an export
repo ? hub:ORG/NAME | repository that the card is for
{_FACTS}
"""


def run_push(arguments: Namespace) -> int:
    """Upload the model of a checkpoint or an export to the Hub."""
    from automodel_ckpt.hub.bundle import opened
    from automodel_ckpt.hub.card import card_files
    from automodel_ckpt.hub.push import push
    from automodel_ckpt.hub.repository import HubAddress, check_revision, web_page

    address = HubAddress.parse(arguments.url, "ckpt push")
    _reject(arguments, ("metric", "max", "max_mb_per_second"), "with hub:ORG/NAME")
    if arguments.revision is not None:
        check_revision(arguments.revision, "--revision")
        if address.revision not in (None, arguments.revision):
            raise RecipeError(
                "two branches are given",
                "ckpt push",
                f"{address.revision}, --revision {arguments.revision}",
            )
        address = HubAddress(address.repo, arguments.revision)
    _check_base(arguments)
    started = time.monotonic()
    readme, evaluation = _readme(arguments.card), _metrics(arguments.eval)
    if readme is not None:
        _reject(arguments, _WRITTEN, "with --card")
    source = find_checkpoint(Path(arguments.path))
    with opened(source, print_error, base_model=arguments.base_model) as bundle:
        if readme is None:
            _check_own_card(arguments, bundle)
        card = card_files(
            bundle,
            address,
            base_model=arguments.base_model,
            license_name=arguments.license,
            evaluation=evaluation,
            readme=readme,
            is_online=True,
        )
        if bundle.base is not None and arguments.base_model is None:
            print_error(
                "note: the base of this adapter is a local directory, which others do not have; "
                "--base-model gives its name on the Hub"
            )
        done = push(
            {**bundle.files, **card},
            address,
            message=f"Upload {(bundle.checkpoint or source).name}",
            private=not arguments.public,
            num_threads=arguments.num_threads,
        )
    seconds = time.monotonic() - started
    page = web_page(address)
    text = (
        f"uploaded {page}: commit {done.commit[:12]}, {size_text(done.nbytes)} in {seconds:.1f} s"
    )
    if done.was_there:
        text = f"{page} has it already, at commit {done.commit[:12]}"
    document = {"url": page, "seconds": seconds, **asdict(done)}
    return print_document(arguments, document, text)


def run_pull(arguments: Namespace) -> int:
    """Download a repository of the Hub into a directory."""
    from automodel_ckpt.hub.pull import pull
    from automodel_ckpt.hub.repository import HubAddress

    address = HubAddress.parse(arguments.url, "ckpt pull")
    directory = download_directory(arguments.directory, address.repo)
    started = time.monotonic()
    done = pull(address, directory, print_error, num_threads=arguments.num_threads)
    seconds = time.monotonic() - started
    document = {**asdict(done), "path": str(done.path), "seconds": seconds}
    size = f"{size_text(done.nbytes)} in {seconds:.1f} s, verified"
    if done.has_manifest:
        size += ", also by the manifest of the export"
    text = f"downloaded {done.path}: commit {done.commit[:12]}, {size}"
    return print_document(arguments, document, text)


def run_card(arguments: Namespace) -> int:
    """Run ``ckpt card``. Makes no request to the Hub."""
    from automodel_ckpt.hub.bundle import README, described
    from automodel_ckpt.hub.card import card_files
    from automodel_ckpt.hub.repository import HubAddress

    _check_base(arguments)
    source = find_checkpoint(Path(arguments.path))
    address = HubAddress("my-org/my-model")
    if arguments.repo is not None:
        address = HubAddress.parse(arguments.repo, "ckpt card")
    bundle = described(source, base_model=arguments.base_model)
    _check_own_card(arguments, bundle)
    files = card_files(
        bundle,
        address,
        base_model=arguments.base_model,
        license_name=arguments.license,
        evaluation=_metrics(arguments.eval),
    )
    text = files[README].decode()
    document = {"card": text, "files": sorted(files)}
    sys.stdout.write(f"{json.dumps(document)}\n" if arguments.json else text)
    return EXIT_DONE


def reject_hub_options(arguments: Namespace) -> None:
    """Raise :class:`RecipeError` for options that apply to the Hub, if the target is a store."""
    options = ("public", "revision", "card", "base_model", "license", "eval")
    _reject(arguments, options, "without hub:ORG/NAME")


def _reject(arguments: Namespace, options: Sequence[str], condition: str) -> None:
    """Raise :class:`RecipeError` for the first of *options* that was given, because of a *condition*."""
    for option in options:
        value = getattr(arguments, option)
        if value:
            raise without_effect(arguments.command, option_flag(option), value, condition)


def _check_own_card(arguments: Namespace, bundle: Bundle) -> None:
    """Raise :class:`RecipeError` for options about the content of a card, if none is written."""
    if bundle.readme is not None:
        card = bundle.directory / "README.md"
        _reject(arguments, _WRITTEN, f"beside {card}, which is the card")


def _check_base(arguments: Namespace) -> None:
    from automodel_ckpt.hub.repository import check_repo

    if arguments.base_model is not None:
        check_repo(arguments.base_model, "--base-model")


def _readme(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            "this file is not UTF-8 text", "--card", f"{path} (byte {error.start})", TO_UTF8
        ) from error


def _metrics(paths: Sequence[str]) -> list[Metric]:
    """Read the results in files of ``ckpt eval --json``. Raises :class:`RecipeError` for other files."""
    from automodel_ckpt.hub.card import Metric

    found = []
    for path in paths:
        try:
            for each in parse_json(Path(path).read_bytes())["metrics"]:
                task, metric = str(each["task"]), str(each["metric"])
                value, error = _finite(each["value"]), _finite(each.get("stderr"))
                if value is None:
                    print_error(
                        f"note: {task} {metric} is not a finite number in {path}; the card leaves it out"
                    )
                else:
                    found.append(Metric(task, metric, value, error))
        # OverflowError: JSON has integers of any size.
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise RecipeError(
                "this is not the output of `ckpt eval --json`",
                "--eval",
                f"{path} ({type(error).__name__})",
            ) from error
    return found


def _finite(value: Any) -> float | None:
    """Convert a number of a JSON document; None for NaN and infinity, which `ckpt eval` prints as null."""
    return float(value) if value is not None and math.isfinite(value) else None
