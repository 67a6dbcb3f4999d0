"""parse_json: content of the program's own files is parsed, content that takes too much memory is rejected before."""

import re
import time
from pathlib import Path

import pytest

import automodel_ckpt
from automodel_ckpt.checkpoint.files.safe_open import (
    FREE_BYTES,
    parse_json,
)

ELEMENTS = [b"[]", b'"ab"', b"257", b'{"a":[]}']


def repeated(element: bytes, num_bytes: int) -> bytes:
    return b'{"a":[' + (element + b",") * (num_bytes // (len(element) + 1)) + b"1]}"


@pytest.mark.parametrize("element", ELEMENTS)
def test_content_that_takes_many_times_its_size_is_rejected_before_it_is_parsed(
    element: bytes,
) -> None:
    data = repeated(element, FREE_BYTES // 10)
    begin = time.thread_time()
    with pytest.raises(ValueError, match="too much memory"):
        parse_json(data)
    assert time.thread_time() - begin < 1
    with pytest.raises(ValueError, match="too much memory"):
        parse_json(data.decode())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":"\xff"}', "not UTF-8 at byte 6"),
        ('{"a":1}'.encode("utf-16"), "not UTF-8 at byte 0"),
        (b"", "Expecting value"),
        (b"9" * 5000, "integer string conversion"),
    ],
)
def test_content_that_is_no_json_is_a_short_value_error(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(content)
    assert len(str(caught.value)) < 200


def test_files_that_others_can_write_are_parsed_by_no_other_parser() -> None:
    package = Path(automodel_ckpt.__file__).parent
    with_parser: set[str] = set()
    for directory in ("checkpoint", "convert", "logs", "optim", "training"):
        for path in (package / directory).rglob("*.py"):
            if re.search(r"\bjson\.loads?\(", path.read_text()):
                with_parser.add(path.relative_to(package).as_posix())
    # What this process or the trainer beside it has just written.
    own_content = {
        "checkpoint/export/hf_assets.py",
        "checkpoint/sources/model_files.py",
        "checkpoint/remote/child_process.py",
        "checkpoint/saving/adapter_assets.py",
        "checkpoint/state/model_config.py",
        "checkpoint/jobs/jobs.py",
        "convert/targets/compressed_tensors.py",
        "logs/follow.py",
        "training/kinds/teacher.py",
        "training/parts/init_from.py",
    }
    assert with_parser == {"checkpoint/files/safe_open.py", *own_content}
