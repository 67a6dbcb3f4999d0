"""``ckpt card``, and ``ckpt push`` and ``ckpt pull`` for repositories of the Hugging Face Hub (``hub:ORG/NAME``)."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.cli.common.arguments import WHERE, option_flag, without_effect
from automodel_ckpt.cli.common.paths import download_directory, find_checkpoint
from automodel_ckpt.cli.common.terminal import print_error, printable, size_text
from automodel_ckpt.errors import EXIT_DONE, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.hub.bundle import Bundle
    from automodel_ckpt.hub.card import Metric


def add_card_arguments(command: argparse.ArgumentParser) -> None:
    """Describe the command ``ckpt card``."""
    command.description = (
        "Print the model card (README.md) that `ckpt push` uploads to the Hugging Face Hub with a model, to review it. "
        "It contains no paths, users or hosts."
    )
    command.add_argument("path", metavar="PATH", help=f"{WHERE}, or an export")
    command.add_argument(
        "repo", nargs="?", metavar="hub:ORG/NAME", help="repository that the card is for"
    )
    command.add_argument("--output", "-o", metavar="DIR", help="write README.md there instead")
    command.add_argument(
        "--force", action="store_true", help="with --output, replace files that exist"
    )
    _add_facts(command.add_argument)


def add_push_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``ckpt push`` that apply to the Hub."""
    group = command.add_argument_group("with hub:ORG/NAME[@BRANCH]")
    group.add_argument(
        "--public",
        action="store_true",
        help="publish the model; otherwise a new repository is private, and a public one is an error",
    )
    group.add_argument("--revision", metavar="BRANCH", help="branch (default: main)")
    group.add_argument(
        "--card", metavar="FILE", help="README.md to upload instead of a written one"
    )
    _add_facts(group.add_argument)


def _add_facts(add: Callable[..., Any]) -> None:
    add(
        "--base-model",
        metavar="ORG/NAME",
        help="name of the base model on the Hub, if it was in a local directory",
    )
    add("--license", metavar="ID", help="license, instead of that of the base")
    add(
        "--eval",
        metavar="FILE",
        action="append",
        default=[],
        help="results of `ckpt eval --json` for the card; can be repeated",
    )


