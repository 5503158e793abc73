"""Templates are somebody else's programs: they get what they expect, and get nowhere else."""

from __future__ import annotations

import msgspec
import pytest
from jinja2 import TemplateSyntaxError

from engine_service.loaders.load import check_text
from shared.byte_text import byte_text_bundle
from shared.chat_template import ChatTemplate
from shared.errors import ConfigError, InvalidRequest

HELLO = [{"role": "user", "content": "héllo"}]


def render(source: str, messages: list[dict[str, str]] | None = None) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(HELLO if messages is None else messages)


def test_special_tokens_messages_and_the_generation_prompt_are_there() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert render(source) == "<s>héllo>"


def test_tojson_keeps_text_and_takes_what_transformers_takes() -> None:
    assert render("{{ messages[0].content | tojson }}") == '"héllo"'
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=True, separators=(',', ':')) }}") == '{"a":2,"b":1}'
    assert render("{{ messages[0].content | tojson(ensure_ascii=True) }}") == '"h\\u00e9llo"'


def test_the_body_of_a_generation_tag_is_rendered() -> None:
    assert render("a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "auserb"


def test_loop_controls_work() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + none }}",
        "{{ messages[7].content }}{{ messages[7].content.x }}",
        "{{ 1 // 0 }}",
        "{{ 'x'.encode('no such codec') }}",
        "{{ range(10 ** 9) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_stumbles_over_is_about_the_messages(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_says_so_when_it_is_loaded() -> None:
    with pytest.raises(TemplateSyntaxError):
        ChatTemplate("{% for %}", {})


def test_an_engine_does_not_start_with_a_template_that_no_gateway_could_use() -> None:
    bundle = msgspec.structs.replace(byte_text_bundle(), chat_template="{% for %}")
    with pytest.raises(ConfigError):
        check_text(bundle)
