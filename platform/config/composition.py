"""Composition with Hydra: first the chosen files, then one value at a time, so that each mistake has its argument.

The user's own YAML files are read within bounds, as YAML can contain itself, or grow a billion-fold in a few lines
(`find_yaml_fault`). Values that `${oc.env:NAME}` and other resolvers read become secrets (`resolve_references`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from platform.boundary.redaction import register_secrets, register_url_secrets
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import iterate_texts
from platform.config.arguments import (
    NOT_OURS,
    SCALE,
    active_config_loader,
    find_plugin_fault,
    parse_argument,
    quote_value,
    rewrite_argument,
)
from platform.config.fields import KEYS, Config, find_declared_type, keep_typed_characters

if TYPE_CHECKING:
    from omegaconf import DictConfig


SCHEME = "own"
LARGEST = 64 << 10  # bytes of a file: about a second of parsing
MOST_VALUES = 20_000  # values in a file, with every alias expanded
DEEPEST = 30  # levels of nested mappings and lists
TOO_DEEP = f"it is nested deeper than {DEEPEST}, or holds itself"


def register_own_files() -> str:
    """Register `UserYamlSource` with Hydra, a source that reads a user's YAML files (`own://` paths) within bounds;
    return the scheme "own"."""
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.plugins.config_source import ConfigLoadError, ConfigResult
    from omegaconf import OmegaConf

    class UserYamlSource(FileConfigSource):
        """Reads the YAML files of `own://` paths, after a check of each."""

        @staticmethod
        def scheme() -> str:
            """Return "own", the scheme of the URLs of a user's own YAML files in Hydra."""
            return SCHEME

        def load_config(self, config_path: str) -> ConfigResult:
            """Load a YAML file of the user for Hydra. Raises ConfigLoadError if it is too large, too deep or no map."""
            path = os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path)))
            if reason := find_yaml_fault(path):
                raise ConfigLoadError(reason)
            loaded = super().load_config(config_path)
            package = loaded.header.get("package") or "_group_"
            place = {"_group_": os.path.dirname(config_path).replace("/", "."), "_global_": ""}.get(package, package)
            values = OmegaConf.to_container(loaded.config, resolve=False)
            loaded.config = OmegaConf.create(
                keep_typed_characters(values, _load_as_text(path), find_declared_type(place))
            )
            return loaded

    SourcesRegistry.instance().register(UserYamlSource)
    return SCHEME


def _load_as_text(path: str) -> Any:
    """Load the YAML file of a user at `path` with the characters of each number, truth value and the word null as
    text."""
    import yaml
    from omegaconf._utils import get_yaml_loader

    loader = get_yaml_loader()
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":merge", ":null"))]
        for first, resolvers in loader.yaml_implicit_resolvers.items()
        if first not in "nN"
    }
    return yaml.load(Path(path).read_text("utf-8"), Loader=loader)


def find_yaml_fault(path: str) -> str:
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
        if any(depth > DEEPEST for depth in accumulate(map(_nesting_change, events))):
            return TOO_DEEP
        values = yaml.load(text, Loader=get_yaml_loader())
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 (byte {error.start})"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if values is not None and not isinstance(values, dict):
        return f"it holds a {type(values).__name__}, not keys with values"
    return _find_extent_fault(values)


def _nesting_change(event: Any) -> int:
    """Return by how much an event in parsing a configuration file changes the depth of nesting: 1, -1 or 0."""
    from yaml.events import CollectionEndEvent, CollectionStartEvent

    return isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)


def _find_extent_fault(values: Any) -> str:
    """Return why the plain data of a user's configuration file has too many values or is nested too deep; "" if not. An
    object counts once per place it occurs in."""
    pending, count = [(values, 0)], 0
    while pending:
        value, depth = pending.pop()
        count += 1
        if depth > DEEPEST:
            return TOO_DEEP
        if count > MOST_VALUES:
            return f"it holds more than {MOST_VALUES} values"
        if isinstance(value, dict):
            pending += [(part, depth + 1) for part in value.values()]
        elif isinstance(value, list | tuple | set):
            pending += [(part, depth + 1) for part in value]
    return ""


# Resolvers of OmegaConf and Hydra that read only the configuration, the clock or the interpreter: no secrets.
_HARMLESS = {
    *("oc.create", "oc.decode", "oc.deprecated", "oc.dict.keys", "oc.dict.values", "oc.select", "now", "hydra"),
    "python_version",
}
_RESOLVER = re.compile(r"\$\{\s*([\w.]+)\s*:")