def run_push(arguments: argparse.Namespace) -> int:
    """Upload the model of a checkpoint or an export to the Hub."""
    from automodel_ckpt.hub.address import HubAddress, check_revision
    from automodel_ckpt.hub.bundle import opened
    from automodel_ckpt.hub.card import card_files
    from automodel_ckpt.hub.push import push

    address = HubAddress.parse(arguments.url, "ckpt push")
    for option in ("metric", "max", "max_mb_per_second"):
        if getattr(arguments, option):
            value = getattr(arguments, option)
            raise without_effect("push", option_flag(option), value, "with hub:ORG/NAME")
    if arguments.revision is not None:
        check_revision(arguments.revision, "--revision")
        if address.revision not in (None, arguments.revision):
            raise RecipeError(
                "two branches are given",
                where="ckpt push",
                value=f"{address.revision}, --revision {arguments.revision}",
                hint="remove one of them",
            )
        address = HubAddress(address.repo, arguments.revision)
    _check_given(arguments)
    started = time.monotonic()
    readme, evaluation = _readme(arguments.card), _metrics(arguments.eval)
    if readme is not None:
        _check_written_card(arguments, "with --card")
    source = find_checkpoint(Path(arguments.path))
    with opened(source, print_error, base_model=arguments.base_model) as bundle:
        if readme is None:
            _check_own_card(arguments, bundle)
        card = card_files(
            bundle,
            address.repo,
            revision=address.revision,
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
        name = bundle.checkpoint.name if bundle.checkpoint is not None else source.name
        done = push(
            {**bundle.files, **card},
            address,
            message=f"Upload {name}",
            private=not arguments.public,
            num_threads=arguments.num_threads,
        )
    seconds = time.monotonic() - started
    _report_push(arguments, done, seconds)
    return EXIT_DONE


def _report_push(arguments: argparse.Namespace, done: Any, seconds: float) -> None:
    from automodel_ckpt.hub.client import web_page

    page = web_page(done.address)
    if arguments.json:
        document = {
            "url": page,
            "commit": done.commit,
            "nbytes": done.nbytes,
            "seconds": seconds,
            "was_there": done.was_there,
        }
        print(json.dumps(document))
    elif done.was_there:
        print(f"{printable(page)} has it already, at commit {done.commit[:12]}")
    else:
        size = size_text(done.nbytes)
        print(
            f"uploaded {printable(page)}: commit {done.commit[:12]}, {size} in {seconds:.1f} s, verified"
        )


def run_pull(arguments: argparse.Namespace) -> int:
    """Download a repository of the Hub into a directory."""
    from automodel_ckpt.hub.address import HubAddress
    from automodel_ckpt.hub.pull import pull

    address = HubAddress.parse(arguments.url, "ckpt pull")
    directory = download_directory(arguments.directory, address.repo)
    started = time.monotonic()
    done = pull(address, directory, print_error, num_threads=arguments.num_threads)
    seconds = time.monotonic() - started
    if arguments.json:
        document = {
            "path": str(done.directory),
            "commit": done.commit,
            "nbytes": done.nbytes,
            "seconds": seconds,
            "has_manifest": done.has_manifest,
        }
        print(json.dumps(document))
        return EXIT_DONE
    size = size_text(done.nbytes)
    checked = (
        "verified" if not done.has_manifest else "verified, also by the manifest of the export"
    )
    print(
        f"downloaded {printable(str(done.directory))}: commit {done.commit[:12]}, {size} in {seconds:.1f} s, {checked}"
    )
    return EXIT_DONE


def run_card(arguments: argparse.Namespace) -> int:
    """Run ``ckpt card``. Makes no request to the Hub."""
    from automodel_ckpt.hub.address import HubAddress
    from automodel_ckpt.hub.bundle import README, described
    from automodel_ckpt.hub.card import card_files

    _check_given(arguments)
    if arguments.force and arguments.output is None:
        raise without_effect("card", "--force", "", "without --output")
    source = find_checkpoint(Path(arguments.path))
    address = HubAddress("my-org/my-model")
    if arguments.repo is not None:
        address = HubAddress.parse(arguments.repo, "ckpt card")
    bundle = described(source, base_model=arguments.base_model)
    _check_own_card(arguments, bundle)
    files = card_files(
        bundle,
        address.repo,
        revision=address.revision,
        base_model=arguments.base_model,
        license_name=arguments.license,
        evaluation=_metrics(arguments.eval),
    )
    if arguments.output:
        _write_card(files, Path(arguments.output), overwrite=arguments.force)
    if arguments.json:
        print(json.dumps({"card": files[README].decode(), "files": sorted(files)}))
    elif arguments.output:
        print(printable(str(Path(arguments.output) / README)))
    else:
        sys.stdout.write(files[README].decode())
    return EXIT_DONE


def _write_card(files: Mapping[str, bytes], directory: Path, *, overwrite: bool) -> None:
    """Write a card. Raises :class:`SaveFailed` if one of them exists, and *overwrite* is false."""
    from automodel_ckpt.convert.publishing import check_file_target, published_file

    for name in files:
        check_file_target(directory / name, overwrite=overwrite)
    for name, content in files.items():
        with published_file(directory / name, print_error, what="the model card") as staging:
            staging.write_bytes(content)


def reject_hub_options(arguments: argparse.Namespace) -> None:
    """Raise :class:`RecipeError` for options that apply to the Hub, if the target is a store."""
    for option in ("public", "revision", "card", "base_model", "license", "eval"):
        if getattr(arguments, option):
            raise without_effect("push", option_flag(option), arguments.url, "without hub:ORG/NAME")


def _check_own_card(arguments: argparse.Namespace, bundle: Bundle) -> None:
    from automodel_ckpt.hub.bundle import README

    if bundle.readme is not None:
        _check_written_card(arguments, f"beside {bundle.directory / README}, which is the card")


def _check_written_card(arguments: argparse.Namespace, condition: str) -> None:
    """Raise :class:`RecipeError` for options about the content of a card, if *condition* is that none is written."""
    for option in ("license", "eval"):
        value = getattr(arguments, option)
        if value:
            raise without_effect(arguments.command, option_flag(option), value, condition)


def _check_given(arguments: argparse.Namespace) -> None:
    from automodel_ckpt.hub.address import check_repo

    if arguments.base_model is not None:
        check_repo(arguments.base_model, "--base-model")


def _readme(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            "this file is not UTF-8 text",
            where="--card",
            value=f"{path} (byte {error.start})",
            hint="convert it to UTF-8, for example with iconv",
        ) from error


def _metrics(paths: Sequence[str]) -> list[Metric]:
    """Read the results in files of ``ckpt eval --json``. Raises :class:`RecipeError` for other files."""
    from automodel_ckpt.checkpoint.files.bounded_json import parse_json
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
                where="--eval",
                value=f"{path} ({type(error).__name__})",
                hint="`ckpt eval ... --json > results.json` writes such a file",
            ) from error
    return found


def _finite(value: Any) -> float | None:
    """Convert a number of a JSON document; None for NaN and infinity, which `ckpt eval` prints as null."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
