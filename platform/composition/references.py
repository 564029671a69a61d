"""Resolution of references in a configuration: what `${oc.env:NAME}` and other resolvers read becomes a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from platform.boundary.redaction import register_secrets
from platform.boundary.schema import texts
from platform.config.bounds import KEYS

# Resolvers of OmegaConf and Hydra that read only the configuration, the clock or the interpreter: no secrets.
_HARMLESS = {
    *("oc.create", "oc.decode", "oc.deprecated", "oc.dict.keys", "oc.dict.values", "oc.select", "now", "hydra"),
    "python_version",
}
_RESOLVER = re.compile(r"\$\{\s*([\w.]+)\s*:")

_read: dict[str, str] = {}  # value -> the reference that read it


def watch_environment() -> None:
    """Replace OmegaConf's resolver of `${oc.env:NAME}` in configurations with one that remembers the values it reads,
    so that `resolve` can register them as secrets."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def env(name: str, *default: Any) -> Any:
        """Return an environment variable for `${oc.env:NAME}`, and remember its value, which may be a secret."""
        if name in os.environ:
            _read[os.environ[name]] = f"${{oc.env:{name}}}"
        return oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)


def resolve(composed: Any) -> dict[str, Any]:
    """Resolve the references `${...}` in a configuration that Hydra composed, and return it as nested plain data.
    Values that a resolver, such as `${oc.env:NAME}`, read from outside the configuration into a text become secrets:
    they are registered for redaction.

    Legal choices of a key (`precision=${oc.env:P}`) and numbers are no secrets. Raises what OmegaConf raises.
    """
    from omegaconf import OmegaConf

    _read.clear()
    try:
        values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except Exception:
        register_secrets({value: shown for value, shown in _read.items() if not _is_word(value)})
        raise
    for key, raw, value in _pairs(OmegaConf.to_container(composed, resolve=False), values, ""):
        for text in texts(value):
            if key in KEYS and text in KEYS[key].choices:
                continue
            found = {secret: shown for secret, shown in _read.items() if secret and secret in text}
            register_secrets(
                found or ({text: raw} if _reads(raw) else {})
            )  # the whole text if, say, a resolver decoded it
    return {str(key): value for key, value in values.items()}


def _reads(raw: str) -> bool:
    """Return True if `raw`, a value with references `${...}` as written, reads something outside the configuration; an
    unset environment variable, in whose place its default is taken, does not count."""
    names = {*_RESOLVER.findall(raw)} - _HARMLESS
    variables = re.findall(r"\$\{\s*oc\.env\s*:\s*(\w+)", raw)
    return bool(names - {"oc.env"}) or any(name in os.environ for name in variables)


def _is_word(text: str) -> bool:
    """Return True if a resolved text is a number or a legal choice of some configuration key, and so no secret."""
    return bool(re.fullmatch(r"[-+.\deE_]+", text)) or any(text in key.choices for key in KEYS.values())


def _pairs(raw: Any, value: Any, key: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, value as written, resolved value) for every value of a configuration that contains a reference
    `${...}`. `raw` and `value` are its parts at `key` before and after resolution."""
    if isinstance(raw, dict) and isinstance(value, dict):
        for name, part in raw.items():
            yield from _pairs(part, value.get(name), f"{key}.{name}" if key else str(name))
    elif isinstance(raw, list) and isinstance(value, list):
        for part, item in zip(raw, value, strict=True):
            yield from _pairs(part, item, key)
    elif isinstance(raw, str) and "${" in raw:
        yield key, raw, value
