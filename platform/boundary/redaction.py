"""Redaction of secrets, which every sink applies to all that it shows or stores, so that no secret leaves the process.

Secrets are: user, password, query values and fragment of every URL; and what a resolver such as `${oc.env:NAME}` read,
shown as the reference that was typed. Files, W&B, the console, refusals and printed commands call `redact_secrets`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import lru_cache
from typing import Any, TextIO, TypeVar
from urllib.parse import quote, unquote

from platform.boundary.schema import iterate_texts, map_nested_values

T = TypeVar("T")

REDACTED = "***"
SHORTEST = 4  # characters of a secret that is replaced wherever it occurs: a shorter one occurs in innocent words
_SECRET_NAMES = ("KEY", "TOKEN", "PASSWORD", "SECRET")  # ends of the names of variables that hold one
_SHORTEST_PLAIN = 8  # the same for a value in a URL's query or in a variable: many of these are plain words
_REFERENCE = re.compile(r"\$\{(?:[^{}]|\{[^{}]*\})*\}")
_PRIVATE = 0xE000  # start of Unicode's private use area: characters free to stand for references
# Protocols are short; with an unbounded name the search would take time in the square of a long word's length.
_PROTOCOL = r"[A-Za-z][\w+.-]{0,31}://"
_URL = re.compile(_PROTOCOL + r"[^\s'\"<>`]+")

_known: dict[str, str] = {}  # secret -> text shown in its place; global, so that anything that prints can redact


def redact_secrets(value: T) -> T:
    """Replace the secrets, also in any URL, in the texts of plain data, before it is shown or stored. Idempotent."""
    redacted_value: T = map_nested_values(value, str, _redact_text)
    return redacted_value


def _redact_text(text: str) -> str:
    """Replace registered secrets, and the secrets of every URL, in a text."""
    text = _replace_known_secrets(text)
    return _URL.sub(lambda m: strip_url_secrets(m[0]), text) if "://" in text else text


def _replace_known_secrets(text: str) -> str:
    """Replace the registered secrets in a text by the text shown in their place, such as ${oc.env:NAME}."""
    return _build_secret_pattern(tuple(_known.items())).sub(lambda m: _known.get(m[0], m[0]), text) if _known else text


@lru_cache(maxsize=8)
def _build_secret_pattern(known: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """Build the regular expression that finds registered secrets. `known`: (secret, replacement) pairs. Existing
    replacements match before secrets, so that they are not redacted twice, and longer texts before shorter ones."""
    shown = sorted({shown for _, shown in known if shown != REDACTED}, key=len, reverse=True)
    secrets = sorted((secret for secret, _ in known), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, [*shown, *secrets])))


def strip_url_secrets(url: str) -> str:
    """Strip a URL of user and password, the values of its query, and its fragment. References such as
    `${oc.env:NAME}` stay.

    A password may hold any character, so if it could end at several @, it ends at the last one. If a query may have
    begun before that @, only the scheme is kept.
    """
    scheme, separator, remainder = url.partition("://")
    remainder, masks = _mask_references(remainder)
    query, last = _find_first_index("?#", remainder), remainder.rfind("@")
    if ":" not in remainder[: max(last, 0)]:  # no password, but a token may stand in front of the host
        last = remainder.rfind("@", 0, _find_first_index("/?#", remainder))
    if query < last:
        return f"{scheme}{separator}{REDACTED}"
    user, remainder = remainder[: last + 1], remainder[last + 1 :]
    user = user if _is_reference(user[:-1].partition(":")[2] or user[:-1]) else ""
    address, mark, tail = re.fullmatch(r"([^?#]*)([?#]?)(.*)", remainder, re.DOTALL).groups()  # type: ignore[union-attr]
    query_values = map(_redact_query_value, re.split("[&;]", tail))
    shown = user + address + mark + ("&".join(query_values) if mark == "?" else mark and REDACTED)
    return f"{scheme}{separator}{shown.translate(masks)}"


def _mask_references(text: str) -> tuple[str, dict[int, str]]:
    """Replace each reference `${...}` in a URL by one private-use character, so that the URL can be split around it;
    return the text, and the map from code point back to reference."""
    masks = dict(zip(range(_PRIVATE, _PRIVATE + 256), dict.fromkeys(_REFERENCE.findall(text)), strict=False))
    for character, reference in masks.items():
        text = text.replace(reference, chr(character))
    return text, masks


def _is_reference(text: str) -> bool:
    """Return True if a part of a URL consists of the characters by which `_mask_references` masks."""
    return bool(text) and all(_PRIVATE <= ord(c) < _PRIVATE + 256 for c in text)


def _find_first_index(characters: str, text: str) -> int:
    """Return the index of the first of `characters` in a part of a URL; the length of that part if it has none."""
    return next((i for i, c in enumerate(text) if c in characters), len(text))


def _redact_query_value(pair: str) -> str:
    """Redact the value of one NAME=VALUE pair of a URL's query, unless it is a reference such as ${oc.env:KEY}."""
    name, equals, value = pair.partition("=")
    return pair if _is_reference(value) else f"{name}={REDACTED}" if equals else REDACTED