_read: dict[str, str] = {}  # value -> the reference that read it


def remember_environment_secrets() -> None:
    """Replace OmegaConf's resolver of `${oc.env:NAME}` in configurations with one that remembers the values it reads,
    so that `resolve_references` can register them as secrets."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def read_environment_variable(name: str, *default: Any) -> Any:
        """Return an environment variable for `${oc.env:NAME}`, and remember its value, which may be a secret."""
        if name in os.environ:
            _read[os.environ[name]] = f"${{oc.env:{name}}}"
        return oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", read_environment_variable, replace=True)


def resolve_references(composed: Any) -> dict[str, Any]:
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
    for key, raw, value in _find_references(OmegaConf.to_container(composed, resolve=False), values, ""):
        for text in iterate_texts(value):
            if key in KEYS and text in KEYS[key].choices:
                continue
            secrets = {secret: shown for secret, shown in _read.items() if secret and secret in text}
            # the whole text if, say, a resolver decoded it
            register_secrets(secrets or ({text: raw} if _has_outside_reference(raw) else {}))
    return {str(key): value for key, value in values.items()}


def _has_outside_reference(raw: str) -> bool:
    """Return True if `raw`, a value with references `${...}` as written, reads something outside the configuration; an
    unset environment variable, in whose place its default is taken, does not count."""
    names = {*_RESOLVER.findall(raw)} - _HARMLESS
    variables = re.findall(r"\$\{\s*oc\.env\s*:\s*(\w+)", raw)
    return bool(names - {"oc.env"}) or any(name in os.environ for name in variables)


def _is_word(text: str) -> bool:
    """Return True if a resolved text is a number or a legal choice of some configuration key, and so no secret."""
    return bool(re.fullmatch(r"[-+.\deE_]+", text)) or any(text in key.choices for key in KEYS.values())


def _find_references(raw: Any, value: Any, key: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, value as written, resolved value) for every value of a configuration that contains a reference
    `${...}`. `raw` and `value` are its parts at `key` before and after resolution."""
    if isinstance(raw, dict) and isinstance(value, dict):
        for name, part in raw.items():
            yield from _find_references(part, value.get(name), f"{key}.{name}" if key else str(name))
    elif isinstance(raw, list) and isinstance(value, list):
        for part, item in zip(raw, value, strict=True):
            yield from _find_references(part, item, key)
    elif isinstance(raw, str) and "${" in raw:
        yield key, raw, value


T = TypeVar("T")

HERE = Path(__file__).resolve().parents[1]
CONF = next(p for p in (HERE / "conf", HERE.parent / "conf") if p.is_dir())  # in a wheel, in a checkout

JOBS = "jobs"  # in hydra.sweeper.params: a line of arguments per job, of a sweep that is no product

RefusedArguments = list[tuple[str, Exception]]  # (argument, error that Hydra, OmegaConf or YAML raised for it)


@contextmanager
def open_composer(config_dir: str | None, stored: Mapping[str, Any] | None = None) -> Iterator[Composer]:
    """Initialise Hydra on the files in conf/ and the user's own in `config_dir`, and yield the composer of
    configurations. `stored`: a configuration (`Config.to_dict`) that takes the files' place. Raises ConfigError if
    `config_dir` is no directory."""
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore

    if config_dir is not None and not os.path.isdir(config_dir):
        raise ConfigError("--config-dir", config_dir, "no such directory", ["an existing directory"])
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:
        store.store(name="schema", node=Config)
    remember_environment_secrets()
    scheme = register_own_files()
    own_path = quote_value(f"{scheme}://{os.path.abspath(config_dir)}") if config_dir else ""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        yield Composer([f"hydra.searchpath=[{own_path}]"] if config_dir else [], stored or {})


