"""Chat templates end, and make nothing large: what would is refused before it is made."""

import time

import pytest

from compress.data.chat import ChatTemplate
from compress.errors import UsageError

MESSAGES = [{"role": "user", "content": "Hello\n\tthere"}, {"role": "assistant", "content": "x" * 1000}]
FORTY = "{% for i in range(40) %}"
PIECES = "{% for i in range(200) %}{{ x }}{% endfor %}"
LONG = "{% set x = 'a' * 10000000 %}"
TOO_LARGE = {
    "a width after a fill character": "{{ '{:*<200000000}'.format('a') }}",
    "a width after a name": "{{ '{a:<200000000}'.format(a='x') }}",
    "a width after a key": "{{ '%(a)200000000d' % {'a': 1} }}",
    "a width from the values": "{{ '%*d' % (200000000, 1) }}",
    "a nested width": "{{ '{:<{}}'.format('a', 20000000) }}",
    "many widths": "{{ '%999999d' * 200 % ((1,) * 200) }}",
    "many long values": LONG + "{{ '%s' * 200 % ((x,) * 200) }}",
    "a filter that formats": "{{ ('%999999d' * 20) | format(*([1] * 20)) }}",
    "a joined list": LONG + "{{ ([x] * 200) | join }}",
    "a joined attribute": LONG + "{{ ([{'a': x}] * 200) | join(',', attribute='a') }}",
    "a joining text": LONG + "{{ ''.join([x] * 200) }}",
    "a joined generator": LONG + "{{ ''.join(([x] * 200) | map('upper')) }}",
    "a separator": LONG + "{{ x.join('abcdef') }}",
    "indented lines": "{{ ('\\n' * 200) | indent(1000000, blank=true) }}",
    "expanded tabs": "{{ ('\\t' * 200).expandtabs(1000000) }}",
    "indented JSON": "{{ ([1] * 200) | tojson(indent=1000000) }}",
    "wrapped words": "{{ ('a ' * 10000) | wordwrap(1, true, 'x' * 10000) }}",
    "a replaced letter": "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
    "a translated letter": "{{ ('a' * 10000).translate({97: 'b' * 10000}) }}",
    "pieces": LONG + PIECES,
    "pieces of a macro": LONG
    + "{% macro m() %}{% for i in range(200) %}{{ x }}{% endfor %}{% endmacro %}{{ m() }}",
    "pieces of a block": LONG
    + "{% set y %}{% for i in range(200) %}{{ x }}{% endfor %}{% endset %}{{ y[0] }}",
    "a list of one text": LONG + "{{ [x] * 200 }}",
    "a list in a text": LONG + "{{ '' ~ [x] * 200 }}",
    "a list made a text": LONG + "{{ ([x] * 200) | string | length }}",
    "a power": "{{ 10 ** 1000000 }}",
    "a product": "{% set ns = namespace(n=10) %}" + FORTY + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "a tower of lists": "{% set ns = namespace(a=[1]) %}" + FORTY + "{% set ns.a = [ns.a, ns.a] %}"
    "{% endfor %}{{ ns.a | string | length }}",
    "two towers compared": "{% set ns = namespace(a=[1], b=[1]) %}"
    + FORTY
    + "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "slices": LONG + "{% set ns = namespace(a=[]) %}" + FORTY + "{% set ns.a = ns.a + [x[i:]] %}{% endfor %}",
    "many texts": LONG
    + "{% set ns = namespace(a=[]) %}"
    + FORTY
    + "{% set ns.a = ns.a + [x | upper] %}{% endfor %}",
    "steps": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
}
USUAL = {
    "a loop": "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' + m['content'] | trim }}\n{% endfor %}",
    "a comparison": "{% if messages[0].role == 'system' or 'user' in messages | map(attribute='role') %}a"
    "{% endif %}",
    "a date": "{{ strftime_now('%d %b %Y') }}{{ '%d' % 1800000000 }}",
    "tools": "{{ ([{'type': 'function', 'parameters': {'a': [1, 2.5, none]}}] * 50) | tojson(indent=4) }}",
    "joined": "{{ ['a', 'b'] | join(', ') }}{{ messages | join('-', attribute='role') }}"
    "{{ ','.join(['a', 'b']) }}",
    "formatted": "{{ '%-10s|%5.1f' % ('a', 2.5) }}{{ '{:>10}'.format('a') }}{{ '%s' | format('a') }}",
    "wrapped": "{{ messages[1].content | wordwrap(79) }}{{ messages[0].content | indent(2) }}",
    "long": "{{ ('word ' * 5000) | wordwrap(79) | length }}{{ ('line\\n' * 100000) | indent(4) | length }}",
    "not equal": "{{ 1 not in [2, 3] and 1 <= 2 < 3 and [1, [2]] == [1, [2]] }}",
}


@pytest.mark.parametrize("template", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_would_be_large_is_refused_at_once(template: str) -> None:
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"longer than|together|more than|above|any length"):
        ChatTemplate(template, {}).render(MESSAGES)
    assert time.monotonic() - began < 20, "most of them would take minutes, or all memory"


def test_usual_templates_give_what_plain_jinja_gives() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for name, template in USUAL.items():
        found = ChatTemplate(template, {}).render(MESSAGES)
        assert found
        if name not in ("a date", "tools"):  # functions and a filter of this project
            assert found == plain.from_string(template).render(messages=MESSAGES), name
