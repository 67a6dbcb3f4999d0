"""Write docs/images/loss.svg: the loss in the report of the run that ``make demo`` kills and resumes.

python -m tools.make_picture [RUN]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    run = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "runs/demo/killed")
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.html")
        ckpt = Path(sys.executable).with_name("ckpt")
        subprocess.run([ckpt, "plot", run, "-o", report], stdout=subprocess.DEVNULL, check=True)
        page = report.read_text()
    style = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)[0]
    style += "svg{background:var(--card);font-family:sans-serif}"
    attributes, content = re.findall(r"<svg (.*?)>(.*?</svg>)", page, re.DOTALL)[0]
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}><style>{style}</style>{content}'
    )
    (ROOT / "docs/images/loss.svg").write_text(f"{picture}\n")


if __name__ == "__main__":
    main()
