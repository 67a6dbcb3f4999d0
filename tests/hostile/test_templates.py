"""Templates end, whatever they loop over and however they grow, in every command that renders one."""

import io
import json
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer

from automodel_ckpt.base.bounded_templates import BoundedEnvironment, TemplateTooCostly
from automodel_ckpt.cli import ckpt, train
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.measure import harness
from tests.support.models.stand_ins import LLAMA_CHAT, write_model

Capture = pytest.CaptureFixture[str]
LOOP = "{% for a in range(90000) %}"
END = "{% endfor %}"
BIG = "{% set b = 'x' * 1000000 %}"
GROWING = "{% set ns = namespace(a=['x'], b='x', c=9) %}" + LOOP
COSTLY = {
    "nested loops": LOOP * 4 + END * 4,
    "a comparison of lists that double": "{% set b = ['x'] %}{% set c = ['x'] %}"
    + "{% set b = [b, b] %}{% set c = [c, c] %}" * 60
    + "{{ b == c }}",
    "searches in a filter": "{% set b = range(99999)|list %}{{ b|select('in', b)|list }}",
}
"""Ended by the limit of time."""
LARGE = {
    "a product": "{{ 'a' * 10**10 }}",
    "a negative product before others": "{% set b = 'xxxxxxxxxx' * -(10 ** 8) %}{{ 'a' * 10 ** 8 }}",
    "a product of a list": BIG + "{% set b = [b] * 10000 %}{{ b }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "powers of powers": GROWING + "{% set ns.c = ns.c * ns.c %}" + END,
    "a remainder of large numbers": "{% set b = ('f' * 9999999)|int(base=16) %}{{ b % 7 }}",
    "a concatenation that doubles": GROWING + "{% set ns.b = ns.b ~ ns.b %}" + END,
    "a sum that doubles": GROWING + "{% set ns.b = ns.b + ns.b %}" + END,
    "a list that doubles": GROWING + "{% set ns.a = ns.a + ns.a %}" + END,
    "a block that doubles": BIG + "{% set b %}{{ b }}{{ b }}{% endset %}" * 40,
    "slices that are kept": BIG + GROWING + "{% set ns.a = ns.a + [b[a:]] %}" + END,
    "a macro's text": "{% macro f() %}"
    + "y" * 9999
    + "{% endmacro %}"
    + LOOP
    + "{% set x = f() %}"
    + END,
    "a loop's text": "{% set x %}" + LOOP + "y" * 9999 + END + "{% endset %}",
    "a search in a list": BIG + "{% set c = [b] * 100 %}{{ 'y' in c }}",
    "a tuple as a key": BIG + "{% set c = (b,) * 100 %}{{ {c: 1} }}",
    "replace": BIG + "{{ b.replace('x', b) }}",
    "the filter replace": BIG + "{{ b|replace(new=b, old='x') }}",
    "replace in a list": BIG + "{{ [b]|replace('x', b) }}",
    "join": BIG + "{{ b.join(range(90000)|map('string')) }}",
    "the filter join": BIG + "{{ range(90000)|join(b) }}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "a width of the filter format": "{{ '%10000000000d'|format(1) }}",
    "a precision": "{{ '%.1000000000f' % 1 }}",
    "a width as a value": "{{ '%*d' % (10000000000, 1) }}",
    "a width of str.format": "{{ '{:>10000000000}'.format(1) }}",
    "a width as a value of str.format": "{{ '{:>{w}}'.format(1, w=10000000000) }}",
    "a width in other digits": "{{ '{:٩0000000000}'.format(1) }}",
    "a width after a key with a parenthesis": "{{ '%((a))10000000000d' % {'(a)': 1} }}",
    "a width after a key with a brace": "{{ '{0[}]:10000000000}'.format({'}': 1}) }}",
    "a format with many keys": "{{ ('%(' * 1000000)|format }}",
    "a value that is written often": BIG + "{{ ('{0}' * 10000).format(b) }}",
    "indent": "{{ ('x\n' * 9999)|indent(1000000000) }}",
    "indent by a text": BIG + "{{ (b|replace('x', '\n'))|indent(b) }}",
    "tojson with an indentation": "{{ [1, 2]|tojson(indent=1000000000) }}",
    "tojson with separators": BIG + "{{ range(90000)|list|tojson(separators=(b, b)) }}",
    "round": "{{ 1.5|round(1000000000, 'floor') }}",
    "a message of an error": BIG + "{{ raise_exception([b] * 10000) }}",
}
"""Ended by a limit of size."""
REMOVED = {
    "a long format": "{{ ('{' ~ ':' * 1000000).format() }}",
    "the filter center": "{{ 'x'|center(10000000000) }}",
    "center": "{{ 'x'.center(10000000000) }}",
    "ljust by a name": "{{ ('x'|attr('ljust'))(10000000000) }}",
    "zfill": "{{ '1'.zfill(10000000000) }}",
    "bytes": "{{ 'x'.encode().ljust(10000000000) }}",
    "bytes of a number": "{{ (1).to_bytes(10000000000, 'big') }}",
    "batch": "{{ [1]|batch(10000000000, 'x')|list }}",
    "sum": "{{ ([[1]] * 1000000)|sum(start=[]) }}",
    "lipsum": "{{ lipsum(1000000) }}",
    "a recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a division by zero": "{{ 1 // 0 }}",
    "an undefined name": "{{ nothing.x }}",
}
"""Errors of other kinds."""
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a recipe that trains it on a conversation."""
    path = tmp_path_factory.mktemp("templates")
    write_model(path / "model", {"model_type": "llama"}, LLAMA_CHAT)
    (path / "train.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    builder = f"_target_: automodel_ckpt.data.chat.messages, path: {path}/train.jsonl"
    (path / "recipe.yaml").write_text(
        f"model: {{from_pretrained: {path}/model}}\ndataset: {{{builder}, seq_length: 64}}\n"
    )
    return path


def failure(capsys: Capture, directory: Path, template: str) -> str:
    """What ``ckpt-train`` reports about a chat template of the recipe."""
    (directory / "t.jinja").write_text(template)
    words = [str(directory / "recipe.yaml"), "--dataset.chat_template", f"{directory}/t.jinja"]
    began = time.thread_time()
    assert train.main(["--show-samples", "1", *words]) == 2
    assert time.thread_time() - began < 8
    reported = capsys.readouterr().err
    assert "Traceback" not in reported
    assert "hint:" in reported
    return reported


SLOW = "a list that doubles"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.further if name == SLOW else ()) for name in LARGE],
)
def test_a_template_that_makes_too_much_is_stopped(
    capsys: Capture, directory: Path, name: str
) -> None:
    assert "TemplateTooCostly" in failure(capsys, directory, LARGE[name])


@pytest.mark.parametrize("name", REMOVED)
def test_a_template_that_fails_is_an_error_with_a_hint(
    capsys: Capture, directory: Path, name: str
) -> None:
    assert "the chat template" in failure(capsys, directory, REMOVED[name])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("nested loops", marks=pytest.mark.further),
        pytest.param("a comparison of lists that double", marks=pytest.mark.further),
        "searches in a filter",
    ],
)
def test_a_template_that_would_not_end_is_stopped(
    capsys: Capture, directory: Path, name: str
) -> None:
    reported = failure(capsys, directory, COSTLY[name])
    assert "the template takes more than 5 seconds" in reported or "handles more" in reported


@pytest.mark.parametrize("command", [["generate", "-p", "x"], ["chat"]])
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LARGE["a product"], "TemplateTooCostly"),
        ("{{ raise_exception('no system') }}", "TemplateError: no system"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ " + "(" * 9999 + ")" * 9999 + " }}", "RecursionError"),
    ],
)
def test_models_whose_template_fails_answer_nothing(
    capsys: Capture,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    template: str,
    said: str,
) -> None:
    (directory / "model/chat_template.jinja").write_text(template)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    name, *words = command
    assert ckpt.main([name, str(directory / "model"), *words]) == 2
    reported = capsys.readouterr().err
    assert said in reported
    assert "hint:" in reported
    assert "Traceback" not in reported


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (LARGE["a product"], "TemplateTooCostly"),
        ("{{ " + "(" * 9999 + ")" * 9999 + " }}", "not valid Jinja"),
    ],
)
def test_templates_of_fields_have_the_same_limits(
    capsys: Capture, directory: Path, field: str, said: str
) -> None:
    data = directory / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    target = f"_target_: automodel_ckpt.data.text.prompt_completion, path: {data}, seq_length: 64"
    (directory / "fields.yaml").write_text(
        f"model: {{from_pretrained: {directory}/model}}\n"
        f"dataset: {{{target}, as_chat: false, prompt_field: {json.dumps(field)}}}\n"
    )
    assert train.main(["--show-samples", "1", str(directory / "fields.yaml")]) == 2
    assert said in capsys.readouterr().err


def test_a_harness_whose_model_renders_a_template_has_the_same_limits(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for lm_eval's model class, which calls the tokenizer as that one does."""

    class HFLM:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer = tokenizer

        def apply_chat_template(self, conversation: list[dict[str, str]]) -> Any:
            return self.tokenizer.apply_chat_template(conversation, tokenize=False)

    module = ModuleType("lm_eval.models.huggingface")
    vars(module)["HFLM"] = HFLM
    for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface"):
        monkeypatch.setitem(sys.modules, name, module)
    (directory / "model/chat_template.jinja").write_text(LARGE["a product"])
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    adapter = harness._adapter(lambda: None)(tokenizer)
    with pytest.raises(RecipeError, match="TemplateTooCostly"):
        adapter.apply_chat_template([{"role": "user", "content": "Hello"}])