def list_user_error_types() -> tuple[type[Exception], ...]:
    """Return the exception types that Hydra, OmegaConf and YAML raise for mistakes of a user in arguments or
    configuration files."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    # RecursionError: a file that includes itself, or a value that contains itself; ValueError: also bytes that are no
    # text
    return HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError, OSError, TypeError, KeyError


class Composer:
    """Composer of configurations from command-line arguments, while Hydra is initialised. `own`: the argument that adds
    the user's folder of YAML files to Hydra's search path, if any. `stored`: a whole configuration that takes the place
    of the files, but for the groups of which an argument chooses another."""

    def __init__(self, search_path_arguments: Sequence[str], stored: Mapping[str, Any]):
        """Prepare to compose configurations with Hydra's argument for the user's `search_path_arguments` folder, over a
        `stored` one."""
        self.own, self.stored = list(search_path_arguments), stored
        self._options: dict[str, list[str]] = {}  # group -> its options; [] if it is no group
        self._chosen: dict[tuple[str, ...], DictConfig] = {}  # choices -> composed files, as jobs of a sweep share them
        self._swept: dict[tuple[str, ...], dict[str, str]] = {}  # choices -> what those files say to sweep over

    def compose_arguments(self, arguments: Sequence[str]) -> tuple[Config, list[str], RefusedArguments]:
        """Return the configuration of arguments, the accepted ones in order, and the refused ones with their errors."""
        choices, values, refused = self._classify_arguments(arguments)
        base, chosen, no_choices = _find_accepted_arguments(self._compose_choices, choices)
        config, accepted_values, no_values = _find_accepted_arguments(lambda some: _apply_values(base, some), values)
        order = {argument: number for number, argument in enumerate(arguments)}
        refused_arguments = sorted([*refused, *no_choices, *no_values], key=lambda pair: order[pair[0]])
        return config, sorted([*chosen, *accepted_values], key=order.__getitem__), refused_arguments

    def find_sweep_arguments(self, arguments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
        """Return what a sweep, `-m`, gets from files (hydra.sweeper.params) for the keys that `arguments` do not set:
        arguments such as "seed=1,2", and the arguments of each job of its `jobs`, one without any if it has none. It
        gets nothing if `arguments` are refused, which planning their jobs reports."""
        typed = {_find_key(argument) for argument in arguments}
        swept: dict[str, str] = {}
        with suppress(*list_user_error_types()):
            plain = [a for a in arguments if not parse_argument(a).is_sweep_override()]
            choices, _, _ = self._classify_arguments(plain)
            self._compose_choices(choices)
            swept = {key: values for key, values in self._swept[tuple(choices)].items() if values and key not in typed}
        lines = swept.pop(JOBS, "").splitlines()
        jobs = [[word for word in line.split() if _find_key(word) not in typed] for line in lines] or [[]]
        job_keys = {_find_key(word) for job in jobs for word in job}
        return [f"{key}={values}" for key, values in swept.items() if key not in job_keys], jobs

    def list_options(self, group: str) -> list[str]:
        """Return the names of the YAML files in a group, such as "tensor"; [] if there is no such group."""
        if group not in self._options:
            self._options[group] = active_config_loader().repository.get_group_options(group)
        return self._options[group]

    def _classify_arguments(self, arguments: Sequence[str]) -> tuple[list[str], list[str], RefusedArguments]:
        """Return the arguments that choose YAML files (tensor=3d), the arguments that set values (train.steps=4), and
        the arguments refused as neither, with their errors."""
        from hydra.errors import HydraException

        choices: list[str] = []
        values: list[str] = []
        refused: RefusedArguments = []
        for argument in arguments:
            try:
                parsed = parse_argument(argument)
                if parsed.is_hydra_override():  # nothing else reads Hydra's own configuration
                    if parsed.value() == "basic" and not find_plugin_fault(argument):
                        continue
                    raise HydraException(find_plugin_fault(argument) or NOT_OURS)
                if not parsed.key_or_group:
                    raise HydraException("Error parsing override")
                group = bool(self.list_options(parsed.key_or_group)) and not isinstance(parsed.value(), dict)
                group = group or parsed.key_or_group == SCALE
                if parsed.is_sweep_override() or parsed.package is not None:
                    group = True  # composing raises Hydra's own error for these
            except list_user_error_types() as error:
                refused.append((argument, error))
                continue
            (choices if group else values).append(argument)
        return choices, values, refused

    def _compose_choices(self, choices: Sequence[str]) -> DictConfig:
        """Compose the YAML files that the arguments `choices` choose, and the stored configuration over them, into one
        configuration; the same choices are composed once. Raises any of `list_user_error_types`."""
        from omegaconf import OmegaConf

        key = tuple(choices)
        if key not in self._chosen:
            arguments = tuple(rewrite_argument(a) for a in (*self.own, *_name_scale(choices)))
            # The user's own files may change while a process runs, and so may what ${oc.env:X} is.
            changing = self.own or any("${" in argument for argument in arguments)
            shipped = None if changing else deepcopy(_compose_shipped_files(arguments, _read_file_times()))
            composition, self._swept[key] = shipped or _compose_files(arguments)
            chosen = {parse_argument(choice).key_or_group for choice in choices}
            composition.merge_with({group: values for group, values in self.stored.items() if group not in chosen})
            _build_config(composition)
            OmegaConf.set_struct(composition, True)
            self._chosen[key] = composition
        return self._chosen[key]


def _find_key(argument: str) -> str:
    """Return the key or group that an argument sets."""
    return argument.lstrip("+").partition("=")[0]


def _name_scale(choices: Sequence[str]) -> list[str]:
    """Return choices of files with +scale=FOLDER, last, as the choice of the file there of the experiment's name."""
    values = {_find_key(choice): choice.partition("=")[2] for choice in choices}
    others = [choice for choice in choices if _find_key(choice) != SCALE]
    named = values.get("experiment", "").rpartition("/")[2] or "none"
    return [*others, f"+{SCALE}/{values[SCALE]}={named}"] if SCALE in values else others


