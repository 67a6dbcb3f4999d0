"""Templates end: whatever they loop over and however they grow, within a time and a size; others render as before."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from jinja2 import TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from automodel_ckpt.data import templates
from automodel_ckpt.data.chat_template import ChatTemplate
from automodel_ckpt.data.fields import FieldTemplate
from automodel_ckpt.data.messages import UnusableSample
from automodel_ckpt.data.templates import (
    BoundedEnvironment,
    TemplateTooCostly,
    bound_chat_templates,
)
from automodel_ckpt.errors import RecipeError

LOOP = "{% for a in range(90000) %}"
END = "{% endfor %}"
BIG = "{% set b = 'x' * 1000000 %}"
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
COSTLY = {
    "nested loops": LOOP * 4 + END * 4,
    "nested loops that write": LOOP * 3 + "some text" + END * 3,
    "a loop whose condition is never true": LOOP
    + "{% for c in range(90000) if false %}{% endfor %}" * 9
    + END,
    "a recursive loop": "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "a recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro that writes much": "{% macro f() %}"
    + "y" * 9999
    + "{% endmacro %}"
    + LOOP
    + "{% set x = f() %}"
    + END,
    "a text that doubles": "{% set ns = namespace(a='x') %}"
    + LOOP
    + "{% set ns.a = ns.a ~ ns.a %}"
    + END,
    "a sum that doubles": "{% set ns = namespace(a='x') %}"
    + LOOP
    + "{% set ns.a = ns.a + ns.a %}"
    + END,
    "a block that doubles": "{% set b = 'xx' %}" + "{% set b %}{{ b }}{{ b }}{% endset %}" * 40,
    "a list that doubles": "{% set b = ['x'] %}" + "{% set b = [b, b] %}" * 40 + "{{ b }}",
    "lists of lists that double": "{% set b = ['x'] %}" + "{% set b = b + b %}" * 40,
    "a mapping that doubles": "{% set b = {} %}"
    + "{% set b = {'x': b, 'y': b} %}" * 40
    + "{{ b|tojson }}",
    "namespaces that double": "{% set b = namespace() %}"
    + "{% set b = namespace(x=b, y=b) %}" * 40
    + "{{ b }}",
    "calls that double": "{% set b = dict() %}"
    + "{% set b = dict(x=b, y=b) %}" * 40
    + "{{ b|string }}",
    "equal lists": BIG
    + "{% set c = ('y' ~ b)[1:] %}"
    + LOOP
    + "{% set d = [b] * 20 == [c] * 20 %}"
    + END,
    "a search in a list": BIG
    + "{% set c = [b, b, b, b] %}"
    + LOOP
    + "{% set d = 'y' in c %}"
    + END,
    "a product": "{{ 'x' * 10000000000 }}",
    "a product of a list": BIG + "{% set b = [b] * 10000 %}{{ b }}",
    "a product from the right": "{{ 10000000000 * ['x'] }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "powers of powers": "{% set ns = namespace(a=9) %}"
    + LOOP
    + "{% set ns.a = ns.a * ns.a %}"
    + END,
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
    "a mapping's keys": "{% set ns = namespace(a='x') %}"
    + LOOP
    + "{% set x = dict.fromkeys(range(90000)) %}"
    + END,
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_template_that_would_not_end_is_stopped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """{{ 121 | replace('1', 'x') }}{{ 1.25 | round(messages | length) }}""",
    """{{ range(3) | batch(2) | list }}{{ [3, 1] | sort | first }}{{ 'x' if messages is defined }}{{ [1, 2] | sum }}""",
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


VALUES: dict[str, Any] = {
    "text": "x" * 1000,
    "items": ["x" * 9] * 100,
    "pairs": {"a": "x" * 400, "b": "x" * 600},
    "nested": {"a": [["x" * 10] * 10]},
    "lines": "x\n" * 100,
    "tabs": "\t" * 100,
    "bytes": b"x" * 1000,
    "one": [1],
    "few": {1, 2, 3},
    "number": 1000,
    "dict": dict,
}
COUNTED = {
    # What is written: the characters of a text, the items of a container and everything in them.
    "{{ text }}": 1000,
    "{{ items }}": 100 + 900,
    "{{ pairs }}": 2 + 2 + 400 + 600,
    "{{ nested }}": 1 + 1 + 1 + 10 + 100,
    "{{ few }}": 3 + 3,
    "{{ namespace(a=text) }}": 2 + (1 + 1 + 1 + 1000),
    "{% set x = text %}": 0,
    # What an expression makes.
    "{% set x = text ~ text %}": 2 + 2000,
    "{% set x = text ~ 1 ~ items %}": 3 + 1000 + 1 + 1000,
    "{% set x = text + text %}": 2000,
    "{% set x = items + items %}": 200,
    "{% set x = text * 3 %}": 3000 + 3000,
    "{% set x = 3 * text %}": 3000 + 3000,
    "{% set x = text * -3 %}": 1000,  # the text is looked at, and nothing is made of it
    "{% set x = items * 3 %}": 3 * 1000 + 300,
    "{% set x = number * number %}": 1,
    "{% set x = [text, text] %}": 2 + 2000,
    "{% set x = (text, 1) %}": 2 + 1000 + 1,
    "{% set x = {'a': text} %}": 1 + 1 + 1000,
    "{% set x = [1, 2, 3] %}": 0,
    "{% set x = [text ~ text] %}": (2 + 2000) + (1 + 2000),
    "{% set x = (text ~ text)[1:] %}": (2 + 2000) + 1999,
    "{% set x = text[1:] %}": 999,
    "{% set x = items[1:] %}": 99,
    "{% set x = text[1] %}": 0,
    # What is compared item by item.
    "{% set x = text == text %}": 0,
    "{% set x = items == items %}": 1000,
    "{% set x = 'y' == items %}": 0,
    "{% set x = [text] == items %}": 1 + 1000 + 1000,
    "{% set x = items == ['x'] %}": 0,
    "{% set x = 'y' in items %}": 1000,
    "{% set x = text in items %}": 1000,
    "{% set x = 'y' not in items %}": 1000,
    "{% set x = 'y' in text %}": 0,
    "{% set x = 1 < number < items|length %}": 2,
    "{% set x = (text ~ text) == 'y' %}": 2 + 2000,
    "{% set x = (text ~ text) in [] %}": 2 + 2000,
    # Filters and methods: their arguments where all of them is read, what they fill up, and what they return.
    "{% set x = text|upper %}": 1 + 1000,
    "{% set x = number|round(2) %}": 2,
    "{% set x = items|length %}": 2,
    "{% set x = number.bit_length() %}": 2,
    "{% set x = items|join('--') %}": 1000 + 100 * 2 + 1 + 900 + 99 * 2,
    "{% set x = items|join(text) %}": 1000 + 100 * 1000 + 1 + 900 + 99 * 1000,
    "{% set x = text.join(items) %}": 1000 + 100 * 1000 + 1 + 900 + 99 * 1000,
    "{% set x = text|replace('x', 'yy') %}": 2000 + 1 + 2000,
    "{% set x = text.replace('x', 'yy') %}": 2000 + 1 + 2000,
    "{% set x = text.replace('z', 'yy') %}": 1 + 1000,
    "{% set x = text.translate({120: 'abc'}) %}": (1 + 1 + 3) + 3 * 1000 + 1 + 3000 + 5,
    "{% set x = text|center(2000) %}": 2000 + 1 + 2000,
    "{% set x = bytes.ljust(2000) %}": 2000 + 1 + 2000,
    "{% set x = number.to_bytes(500, 'big') %}": 1000 + 1 + 500,
    "{% set x = lines|indent(10) %}": 10 * (1 + 100) + 1 + 200 + 10 * 99,
    "{% set x = tabs.expandtabs(10) %}": 10 * (1 + 100) + 1 + 1000,
    "{% set x = one|batch(500, 'x')|list %}": 500 * (1 + 2) + 5 + 1,
    "{% set x = one|tojson(indent=100) %}": 2 + 100 * (1 + 2) + 1 + 105,
    "{% set x = [one, one, one]|sum(start=[]) %}": (3 + 3 + 3) + 9 + 81 + 1 + 3,
    "{% set x = items|sort %}": 1000 + 1 + 100,
    "{% set x = items|map('upper')|list %}": 1 + 100 * (1 + 9) + 1 + 100 + 1,
    "{% set x = range(500)|list %}": (1 + 500) + 1 + 500,
    # Formats: the width that is given, and everything that is written.
    "{% set x = '%s%s'|format(text, text) %}": 2000 + 1 + 2000,
    "{% set x = '%s' % text %}": 1000 + 1000,
    "{% set x = '%*d' % (500, 1) %}": 500 + 2 + 500,
    "{% set x = '{}'.format(text) %}": 1000 + 1 + 1000,
    "{% set x = '{:>{w}}'.format(1, w=500) %}": 500 + 2 + 1 + 500,
    "{% set x = '%(a)s%(b)s' % pairs %}": 1004 + 2 * 1004 + 1000,
    "{% set x = '{a}'.format_map(pairs) %}": 1004 + 1004 + 1 + 400,
    # Loops and macros: an iteration or a call, and the text in it.
    "{% for a in items %}{% endfor %}": 100,
    "{% for a in items %}ab{% endfor %}": 100 * (1 + 2),
    "{% for a in items %}{% for b in one %}ab{% endfor %}{% endfor %}": 100 * (1 + 1 + 2),
    "{% for a in items if a == 'y' %}ab{% endfor %}": 100,
    "{% macro f() %}abc{% endmacro %}{{ f() }}": (1 + 3) + (1 + 3) + 3,
    "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}abc{% endcall %}": 1
    + (1 + 3)
    + (1 + 3)
    + 3
    + (1 + 3),
    "{% block a %}abc{% endblock %}": 1 + 3,
}


@pytest.mark.parametrize("text", COUNTED)
def test_everything_that_a_template_makes_is_counted_by_its_size(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = BoundedEnvironment().from_string(text)

    def is_stopped(limit: int) -> bool:
        monkeypatch.setattr(templates, "MAX_SIZE", limit)
        try:
            template.render(VALUES)
        except TemplateTooCostly:
            return True
        return False

    too_small, enough = -1, 2**20
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if is_stopped(middle):
            too_small = middle
        else:
            enough = middle
    assert enough == COUNTED[text]


def test_a_long_conversation_is_within_the_limits() -> None:
    template = BoundedEnvironment().from_string(HARMLESS[0] + HARMLESS[3] + HARMLESS[6])
    talk = [
        {"role": "user", "content": "x" * 5000},
        *[{"role": "assistant", "content": "y" * 5000}] * 400,
    ]
    assert len(template.render(messages=talk)) > 2_000_000


def test_rendering_takes_little_longer_than_without_limits() -> None:
    talk = MESSAGES * 10
    made = [
        kind().from_string(HARMLESS[0] + HARMLESS[4])
        for kind in (ImmutableSandboxedEnvironment, BoundedEnvironment)
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(30):
        for template, taken in zip(made, seconds, strict=True):
            began = time.thread_time()
            template.render(messages=talk)
            taken.append(time.thread_time() - began)
    assert min(seconds[1]) < 8 * min(seconds[0]), "about 3"


def test_a_chat_template_is_stopped_in_any_thread(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        with pytest.raises(
            RecipeError, match=r"fails on a sample[\s\S]*here:3[\s\S]*TemplateTooCostly"
        ):
            FieldTemplate(text).write({"x": 1}, lambda: "here:3")
    with pytest.raises(RecipeError, match="at most 1048576 characters"):
        FieldTemplate("{{ x }}" + "y" * 2**20)
    for nested in ("{{ " + "(" * 9999 + ")" * 9999 + " }}", LOOP * 30 + END * 30):
        with pytest.raises(RecipeError, match="a field template is not valid Jinja"):
            FieldTemplate(nested)
    with pytest.raises(RecipeError, match="RecursionError"):
        FieldTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").write({}, lambda: "here:3")


def test_time_that_a_rendering_waits_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.05)
    text = "{{ wait() }}{{ wait() }}"
    rendered = BoundedEnvironment().from_string(text).render(wait=lambda: time.sleep(0.1) or "x")
    assert rendered == "xx"


def test_a_call_of_a_slow_function_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.02)

    def work() -> str:
        ends = time.thread_time() + 0.03
        while time.thread_time() < ends:
            pass
        return "x"

    assert BoundedEnvironment().from_string("{{ work() }}").render(work=work) == "x"
    with pytest.raises(TemplateTooCostly, match=r"takes more than 0\.02 seconds"):
        BoundedEnvironment().from_string("{{ work() }}{{ work() }}").render(work=work)


def test_a_template_may_have_exactly_as_many_characters_as_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(templates, "MAX_SOURCE", 9)
    assert BoundedEnvironment().from_string("y" * 9).render() == "y" * 9
    with pytest.raises(TemplateSyntaxError, match="at most 9 characters"):
        BoundedEnvironment().from_string("y" * 10)


def test_a_filter_that_is_added_later_works_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = BoundedEnvironment()
    environment.filters["tenfold"] = lambda text: text * 10
    template = environment.from_string("{{ text|tenfold }}")
    assert template.render(text="ab") == "ab" * 10
    monkeypatch.setattr(templates, "MAX_SIZE", 1000)
    with pytest.raises(TemplateTooCostly):
        template.render(text="x" * 100)


def test_a_template_that_was_rendered_without_limits_before_has_them_afterwards(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment
    )
    chat_template_utils._compile_jinja_template.cache_clear()
    text = "{% for m in messages %}{{ m.content * 100 }}{% endfor %}"

    def render() -> str:
        return str(tokenizer.apply_chat_template(TALK, chat_template=text, tokenize=False))

    monkeypatch.setattr(templates, "MAX_SIZE", 50)
    assert render() == "a" * 100 + "b" * 100
    bound_chat_templates()
    with pytest.raises(TemplateTooCostly):
        render()


def test_a_slow_filter_takes_as_much_as_is_allowed_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(templates, "_MAX_SLOW_INPUT", 10)
    template = BoundedEnvironment().from_string("{{ text|title }}")
    assert template.render(text="a" * 10) == "A" + "a" * 9
    with pytest.raises(TemplateTooCostly, match="uses title on more than 10 characters"):
        template.render(text="a" * 11)
