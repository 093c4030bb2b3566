"""Operations of a chat template that would fill the memory or block the interpreter are refused."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment as Plain
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import _compile_jinja_template

from chairlift.api.text import vocabulary

HUGE = [
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [1] * 10**9 }}",
    "{{ (['x'] * 10**6) * 1000 }}",
    "{% set n = 10**9 %}{{ messages[0].content * n }}",
    "{{ 9**(9**9) }}",
    "{{ (2**99999 * 2**99999) ** 9 }}",
    "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%0999999999d'|format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ '{a:{b}}'.format_map({'a': 1, 'b': 10**9}) }}",
    "{{ ('{}' * 100000).format('x' * 100000) }}",
    "{{ 'x'|center(10**10) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.rjust(width=10**10) if false else 'x'.zfill(10**10) }}",
    "{{ ('\t' * 10**6).expandtabs(10**6) }}",
    "{{ ('\n' * 10**6)|indent(10**6) }}",
    "{{ ('\nx' * 10**6)|indent('x' * 10**6) }}",
    "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "{{ ('x' * 10**6)|replace('', 'y' * 10**6) }}",
    "{{ ('x' * 10**6).translate({120: 'y' * 10**6}) }}",
    "{{ ('x' * 10**6).join('x' * 10**6) }}",
    "{{ range(10**5)|join('x' * 10**6) }}",
    "{{ range(10**5)|map('string')|join('x' * 10**6) }}",
    "{{ 'x'|batch(10**9, 'x')|list }}",
    "{{ 'x'|batch(10**6, range(99999)|list)|list }}",
    "{{ 'x'|slice(10**9)|list }}",
    "{{ ['x']|map('center', 10**10)|list }}",
    "{{ [[1] * 10**6] * 10**6 }}",
    "{{ [1]|tojson(indent=10**9) }}",
    "{{ [1]|tojson(separators=('x' * 10**6, 'x')) }}",
    "{{ 5|round(-10**9) }}",
    "{{ (1).to_bytes(10**10, 'big') }}",
    "{{ dict.fromkeys(range(99999)|list, range(99999)|list) }}",
    "{{ ('<' * 10**6)|striptags }}",
    "{{ ('www.' * 10**6)|urlize }}",
    "{{ [[1]]|sum(start=[]) }}",
    "{{ lipsum(n=10**9) }}",
    # Growth by many small operations.
    *(
        f"{{% set ns = namespace(x={first}) %}}{{% for i in range(99) %}}"
        f"{{% set ns.x = {doubled} %}}{{% endfor %}}"
        for first, doubled in (
            *(("'x'", "ns.x ~ ns.x"), ("'x'", "ns.x + ns.x"), ("[1]", "ns.x + ns.x")),
            *((1, "[ns.x, ns.x]"), (1, "(ns.x, ns.x)"), (1, "{1: ns.x, 2: ns.x}")),
            (1, "dict(a=ns.x, b=ns.x)"),
        )
    ),
    "{% set ns = namespace(x=1) %}{% for i in range(99) %}"
    "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns|tojson }}",
    "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}{% endset %}",
    "{% filter upper %}{% for i in range(99999) %}{{ messages }}{% endfor %}{% endfilter %}",
    "{% for m in messages %}{{ range(99999)|map('replace', 0, m.content)|list }}{% endfor %}",
]
MESSAGES = [{"role": "user", "content": "Hello there! " * 100}]


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What is not refused fails, instead of taking the machine's memory."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.slow
@pytest.mark.parametrize("template", HUGE)
def test_huge_operations_are_refused_at_once(template: str, little_memory: None) -> None:
    assert vocabulary  # which installs the bounds
    began = time.process_time()
    with pytest.raises((SecurityError, UndefinedError)):
        _compile_jinja_template(template).render(messages=MESSAGES)
    assert time.process_time() - began < 5


USUAL = [
    "{% for m in messages %}{% generation %}{{ m.content[:9] }}{% endgeneration %}"
    "{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}{{ loop_missing is defined }}",
    "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}\n{% endfor %}{{ '=' * 3 }}",
    "{{ messages|tojson(indent=4) }}{{ messages|map(attribute='role')|join(', ') }}",
    "{% set ns = namespace(text='') %}{% for m in messages %}"
    "{% set ns.text = ns.text + m['content'].strip().replace('e', '') %}{% endfor %}{{ ns.text }}",
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('no') }}{% endif %}{% endfor %}{{ missing ~ (missing or [])|length }}",
    "{% set all = [{'role': 'system', 'content': 'x'}] + messages %}{{ all[1:]|length }}"
    "{{ ('a', 'b') }}{{ {'a': 1.5, 'b': none} }}{{ 7 // 2 }}{{ 2 ** 10 }}"
    "{{ '%s-%05.1f' % ('a', 3) }}"
    "{{ '{:>8}|{a}'.format('x', a=1700000000) }}{{ 1700000000|int + 1 }}",
    "{% for name, value in {'a': 1, 'b': [1, 2]}.items() %}{{ name }}={{ value }};{% endfor %}"
    "{{ 'a\nb'|indent(2) }}{{ 'x'.center(9) }}{{ n|default(10**12) }}{{ 'abc'|truncate(4) }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ messages == other }}",
    "{% macro show(m, depth=0) %}{{ '  ' * depth }}{{ m.content|trim|upper }}{% endmacro %}"
    "{% for m in messages %}{{ show(m, loop.index) }}{% endfor %}{{ [3, 1]|sort|sum }}"
    "{{ messages|batch(2, 'x')|list|length }}{{ strftime_now('%Y')|length }}",
]


@pytest.mark.parametrize("template", USUAL)
def test_usual_templates_are_rendered_as_without_bounds(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": " é\n"}] * 3
    values: dict[str, Any] = {"messages": messages, "other": [*messages]}
    bounded = _compile_jinja_template(template).render(**values)
    compile_anew = chat_template_utils._cached_compile_jinja_template
    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", Plain)
    assert compile_anew(template).render(**values) == bounded != ""
