"""``ckpt env``: information for a bug report, also where torch and NumPy are broken."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from automodel_ckpt import __version__


def test_each_line_has_a_value_or_the_error_where_torch_and_numpy_are_broken(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open')\n")
    (tmp_path / "numpy.py").write_text("raise OSError('libopenblas.so: cannot open')\n")
    variables = {
        "PYTHONPATH": str(tmp_path),
        "HF_TOKEN": "hf_secret",
        "AUTOMODEL_CKPT_API_KEY": "b_secret",
        "HF_ENDPOINT": "https://user:a_secret@hub.example/x",
        "AWS_SECRET_ACCESS_KEY": "c_secret",
        "NCCL_DEBUG": "INFO",
    }
    # Modules in the current directory are not imported.
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "importlib", "types", "safetensors"):
        (here / f"{name}.py").write_text("import os\nos._exit(3)\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("ckpt"), "env", "--json"],
        cwd=here,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["automodel_ckpt"]["version"] == __version__
    assert "OSError: libtorch_cpu.so: cannot open" in found["torch"]["build and devices"]
    assert found["libraries"]["safetensors"] == version("safetensors")
    assert found["current directory"]["free"].endswith("B")
    assert found["machine"]["kernel"].split()[1] == os.uname().release
    shown = found["environment variables"]
    assert shown["NCCL_DEBUG"] == "INFO"
    assert shown["HF_TOKEN"] == shown["AUTOMODEL_CKPT_API_KEY"] == "(set, not shown)"
    assert shown["HF_ENDPOINT"] == "https://hub.example/x"
    assert not shown.keys() & {"HOME", "AWS_SECRET_ACCESS_KEY"}
    assert "_secret" not in done.stdout
