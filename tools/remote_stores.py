"""Run the protocol of remote checkpoints on servers of other stores than S3, on this machine.

    python -m tools.remote_stores [azure] [gcs] [memory] [file]

``azure``: Azurite (npm) with adlfs. ``gcs``: gcp-storage-emulator (PyPI) with gcsfs; it ignores conditions on
generations, so that only what holds without them is checked. The libraries and servers are installed into ``.stores``,
which needs the registries once. ``memory`` and ``file`` need nothing. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import site
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.remote.pull import pull_checkpoint
from automodel_ckpt.checkpoint.remote.push import push_checkpoint
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.run import policy
from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.errors import LeaseLost
from tests.support.models import tiny

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".stores"
PYTHON = HOME / "bin" / "python"
_START_SECONDS = 60
_FIRST, _SECOND = "epoch_0_step_10", "epoch_0_step_20"
_AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The key of every Azurite, which its documentation has."""


def prepare() -> None:
    """Make an environment with the libraries and servers, beside that of this interpreter."""
    if (HOME / ".ready").exists():
        return
    venv.create(HOME, with_pip=True)
    (paths,) = HOME.glob("lib/python*/site-packages")
    (paths / "trainer.pth").write_text("\n".join([*site.getsitepackages(), str(ROOT)]))
    packages = ["adlfs>=2024.12", "gcsfs>=2025.9", "gcp-storage-emulator"]
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", *packages], check=True)
    subprocess.run(["npm", "install", "--silent", "--prefix", HOME, "azurite"], check=True)
    (HOME / ".ready").touch()


@contextlib.contextmanager
def azure(directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Run Azurite; yield a URL, and the environment of its clients."""
    port = _free_port()
    command: list[str | Path] = [
        HOME / "node_modules/.bin/azurite-blob",
        "--blobPort",
        str(port),
        "--silent",
        "--disableTelemetry",
    ]
    command += ["--location", directory, "--skipApiVersionCheck"]
    endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
    settings = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": "devstoreaccount1",
        "AccountKey": _AZURITE_KEY,
        "BlobEndpoint": endpoint,
    }
    text = ";".join(f"{name}={value}" for name, value in settings.items())
    with _server(command, port):
        yield "az://bucket/run", {"AZURE_STORAGE_CONNECTION_STRING": text}


@contextlib.contextmanager
def gcs(directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Run the emulator of Google Cloud Storage; yield a URL, and the environment of its clients."""
    port = _free_port()
    command: list[str | Path] = [
        HOME / "bin/gcp-storage-emulator",
        "start",
        "--port",
        str(port),
        "--in-memory",
    ]
    command += ["--default-bucket", "bucket"]
    with _server(command, port):
        # Otherwise gcsfs looks for zonal buckets with gRPC, which the emulator does not have.
        plain = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        yield "gs://bucket/run", {"STORAGE_EMULATOR_HOST": f"http://localhost:{port}", **plain}


@contextlib.contextmanager
def memory(directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The file system of fsspec in memory."""
    yield "memory://bucket/run", {}


@contextlib.contextmanager
def file(directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A directory."""
    yield f"file://{directory}/run", {}


STORES = {"azure": azure, "gcs": gcs, "memory": memory, "file": file}


@contextlib.contextmanager
def _server(command: list[str | Path], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def check(url: str, has_conditions: bool, directory: Path) -> None:
    """Run the checks against the store at *url*. Raises AssertionError, and what the library of the store raises."""
    local = directory / "local"
    made = tiny.recipe()
    for step in (10, 20):
        tiny.train(made)
        tiny.save(local, made, step)
    store = Store(url, {"anon": True} if url.startswith("gs:") else {})
    if url.startswith("az:"):
        store.fs.mkdir("bucket")
    _objects(store, has_conditions)
    _checkpoints(store, has_conditions, local, directory)


def _objects(store: Store, has_conditions: bool) -> None:
    store.write("object", b"12345")
    assert store.read("object", 1, 3) == b"23" and store.size("object") == 5
    version = store.version("object")
    assert version is not None and store.version("absent") is None
    assert store.versions("")["object"] in ("", version)
    assert store.replace("object", b"second", version)
    blocks = [bytes(3 << 20)] * 4
    assert store.upload("large", blocks, exclusive=has_conditions)
    assert store.size("large") == 12 << 20
    if has_conditions:
        assert not store.create("object", b"third")
        assert not store.replace("object", b"third", version)
        assert not store.delete_version("object", version)
        assert not store.upload("large", blocks, exclusive=True)
    assert store.read("object") == b"second"
    current = store.version("object")
    assert current is not None and store.delete_version("object", current)
    store.delete(["large", "absent"])
    assert store.sizes() == {}


def _checkpoints(store: Store, has_conditions: bool, local: Path, directory: Path) -> None:
    run = RemoteRun(store)
    assert run.take_over() == has_conditions
    for name in (_FIRST, _SECOND):
        push_checkpoint(run, local / name, directory / "memory")
        run.point("val_loss", "min")
    assert push_checkpoint(run, local / _SECOND, directory / "memory") == 0
    assert run.pointed(layout.LATEST) == _SECOND
    (directory / "pulled").mkdir()
    pulled = pull_checkpoint(run, _SECOND, directory / "pulled")
    for each in Manifest.read(pulled).files:
        assert (pulled / each).read_bytes() == (local / _SECOND / each).read_bytes()
    later = RemoteRun(store)
    later.take_over()
    assert later.supersede_after(10, "val_loss", "min") == [_SECOND]
    assert later.pointed(layout.LATEST) == _FIRST
    try:
        run.point("val_loss", "min")
        raise AssertionError("an earlier start still writes")
    except LeaseLost:
        pass
    push_checkpoint(later, local / _SECOND, directory / "memory")
    later.point("val_loss", "min")
    assert later.prune(policy.KeepPolicy(last=1), "val_loss") == [_FIRST]
    assert [str(name) for name in later.names()] == [_SECOND]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", nargs="*", choices=[*STORES, []], help="all by default")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = options.stores or list(STORES)
    if options.check:
        with tempfile.TemporaryDirectory() as directory:
            check(options.check, chosen == ["azure"], Path(directory))
        return 0
    failed = 0
    for name in chosen:
        if name in ("azure", "gcs"):
            prepare()
        python = PYTHON if name in ("azure", "gcs") else sys.executable
        with tempfile.TemporaryDirectory() as directory, STORES[name](Path(directory)) as found:
            url, environment = found
            command = [python, "-m", "tools.remote_stores", name, "--check", url]
            done = subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT)
        print(f"{name}: {'failed' if done.returncode else 'passed'}", flush=True)
        failed += bool(done.returncode)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