def test_the_indentation_of_nested_lists_is_counted_before_it_is_written() -> None:
    text = "{% set n = namespace(x=range(2000)|list) %}"
    text += (
        "{% for _ in range(300) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x|tojson(indent=1000) }}"
    )
    begin = time.process_time()
    with pytest.raises(TemplateTooCostly):
        BoundedEnvironment().from_string(text).render()
    assert time.process_time() - begin < 2  # 600 MB take longer


def test_limits_hold_in_any_thread() -> None:
    errors: list[str] = []

    def render() -> None:
        with pytest.raises(Exception, match="handles more than") as caught:
            BoundedEnvironment().from_string(LARGE["a product"]).render()
        errors.append(type(caught.value).__name__)

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    assert errors == ["TemplateTooCostly"]


MESSAGES = [
    {"role": "system", "content": " be short "},
    {"role": "user", "content": [{"type": "text", "text": "2 + 2"}, {"type": "image"}]},
    {
        "role": "assistant",
        "content": "<think>a</think>four",
        "tool_calls": [{"name": "f", "arguments": {"x": [1, None]}}],
    },
    {"role": "tool", "content": "4"},
]
HARMLESS = [
    """{%- for m in messages %}{{ '<|' + m['role'] + '|>' ~ loop.index ~ (m.content if m.content is string) | trim }}
    {% if loop.last or loop.length > 9 %}end{% endif %}{% else %}none{% endfor %}""",
    """{% for m in messages if m.role != 'tool' recursive %}{{ loop.depth }}{{ m.role }}{% endfor %}""",
    """{% for m in messages[1:] %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ loop.previtem }}{% break %}
    {% endfor %}""",
    """{% set ns = namespace(n=0, seen=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
    {% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.seen }}{{ ns.seen | join(', ') }}""",
    """{% macro show(x, depth=0) %}{% if x is mapping %}{% for k, v in x | dictsort %}{{ k }}:{{ show(v, depth + 1) }};
    {% endfor %}{% elif x is iterable and x is not string %}{% for i in x %}{{ show(i) }}{% endfor %}{% else %}{{ x }}
    {% endif %}{% endmacro %}{{ show(messages) }}""",
    """{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call twice() %}x{% endcall %}""",
    """{% set parts = messages[2].content.split('</think>') %}{{ parts[0].split('<think>')[-1].lstrip('a') }}
    {{ parts[-1] }}""",
    """{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='role') | list }}
    {{ messages | tojson(indent=2) }}""",
    """{{ '%s has %05d' % ('x', 3) }}{{ '{:>5}'.format(1) }}{{ 'a' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] * 2 }}
    {{ (1, 2) }}""",
    """{{ 'abc' | replace('b', 'xx') | upper | indent(2) }}{{ 'a-'.replace('-', '+').join(['x', 'y']) }}""",
    """{% set x %}a{{ messages | length }}{% endset %}{{ x ~ undefined_name ~ none ~ 1.5 }}
    {% filter upper %}b{{ x }}{% endfilter %}""",
    """{{ {'a': 1, 'b': [2]} | items | list }}{{ 'user' in messages[1].role }}{{ 'x' not in ['x'] }}
    {{ messages == messages }}""",
    """{{ 121 | replace('1', 'x') }}{{ 1.25 | round(messages | length) }}""",
    """{{ range(3) | list }}{{ [3, 1] | sort | first }}{{ 'x' if messages is defined }}""",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_other_templates_render_what_jinja_renders(text: str) -> None:
    options: dict[str, Any] = {
        "extensions": ["jinja2.ext.loopcontrols"],
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    plain = ImmutableSandboxedEnvironment(**options).from_string(text)
    bounded = BoundedEnvironment(**options).from_string(text)
    assert bounded.render(messages=MESSAGES) == plain.render(messages=MESSAGES) != ""
    assert "".join(bounded.generate(messages=MESSAGES)) == plain.render(messages=MESSAGES)


def test_a_long_conversation_is_within_the_limits() -> None:
    template = BoundedEnvironment().from_string(HARMLESS[0] + HARMLESS[3] + HARMLESS[6])
    talk = [
        {"role": "user", "content": "x" * 5000},
        *[{"role": "assistant", "content": "y" * 5000}] * 400,
    ]
    assert len(template.render(messages=talk)) > 2_000_000
