"""Bounded reading of the user's own YAML files: YAML can contain itself, or grow a billion-fold in a few lines."""

from __future__ import annotations

import os
from itertools import accumulate
from typing import Any

SCHEME = "own"
LARGEST = 64 << 10  # bytes of a file: about a second of parsing
MOST_VALUES = 20_000  # values in a file, with every alias expanded
DEEPEST = 30  # levels of nested mappings and lists
TOO_DEEP = f"it is nested deeper than {DEEPEST}, or holds itself"


def register() -> str:
    """Register `OwnFiles` with Hydra, a source that reads a user's YAML files (`own://` paths) within bounds; return
    the scheme "own"."""
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.plugins.config_source import ConfigLoadError, ConfigResult

    class OwnFiles(FileConfigSource):
        """Reads the YAML files of `own://` paths, after a check of each."""

        @staticmethod
        def scheme() -> str:
            """Return "own", the scheme of the URLs of a user's own YAML files in Hydra."""
            return SCHEME

        def load_config(self, config_path: str) -> ConfigResult:
            """Load a YAML file of the user for Hydra. Raises ConfigLoadError if it is too large, too deep or no map."""
            path = os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path)))
            if reason := unreadable(path):
                raise ConfigLoadError(reason)
            return super().load_config(config_path)

    SourcesRegistry.instance().register(OwnFiles)
    return SCHEME


def unreadable(path: str) -> str:
    """Return why the YAML file of a user at `path` must not be given to Hydra: too large, too deep, not UTF-8, no map;
    "" if it may be. Raises yaml.YAMLError if it is not YAML."""
    import yaml
    from omegaconf._utils import get_yaml_loader

    try:
        if not os.path.isfile(path):
            return "it is no file"
        if (size := os.path.getsize(path)) > LARGEST:
            return f"it has {size} bytes, of which there may be {LARGEST}"
        with open(path, encoding="utf-8") as file:
            text = file.read()
        events = yaml.parse(text, Loader=get_yaml_loader())
        if any(depth > DEEPEST for depth in accumulate(map(_nesting, events))):
            return TOO_DEEP
        values = yaml.load(text, Loader=get_yaml_loader())
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 (byte {error.start})"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if values is not None and not isinstance(values, dict):
        return f"it holds a {type(values).__name__}, not keys with values"
    return _too_much(values)


def _nesting(event: Any) -> int:
    """Return by how much an event in parsing a user's YAML file changes the depth of nesting: 1, -1 or 0."""
    from yaml.events import CollectionEndEvent, CollectionStartEvent

    return isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)


def _too_much(values: Any) -> str:
    """Return why the plain data of a user's YAML file has too many values or is nested too deep; "" if not. An object
    counts once per place it occurs in."""
    left, count = [(values, 0)], 0
    while left:
        value, depth = left.pop()
        count += 1
        if depth > DEEPEST:
            return TOO_DEEP
        if count > MOST_VALUES:
            return f"it holds more than {MOST_VALUES} values"
        if isinstance(value, dict):
            left += [(part, depth + 1) for part in value.values()]
        elif isinstance(value, list | tuple | set):
            left += [(part, depth + 1) for part in value]
    return ""
