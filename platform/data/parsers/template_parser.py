"""Parser of chat templates, which compiles one of Jinja and writes conversations by it, in the sandbox of Jinja."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from platform.boundary.parser_process import Read

_templates: dict[str, Any] = {}  # the last one, by its text


def answer_template(request: dict[str, Any], body: bytes, read: Read) -> bytes:
    """Answer the parent's request to this child process, which runs a chat template in Jinja's sandbox: check that
    `template` is one; or, for a body of JSON, return the texts that the template makes of its `messages`, as a JSON
    list, one for each (number of messages, True to begin an answer after them) in `wanted`."""
    template = _compiled(request["template"])
    if not body:
        return b""
    given = json.loads(body)
    messages, named = given["messages"], given["named"]
    return json.dumps(
        [
            template.render(messages=messages[:number], add_generation_prompt=prompt, **named)
            for number, prompt in given["wanted"]
        ]
    ).encode()


def _compiled(text: str) -> Any:
    """Return a chat template, compiled from its text in Jinja's sandbox and kept until another one is asked for."""
    if text not in _templates:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        _templates.clear()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        del environment.globals["lipsum"], environment.filters["random"]  # one conversation is always one text
        _templates[text] = environment.from_string(text)
    return _templates[text]


def _refuse(message: str) -> NoReturn:
    """Raise TemplateError with a chat template's own message: the `raise_exception` that templates call to refuse."""
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **more: Any) -> str:
    """Return plain data as JSON: the chat templates' filter `tojson`, without the HTML escapes of Jinja's own."""
    kept = {name: more[name] for name in ("ensure_ascii", "separators", "sort_keys") if name in more}
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **kept})


def _generation() -> type:
    """Return the Jinja extension for {% generation %} blocks of chat templates, which leaves their text as it is."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """Reads {% generation %} and {% endgeneration %}, which mark answers."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Parse a {% generation %} block of a chat template into a scope of its own body."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return Generation
