"""The one redaction: what every sink does to what it shows or keeps, so that no secret leaves the process.

Secrets are: user, password, query and fragment of every URL; and what a resolver such as `${oc.env:NAME}` read, which
is shown as the reference that was typed. Files, W&B, the console, refusals and printed commands call `redact`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import lru_cache
from typing import Any, TextIO, TypeVar
from urllib.parse import quote, unquote

T = TypeVar("T")

HIDDEN = "***"
SHORTEST = 4  # characters of a text that is replaced wherever it stands: less would be found in innocent words
_OF_A_QUERY = 8  # and of a value in a URL's query, many of which are plain words
_REFERENCE = re.compile(r"\$\{(?:[^{}]|\{[^{}]*\})*\}")
_PRIVATE = 0xE000  # of Unicode: characters that mean what one wants
_URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s'\"<>`]+")

_known: dict[str, str] = {}  # text -> what is shown in its place. Of this process: who prints need not know whose it is


def redact(value: T) -> T:
    """A text, or plain data with texts in it, as it may be shown. Keys and numbers stay. Redacting twice is once."""
    if isinstance(value, str):
        return _redact(value)  # type: ignore[return-value]
    if isinstance(value, Mapping):
        return {key: redact(item) for key, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, list | tuple):
        return type(value)(map(redact, value)) if type(value) in (list, tuple) else value
    return value


def _redact(text: str) -> str:
    text = _with_references(text)
    return _URL.sub(lambda m: bare(m[0]), text) if "://" in text else text


def _with_references(text: str) -> str:
    return _pattern(tuple(_known.items())).sub(lambda m: _known.get(m[0], m[0]), text) if _known else text


@lru_cache(maxsize=8)
def _pattern(known: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """What stands for a secret is found first, and stays; then the longest secret."""
    shown = sorted({shown for _, shown in known if shown != HIDDEN}, key=len, reverse=True)
    secrets = sorted((secret for secret, _ in known), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, [*shown, *secrets])))


def bare(url: str) -> str:
    """A URL without user and password, and without the values of its query. References stay: `${oc.env:NAME}`.

    A password may hold any character: where it could end at several @, at the last one. Where a query may have begun
    before that, nothing but the scheme is left.
    """
    scheme, separator, rest = url.partition("://")
    rest, masks = _masked(rest)
    query, last = _first("?#", rest), rest.rfind("@")
    if ":" not in rest[: max(last, 0)]:  # no password, but a token may stand in front of the host
        last = rest.rfind("@", 0, _first("/?#", rest))
    if query < last:
        return f"{scheme}{separator}{HIDDEN}"
    user, rest = rest[: last + 1], rest[last + 1 :]
    user = user if _is_reference(user[:-1].partition(":")[2] or user[:-1]) else ""
    address, mark, tail = re.fullmatch(r"([^?#]*)([?#]?)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    shown = user + address + mark + ("&".join(map(_hidden, re.split("[&;]", tail))) if mark == "?" else mark and HIDDEN)
    return f"{scheme}{separator}{shown.translate(masks)}"


def _masked(text: str) -> tuple[str, dict[int, str]]:
    """The text with a private character for each reference, and what these stand for."""
    masks = dict(zip(range(_PRIVATE, _PRIVATE + 256), dict.fromkeys(_REFERENCE.findall(text)), strict=False))
    for character, reference in masks.items():
        text = text.replace(reference, chr(character))
    return text, masks


def _is_reference(text: str) -> bool:
    return bool(text) and all(_PRIVATE <= ord(c) < _PRIVATE + 256 for c in text)


def _first(characters: str, text: str) -> int:
    return next((i for i, c in enumerate(text) if c in characters), len(text))


def _hidden(pair: str) -> str:
    name, equals, value = pair.partition("=")
    return pair if _is_reference(value) else f"{name}={HIDDEN}" if equals else HIDDEN


def learn(secrets: Mapping[str, str]) -> None:
    """Has `redact` show something else in the place of each text: also where it is quoted or escaped."""
    for secret, shown in secrets.items():
        if len(secret) >= SHORTEST:
            for form in (secret, unquote(secret), quote(secret), quote(secret, safe="")):
                _known.setdefault(form, shown)
                _known.setdefault(json.dumps(form)[1:-1], shown)
                _known.setdefault(repr(form)[1:-1], shown)


def learn_urls(value: Any) -> None:
    """Takes note of the secrets in the URLs among these texts, each of which may be one as a whole, spaces and all."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            learn_urls(item)
    elif isinstance(value, str) and (start := re.search(r"[A-Za-z][\w+.-]*://", value)):
        url = value[start.start() :]
        written = _with_references(url)
        if bare(written) != written:
            learn({url: bare(written), **dict.fromkeys(_parts(written.partition("://")[2]), HIDDEN)})


def _parts(rest: str) -> Iterator[str]:
    """The secrets in a URL, however its client may cut it."""
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    for credentials in {part.rpartition("@")[0] for part in (rest, host)}:
        _, colon, password = credentials.partition(":")
        secret = password if colon else credentials if credentials in host else ""
        yield "" if _REFERENCE.fullmatch(secret) else secret
    for pair in re.split("[?#&;]", rest)[1:]:
        name, equals, value = pair.partition("=")
        secret = value if equals else name
        yield secret if len(secret) >= _OF_A_QUERY and not _REFERENCE.fullmatch(secret) else ""


def learned() -> dict[str, str]:
    """For the processes that this one starts: what `learn` takes there."""
    return dict(_known)


def forget() -> None:
    """Begins anew, with another command."""
    _known.clear()


class Shield:
    """A text stream that redacts what is written to it."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def shielded(out: TextIO, error: TextIO) -> Iterator[None]:
    """Redacts all that this process prints, tracebacks included."""
    with redirect_stdout(Shield(out)), redirect_stderr(Shield(error)):
        yield