def _compose_files(arguments: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Compose the YAML files that Hydra's `arguments` choose into one configuration; return it, open to new keys, and
    what the files say to sweep over. Raises any of `list_user_error_types`."""
    import hydra
    from omegaconf import OmegaConf

    composition = hydra.compose("config", list(arguments), return_hydra_config=True)
    OmegaConf.set_struct(composition, False)  # axes of the stored configuration are new keys
    return composition, _read_basic_sweep(composition.pop("hydra"))


@lru_cache(maxsize=64)
def _compose_shipped_files(arguments: tuple[str, ...], stamps: tuple[int, ...]) -> tuple[DictConfig, dict[str, str]]:
    """Compose YAML files of conf/ once per process, as Hydra takes long. `stamps`: their times of change,
    `_read_file_times`."""
    return _compose_files(arguments)


def _read_file_times() -> tuple[int, ...]:
    """Return when each YAML file of conf/, from which configurations are composed, was changed, in order of name."""
    return tuple(os.stat(file).st_mtime_ns for file in sorted(CONF.rglob("*.yaml")))


def _read_basic_sweep(hydra: DictConfig) -> dict[str, str]:
    """Return hydra.sweeper.params of a composed configuration of Hydra's own: key -> values to sweep over. Raises
    ConfigError if the files choose another launcher or sweeper than Hydra's basic one."""
    for plugin in ("launcher", "sweeper"):
        name = hydra.runtime.choices[f"hydra/{plugin}"]
        if name != "basic":
            raise ConfigError(f"hydra/{plugin}={name}")
    return {str(key): str(values) for key, values in (hydra.sweeper.params or {}).items()}


def _find_accepted_arguments(
    compose: Callable[[list[str]], T], arguments: list[str]
) -> tuple[T, list[str], RefusedArguments]:
    """Find the command-line arguments that `compose`, which composes a configuration from a list of them, accepts;
    return its result for these, these, and the refused ones with the errors (`list_user_error_types`) that it raised.

    Each argument is tried after those before it, but only if they are not accepted all at once.
    """
    with suppress(*list_user_error_types()):
        return compose(arguments), arguments, []
    accepted: list[str] = []
    refused: RefusedArguments = []
    for argument in arguments:
        try:
            compose([*accepted, argument])
            accepted.append(argument)
        except list_user_error_types() as error:
            refused.append((argument, error))
    return compose(accepted), accepted, refused


def _apply_values(base: DictConfig, values: Sequence[str]) -> Config:
    """Apply the arguments `values` (KEY=VALUE) to a copy of the composed files `base`, as Hydra does, and convert the
    result to a Config. Raises any of `list_user_error_types`."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    config = deepcopy(base)
    for argument in values:
        ConfigLoaderImpl._apply_overrides_to_config([parse_argument(argument)], config)
    return _build_config(config)


def _build_config(config: DictConfig) -> Config:
    """Convert a configuration that Hydra composed to a Config, with references resolved and the secrets in URLs
    registered for redaction.

    Raises any of `list_user_error_types`: an unknown key, an interpolation of a missing key, a value left as ???.
    """
    values = resolve_references(config)
    register_url_secrets(values)
    return Config.from_dict(values)
