"""Chat templates have what transformers gives them: its filter, tags and functions beside plain Jinja."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from weft.data.chat_template import ChatTemplate, load_template
from weft.errors import DataError


def render(source: str, **message: Any) -> str:
    return ChatTemplate(source, {}, "the test").render([{"role": "user", "content": "x", **message}])


VALUE = {"é": [1, 2], "a<b": "ü"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", '{"é": [1, 2], "a<b": "ü"}'),
        ("ensure_ascii=False", '{"é": [1, 2], "a<b": "ü"}'),
        ("ensure_ascii=True", '{"\\u00e9": [1, 2], "a<b": "\\u00fc"}'),
        ("separators=(',', ':')", '{"é":[1,2],"a<b":"ü"}'),
        ("sort_keys=True", '{"a<b": "ü", "é": [1, 2]}'),
        ("indent=1", '{\n "é": [\n  1,\n  2\n ],\n "a<b": "ü"\n}'),
        ("False, none, (',', ':'), true", '{"a<b":"ü","é":[1,2]}'),
    ],
)
def test_json_is_written_as_a_template_says(options: str, expected: str) -> None:
    assert render(f"{{{{ messages[0].value | tojson({options}) }}}}", value=VALUE) == expected


def test_loops_may_be_left_early() -> None:
    source = (
        "{% for n in range(9) %}{% if n == 1 %}{% continue %}{% endif %}{% if n > 3 %}{% break %}{% endif %}{{ n }}"
    )
    assert render(source + "{% endfor %}") == "023"


def test_the_tag_around_answers_writes_nothing() -> None:
    source = (
        "{% set end = '.' %}\n{% for m in messages %}\n"
        "  {% generation %}\n{% set end = '!' %}\n{{ loop.index }}{{ m.content }}{{ end }}\n  {%- endgeneration %}\n"
        "{{ end }}{% endfor %}"
    )
    assert render(source) == "1x!."  # a variable set within it is its own
    with pytest.raises(DataError, match="not valid Jinja"):
        render("{% generation %}{{ messages[0].content }}")


def test_messages_nested_too_deeply_are_refused() -> None:
    source = "{% macro deeper(n) %}{{ deeper(n + 1) }}{% endmacro %}{{ deeper(0) }}"
    with pytest.raises(DataError, match="refuses the messages: maximum recursion depth exceeded"):
        render(source)


def test_a_template_knows_the_time() -> None:
    before = datetime.now()
    found = datetime.strptime(render("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}"), "%Y-%m-%d %H:%M:%S.%f")
    assert before <= found <= datetime.now()


def test_of_templates_by_name_what_is_no_template_is_passed_over(tmp_path: Path) -> None:
    named: list[object] = ["default", {"name": "tools", "template": "no"}]
    for more, expected in (([], None), ([{"name": "default", "template": "yes"}], "yes")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named + more}))
        found = load_template(None, str(tmp_path))
        assert (None if found is None else found.render([])) == expected


def test_settings_of_a_tokenizer_that_are_no_json_are_refused(tmp_path: Path) -> None:
    for broken in ("{", "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(DataError, match=r"tokenizer_config\.json cannot be read as JSON"):
            load_template(None, str(tmp_path))