def register_secrets(secrets: Mapping[str, str]) -> None:
    """Register secret -> replacement pairs for `redact_secrets`, which also finds a secret in quoted or escaped form;
    secrets of fewer than SHORTEST (4) characters are left out."""
    for secret, shown in secrets.items():
        if len(secret) >= SHORTEST:
            for form in (secret, unquote(secret), quote(secret), quote(secret, safe="")):
                _known.setdefault(form, shown)
                _known.setdefault(json.dumps(form)[1:-1], shown)
                _known.setdefault(repr(form)[1:-1], shown)


def register_environment(variables: Mapping[str, str]) -> None:
    """Register, for `redact_secrets`, the environment variables whose names say that they are secret, such as
    WANDB_API_KEY, and the secrets in URLs of all others."""
    long_values = {name: value for name, value in variables.items() if len(value) >= _SHORTEST_PLAIN}
    names = [name for name in long_values if name.upper().endswith(_SECRET_NAMES)]
    secret = {long_values[name]: f"${{oc.env:{name}}}" for name in names}
    register_secrets(secret)
    register_url_secrets([value for value in variables.values() if value not in secret])


def register_url_secrets(value: Any) -> None:
    """Register, for `redact_secrets`, the secrets in the URLs among the texts in `value`, a text or nested lists and
    maps of them. A URL extends to the end of its text, spaces included."""
    for text in iterate_texts(value):
        if start := re.search(_PROTOCOL, text):
            url = text[start.start() :]
            written = _replace_known_secrets(url)
            if strip_url_secrets(written) != written:
                url_secrets = dict.fromkeys(_find_url_secrets(written.partition("://")[2]), REDACTED)
                register_secrets({url: strip_url_secrets(written), **url_secrets})


def _find_url_secrets(rest: str) -> Iterator[str]:
    """Yield the secrets in `rest`, a URL after its "://": password or token, and query values; for every way in which a
    client may split it, "" for a part without one."""
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    for credentials in {url_part.rpartition("@")[0] for url_part in (rest, host)}:
        _, colon, password = credentials.partition(":")
        secret = password if colon else credentials if credentials in host else ""
        yield "" if _REFERENCE.fullmatch(secret) else secret
    for pair in re.split("[?#&;]", rest)[1:]:
        name, equals, value = pair.partition("=")
        secret = value if equals else name
        yield secret if len(secret) >= _SHORTEST_PLAIN and not _REFERENCE.fullmatch(secret) else ""


def known_secrets() -> dict[str, str]:
    """Return the registered secrets as secret -> replacement, for `register_secrets` in processes started here."""
    return dict(_known)


def forget_secrets() -> None:
    """Forget all registered secrets, at the start of another command in this process."""
    _known.clear()


@contextmanager
def isolate_secrets(secrets: Mapping[str, str] | None = None) -> Iterator[None]:
    """Restrict the registered secrets, within the context of one job, to `secrets` and those registered in it; after
    it, all others are known again too.

    The result of `redact_secrets` then does not depend on the history of the process.
    """
    others = known_secrets()
    _known.clear()
    _known.update(secrets or {})
    try:
        yield
    finally:
        _known.update(others)


class Shield:
    """Text stream that redacts secrets in the text written to it, and passes it on to `stream`."""

    def __init__(self, stream: TextIO):
        """Wrap the text stream `stream`, such as stdout, to redact the secrets in all that is written to it."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text with its secrets redacted to the wrapped stream; return the length of the text before."""
        self._stream.write(redact_secrets(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts with their secrets redacted to the wrapped stream."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the stream whose output is redacted."""
        return getattr(self._stream, name)


@contextmanager
def redact_output(out: TextIO, error: TextIO) -> Iterator[None]:
    """Redact secrets in all that this process prints within the context; `out` and `error` get what it writes to stdout
    and stderr. The traceback of an error that leaves the context is not in it."""
    with redirect_stdout(Shield(out)), redirect_stderr(Shield(error)):
        yield
