"""Templates of strangers end within limits of time, memory and output, in one line."""

import pytest

from platform.boundary.refusals import ConfigError
from platform.data import chat_templates
from platform.data.chat_templates import CHATML, ChatTemplate

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
DOUBLED = (
    "{% set n = namespace(x='aaaaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
)
HOSTILE = {
    "loop": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
    "constant": ("{{ 'a' * 10000000000 }}", "memory"),
    "indent": ("{{ [1] | tojson(indent=10 ** 10) }}", "memory"),
    "format": ("{{ '{:>9999999999}'.format('x') }}", "memory|refuses"),
    "percent": ("{{ '%0999999999d' | format(3) }}", "memory|becomes more than"),
    "doubling": (DOUBLED, "memory"),
    "center": ("{{ 'a'.center(10 ** 11) }}", "memory"),
    "long": ("{{ 'a' * (20 * 1000 * 1000) }}", "becomes more than 4 MiB"),
    "digits": ("{{ 10 ** 5000 }}", "digits"),
    "inf": ("{% set x = 'inf' | float %}{{ x }}", "name 'inf'"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "too many parts"),
    "nested": ("{% for a in 'a' %}" * 30 + "{% endfor %}" * 30, "nested"),
    "ifs": ("{% if 1 %}" * 2000 + "{% endif %}" * 2000, "no template"),
    "parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "no template"),
    "power": ("{% set a = 9 ** (9 ** 9) %}{{ a }}", "takes more than|memory"),
    "half": ("{{ '\\ud800' }}", "half a surrogate pair"),
    "random": ("{{ [1, 2] | random }}", "random"),
    "lipsum": ("{{ lipsum(n=5) }}", "lipsum"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused(monkeypatch, name):
    monkeypatch.setattr(chat_templates, "_CHAT_SECONDS", 1)
    text, wanted = HOSTILE[name]
    with pytest.raises(ConfigError, match=wanted) as caught:
        list(ChatTemplate(text, {}, []).render_parts(TALK))
    [line] = caught.value.violations
    assert line.startswith("data.chat_template: ") and line.isprintable() and len(line) < 500


def test_after_a_hostile_conversation_the_next_is_written(monkeypatch):
    monkeypatch.setattr(chat_templates, "_CHAT_SECONDS", 1)
    text = "{% for i in range(messages[0].content | int) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    template = ChatTemplate(text, {}, [])
    with pytest.raises(ConfigError, match="takes more than"):
        template.render_text([{"role": "user", "content": "99999"}])
    assert template.render_text(TALK) == "x"


def test_a_child_is_used_again():
    first, second = ChatTemplate(CHATML, {}, []), ChatTemplate("{{ messages | length }}", {}, [])
    pid = first._parser.pid
    assert second._parser.pid != pid and second.render_text(TALK) == "2"
    del first
    third = ChatTemplate("{{ bos_token }}", {"bos": "<s>"}, [])
    assert third._parser.pid == pid and third.render_text(TALK) == "<s>" and second.render_text(TALK) == "2"
