"""Templates end: whatever they loop over and however they grow, within a time and a size; others render as before."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from jinja2 import UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from automodel_ckpt.data import templates
from automodel_ckpt.data.chat import ChatTemplate
from automodel_ckpt.data.fields import FieldTemplate
from automodel_ckpt.data.templates import BoundedEnvironment, TemplateTooCostly
from automodel_ckpt.data.turns import UnusableSample
from automodel_ckpt.errors import RecipeError

LOOP = "{% for a in range(90000) %}"
END = "{% endfor %}"
BIG = "{% set b = 'x' * 1000000 %}"
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
COSTLY = {
    "nested loops": LOOP * 4 + END * 4,
    "nested loops that write": LOOP * 3 + "some text" + END * 3,
    "a loop whose condition is never true": LOOP + "{% for c in range(90000) if false %}{% endfor %}" * 9 + END,
    "a recursive loop": "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "a recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro that writes much": "{% macro f() %}" + "y" * 9999 + "{% endmacro %}" + LOOP + "{% set x = f() %}" + END,
    "a text that doubles": "{% set ns = namespace(a='x') %}" + LOOP + "{% set ns.a = ns.a ~ ns.a %}" + END,
    "a sum that doubles": "{% set ns = namespace(a='x') %}" + LOOP + "{% set ns.a = ns.a + ns.a %}" + END,
    "a block that doubles": "{% set b = 'xx' %}" + "{% set b %}{{ b }}{{ b }}{% endset %}" * 40,
    "a list that doubles": "{% set b = ['x'] %}" + "{% set b = [b, b] %}" * 40 + "{{ b }}",
    "lists of lists that double": "{% set b = ['x'] %}" + "{% set b = b + b %}" * 40,
    "a mapping that doubles": "{% set b = {} %}" + "{% set b = {'x': b, 'y': b} %}" * 40 + "{{ b|tojson }}",
    "namespaces that double": "{% set b = namespace() %}" + "{% set b = namespace(x=b, y=b) %}" * 40 + "{{ b }}",
    "calls that double": "{% set b = dict() %}" + "{% set b = dict(x=b, y=b) %}" * 40 + "{{ b|string }}",
    "equal lists": BIG + "{% set c = ('y' ~ b)[1:] %}" + LOOP + "{% set d = [b] * 20 == [c] * 20 %}" + END,
    "a search in a list": BIG + "{% set c = [b, b, b, b] %}" + LOOP + "{% set d = 'y' in c %}" + END,
    "a product": "{{ 'x' * 10000000000 }}",
    "a product of a list": BIG + "{% set b = [b] * 10000 %}{{ b }}",
    "a product from the right": "{{ 10000000000 * ['x'] }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "powers of powers": "{% set ns = namespace(a=9) %}" + LOOP + "{% set ns.a = ns.a * ns.a %}" + END,
    "a folded constant": "{{ 'x'|center(10000000000) }}",
    "center": "{{ 'x'.center(10000000000) }}",
    "ljust by a name": "{{ ('x'|attr('ljust'))(10000000000) }}",
    "zfill": "{{ '1'.zfill(10000000000) }}",
    "bytes": "{{ 'x'.encode().ljust(10000000000) }}",
    "bytes of a number": "{{ (1).to_bytes(10000000000, 'big') }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(1000000) }}",
    "replace": BIG + "{{ b.replace('x', b) }}",
    "the filter replace": BIG + "{{ b|replace('x', b) }}",
    "replace of nothing": BIG + "{{ b.replace('', b) }}",
    "join": BIG + "{{ b.join(range(90000)|map('string')) }}",
    "the filter join": BIG + "{{ range(90000)|join(b) }}",
    "join of shared texts": BIG + "{{ ''.join(([b] * 30) + ([b] * 30)) }}",
    "translate": BIG + "{{ b.translate({120: b}) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "the filter format": "{{ '%10000000000d'|format(1) }}",
    "a precision": "{{ '%.1000000000f' % 1 }}",
    "a given width": "{{ '%*d' % (10000000000, 1) }}",
    "str.format": "{{ '{:>10000000000}'.format(1) }}",
    "a width given to str.format": "{{ '{:>{w}}'.format(1, w=10000000000) }}",
    "format of one mapping": BIG + "{{ ('%(b)s' * 10000) % {'b': b} }}",
    "indent": "{{ ('x\n' * 9999)|indent(1000000) }}",
    "batch": "{{ [1]|batch(10000000000, 'x')|list }}",
    "slice": "{{ [1]|slice(10000000000)|list }}",
    "tojson": "{{ [1, 2]|tojson(indent=1000000000) }}",
    "round": "{{ 1.5|round(1000000000) }}",
    "a sum of lists": "{{ ([[1]] * 1000000)|sum(start=[]) }}",
    "striptags": "{{ ('<' * 1000000)|striptags }}",
    "urlize": "{{ ('www.' * 1000000)|urlize }}",
    "lipsum": "{{ lipsum(1000000) }}",
    "a mapping's keys": "{% set ns = namespace(a='x') %}" + LOOP + "{% set x = dict.fromkeys(range(90000)) %}" + END,
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_template_that_would_not_end_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(templates, "MAX_SIZE", 2**21)
    began = time.thread_time()
    with pytest.raises((TemplateTooCostly, UndefinedError, RecursionError)):
        BoundedEnvironment().from_string(COSTLY[name]).render(dict=dict)
    assert time.thread_time() - began < 1


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
    """{{ 'abc' | replace('b', 'xx') | upper | center(9) | indent(2) }}{{ 'a-'.replace('-', '+').join(['x', 'y']) }}""",
    """{% set x %}a{{ messages | length }}{% endset %}{{ x ~ undefined_name ~ none ~ 1.5 }}
    {% filter upper %}b{{ x }}{% endfilter %}""",
    """{{ {'a': 1, 'b': [2]} | items | list }}{{ 'user' in messages[1].role }}{{ 'x' not in ['x'] }}
    {{ messages == messages }}""",
    """{{ range(3) | batch(2) | list }}{{ [3, 1] | sort | first }}{{ 'x' if messages is defined }}{{ [1, 2] | sum }}""",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_other_templates_render_what_jinja_renders(text: str) -> None:
    options: dict[str, Any] = {"extensions": ["jinja2.ext.loopcontrols"], "trim_blocks": True, "lstrip_blocks": True}
    plain = ImmutableSandboxedEnvironment(**options).from_string(text)
    bounded = BoundedEnvironment(**options).from_string(text)
    assert bounded.render(messages=MESSAGES) == plain.render(messages=MESSAGES) != ""
    assert "".join(bounded.generate(messages=MESSAGES)) == plain.render(messages=MESSAGES)


def test_a_long_conversation_is_within_the_limits() -> None:
    template = BoundedEnvironment().from_string(HARMLESS[0] + HARMLESS[3] + HARMLESS[6])
    talk = [{"role": "user", "content": "x" * 5000}, *[{"role": "assistant", "content": "y" * 5000}] * 400]
    assert len(template.render(messages=talk)) > 2_000_000


def test_rendering_takes_little_longer_than_without_limits() -> None:
    talk = MESSAGES * 10
    made = [
        kind().from_string(HARMLESS[0] + HARMLESS[4]) for kind in (ImmutableSandboxedEnvironment, BoundedEnvironment)
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(30):
        for template, taken in zip(made, seconds, strict=True):
            began = time.thread_time()
            template.render(messages=talk)
            taken.append(time.thread_time() - began)
    assert min(seconds[1]) < 4 * min(seconds[0])


def test_a_chat_template_is_stopped_in_any_thread(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.1)
    endless = COSTLY["nested loops"]
    errors = []

    def render(text: str) -> None:
        with pytest.raises(UnusableSample) as caught:
            ChatTemplate(tokenizer, text, {}, False).sample(TALK, None)
        errors.append(str(caught.value.value))

    for text in (endless, endless + "{% generation %}{% endgeneration %}"):
        thread = threading.Thread(target=render, args=(text,))
        thread.start()
        thread.join()
    assert errors == ["TemplateTooCostly: the template takes more than 0.1 seconds"] * 2


def test_a_template_of_fields_is_stopped_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.1)
    for text in (COSTLY["nested loops"] + "{{ x }}", COSTLY["a product"]):
        with pytest.raises(RecipeError, match=r"fails on a sample[\s\S]*here:3[\s\S]*TemplateTooCostly"):
            FieldTemplate(text).write({"x": 1}, lambda: "here:3")
    with pytest.raises(RecipeError, match="at most 1048576 characters"):
        FieldTemplate("{{ x }}" + "y" * 2**20)
    for nested in ("{{ " + "(" * 9999 + ")" * 9999 + " }}", LOOP * 30 + END * 30):
        with pytest.raises(RecipeError, match="a field template is not valid Jinja"):
            FieldTemplate(nested)
    with pytest.raises(RecipeError, match="RecursionError"):
        FieldTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").write({}, lambda: "here:3")
