"""Command-line syntax: rewrites what users type into Hydra's grammar, and Hydra's errors into one line each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

from platform.boundary.refusals import SHOWN, ConfigError, closest_values, format_violation
from platform.boundary.terminal import escape_unprintable
from platform.config.fields import (
    KEYS,
    Config,
    find_declared_type,
    find_synonyms,
    flatten_config,
    keep_typed_characters,
)
from platform.config.groups import AUTO
from platform.config.key import Key, suggest_rhythms

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def rewrite_argument(argument: str) -> str:
    """Rewrite a command-line argument as users type it into Hydra's grammar.

        experiment=gpt_quick      +experiment=gpt_quick      not in the defaults list
        tensor.axes.t=2           ++tensor.axes.t=2          axes may be new keys
        cluster.labels.zone=a     ++cluster.labels.zone=a    likewise
        data.sources.web.path=a   ++data.sources.web.path=a  likewise
        optimizer.settings.rho=1  ++optimizer.settings.rho=1 likewise
        tensor.scheme=3d          tensor=3d                  the name of a scheme selects its table
        pipeline=mine             pipeline.kind=mine         a registered name, which is in no file
        tensor.layout=a:b;c:d     tensor.layout='a:b;c:d'    text
        data.special_tokens=[<a>]  data.special_tokens=['<a>'] a list of texts that Hydra cannot parse
        data.path=~/corpus        data.path='~/corpus'       any other value that Hydra cannot parse: text

    Every other argument stays as it is.
    """
    key, equals, value = argument.partition("=")
    name = key.lstrip("+")
    if not equals or key.startswith("~"):
        return argument
    if name == "experiment":
        return f"+experiment={value}"
    if name in ("tensor.scheme", "branch.kind"):
        return f"{name.split('.')[0]}={value}"
    if _is_registered(name, value):
        return f"{name}.kind={value}"
    if re.fullmatch(r"(tensor|branch)\.axes(\.[^.]+)?", name):
        return f"++{name}={value}"
    if re.fullmatch(r"(cluster\.(labels|runtime_env)|data\.sources|\w+\.(\w+_)?settings)(\..+)?", name):
        key, argument = f"++{name}", f"++{name}={value}"
    if name == "tensor.layout" and value != "null":
        return f"{name}={quote_value(value)}"
    if _try_parse_override(argument):
        return argument
    if value[:1] == "[" and value[-1] == "]" and isinstance(flatten_config(Config()).get(name), list):
        return f"{key}=[{','.join(quote_value(item.strip()) for item in value[1:-1].split(','))}]"
    return f"{key}={quote_value(value)}"


def _is_registered(group: str, name: str) -> bool:
    """Return True if a user's module registered `name` as a kind of `group`, such as "pipeline": it is a legal value of
    the key `group`.kind, but no YAML file of that group."""
    kind, files = f"{group}.kind", active_config_loader()
    registered = kind in KEYS and name in KEYS[kind].choices and files is not None
    return registered and name not in files.get_group_options(group)


def quote_value(value: str) -> str:
    """Quote the value of a command-line argument KEY=VALUE as a string in Hydra's grammar, unless it is quoted."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value
    # Each run of backslashes is read once: begun anywhere in it, a search would take time in the square of its length.
    escaped = re.sub(r"(?<!\\)(\\*+)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


SCALE = "scale"  # group of folders with sizes for an experiment, each in a file of the experiment's name
NOT_OURS = "Hydra's own keys do nothing here; own files go by --config-dir DIRECTORY"
BASIC = {  # Hydra's plugin groups -> why only `basic` of them is honoured, and what to do instead
    "launcher": "the jobs of a sweep run one after the other, each with all workers; or type one command per job",
    "sweeper": "a sweep runs every combination of what is typed as KEY=A,B; or type the values to try",
}


def find_plugin_fault(argument: str) -> str:
    """Return why an argument that chooses or configures one of Hydra's launchers or sweepers is refused, "" if it names
    neither, or Hydra's own basic one.

    >>> find_plugin_fault("hydra/launcher=basic")
    ''
    """
    key, _, value = argument.lstrip("+").partition("=")
    plugin_match = re.match(r"(?:override )?hydra[/.](launcher|sweeper)\b", key)
    if not plugin_match or (key.endswith(plugin_match[1]) and value == "basic"):
        return ""
    return f"only Hydra's basic {plugin_match[1]} is there: {BASIC[plugin_match[1]]}"


LONGEST = 20_000  # most characters of an argument that is given to Hydra's parser
DEEPEST = 20  # deepest nesting of brackets in such an argument, those inside quotes included


def parse_argument(argument: str) -> Override:
    """Parse a command-line argument into Hydra's Override. Raises HydraException if its grammar refuses it."""
    return _parse_override(rewrite_argument(argument), active_config_loader())


def _try_parse_override(argument: str) -> Override | None:
    """Parse an argument that `rewrite_argument` returned into Hydra's Override; None if Hydra's grammar refuses it."""
    from hydra.errors import HydraException

    try:
        return _parse_override(argument, active_config_loader())
    except HydraException:
        return None


def active_config_loader() -> Any:
    """Return Hydra's loader of the YAML files that a command line chooses; None while Hydra is not initialised."""
    from hydra.core.global_hydra import GlobalHydra

    hydra = GlobalHydra.instance()
    return hydra.config_loader() if hydra.is_initialized() else None


@lru_cache(maxsize=4096)
def _parse_override(argument: str, loader: Any) -> Override:
    """Parse an argument KEY=VALUE in Hydra's grammar, whose key, if it is of type text, takes the characters as they
    are typed; `loader` is Hydra's, which expands a glob(...) over a group's files. Raises HydraException also for
    one that is too long or whose brackets are nested too deep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep
    from hydra.errors import HydraException

    brackets = accumulate((c in "([{") - (c in ")]}") for c in argument)
    if len(argument) > LONGEST or any(depth > DEEPEST for depth in brackets):
        raise HydraException("too long, or brackets too deep")
    try:
        parsed = OverridesParser.create(loader).parse_overrides([argument])[0]
        value, text, declared = parsed._value, _parse_as_text(argument), find_declared_type(parsed.key_or_group)
        if isinstance(value, ChoiceSweep):
            value.list = keep_typed_characters(value.list, text.list, list[declared])  # type: ignore[valid-type]
        parsed._value = keep_typed_characters(value, text, declared)
        return parsed
    except (ValueError, RecursionError) as error:  # such as an integer of 5,000 digits
        raise HydraException(str(error)) from None


def _parse_as_text(argument: str) -> Any:
    """Parse the value of an argument that Hydra's grammar takes, with the characters of each number, truth value and
    null in it as text, but for what Hydra's functions compute with."""
    from hydra.core.override_parser import overrides_parser
    from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor

    hydra: Any = overrides_parser  # with the parts of the parser that Hydra makes

    class TextVisitor(HydraOverrideVisitor):
        """Visits a parsed argument, and takes numbers, truth values and null as text."""

        def visitPrimitive(self, ctx: Any) -> Any:
            """Return what stands for one value: text or quoted text, but what a function computes with as it is."""
            call, value = ctx.parentCtx.parentCtx, super().visitPrimitive(ctx)
            before = call.children[call.children.index(ctx.parentCtx) - 1]
            option = isinstance(before, hydra.OverrideParser.ArgNameContext)
            computed = option or call.getChild(0).getText() in ("range", "interval")
            return ctx.getText().strip() if isinstance(value, int | float | None) and not computed else value

        def visitDictKey(self, ctx: Any) -> Any:
            """Return a name in a map as text, or quoted text."""
            name = super().visitDictKey(ctx)
            return ctx.getText().strip() if isinstance(name, int | float | None) else name

    tokens = hydra.CommonTokenStream(hydra.OverrideLexer(hydra.InputStream(argument)))
    return TextVisitor(hydra.create_functions()).visit(hydra.OverrideParser(tokens).override())._value


def expand_sweep_jobs(overrides: Sequence[str], multirun: bool, jobs: Sequence[list[str]] = ([],)) -> list[list[str]]:
    """Return the arguments of each job (run) of a command with the arguments `overrides`: one job without `-m`, which
    sets `multirun`, else Hydra's product of choices, ranges and globs, with the arguments of each of `jobs`.

    Raises ConfigError if a sweep has no value.
    """
    choices = []
    for override in overrides:
        if multirun and (parsed := _try_parse_override(rewrite_argument(override))) and parsed.is_discrete_sweep():
            key, values = parsed.get_key_element(), list(parsed.sweep_string_iterator())
            if not values:
                reason = "a sweep over no value; glob(...) takes the files of a group"
                raise ConfigError(key, override.partition("=")[2], reason, ["a,b", "range(1,4)"])
            choices.append([f"{key}={value}" for value in values])
        else:
            choices.append([override])
    return [[*combination, *job] for job in jobs for combination in product(*choices)]


def parse_typed_values(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the configuration keys that the arguments of a command set, with their values; the members of
    `tensor.axes={...}` count as typed too, as `tensor.axes.NAME`."""
    typed: dict[str, Any] = {}
    for argument in arguments:
        if (parsed := _try_parse_override(rewrite_argument(argument))) and not parsed.is_delete():
            key, value = parsed.key_or_group, parsed.value()
            typed[key] = value
            if key in ("tensor.axes", "branch.axes") and isinstance(value, dict):
                typed = {k: v for k, v in typed.items() if not k.startswith(f"{key}.")}
                typed |= {f"{key}.{name}": size for name, size in value.items()}
    return typed


def find_experiment_name(arguments: Sequence[str]) -> str | None:
    """Return the name of the experiment that the arguments of a run choose, to name its directory: "a", "a+b" for
    `+experiment=[a,b]`, or None if none is chosen."""
    value = parse_typed_values(arguments).get("experiment")
    names = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
    return "+".join(names).replace("/", "_") or None


HOW_MANY = "a run has as many workers as all its sizes multiply to: parallel.data x tensor.axes x pipeline.stages ..."
_KINDS = {"Integer": "an integer", "Float": "a number"}


def format_hydra_error(argument: str, error: Exception) -> str:
    """Translate the error that Hydra or OmegaConf raised for one command-line argument into one refusal line for the
    user."""
    key, _, value = argument.lstrip("+").partition("=")
    text = str(error) + (f"\n{error.__cause__}" if error.__cause__ else "")
    if option := re.search(r"Could not (?:find|load) '(.+)/(.*?)'", text):
        return _format_unknown_option(*option.groups())
    malformed = re.search("Error parsing override|Lexer|mismatched input|extraneous input|no viable", text)
    if malformed or key.startswith("~"):
        line = f"{argument[:SHOWN]}: must be KEY=VALUE; nearest legal: +experiment=NAME, train.steps=100"
        return escape_unprintable(line)
    if "Ambiguous value" in text or "requires --multirun" in text:
        return format_violation(key, value, "several values: a sweep needs -m, a list is written [a,b]")

    if plugin := re.search(r"(hydra/(?:launcher|sweeper))=(\S+)", text):
        return format_violation(plugin[1], plugin[2], find_plugin_fault(f"{plugin[1]}={plugin[2]}"), ["basic"])
    key_match = re.search(r"(?m)full_key: (\S+)|Could not override '(\S+)'|^([^\s=]+)=.*: unknown key", text)
    refused_key = next(filter(None, key_match.groups()), key) if key_match else key
    # another key: the chosen file has the mistake
    key_prefix = "" if refused_key.split("[")[0] == key.split("@")[0] else f"{refused_key}: "
    if key in ("hardware", SCALE):
        return _format_refused_group(key, value)
    if single := isinstance(flatten_config(Config()).get(key.rpartition(".")[0]), str | int):  # has no keys inside
        refused_key, key_prefix = key, ""
    if single or re.search(r"' not in '|is not in struct|unknown key|Could not override", text):
        near = _similar_keys(refused_key)
        remark = f"; {HOW_MANY}" if near == ["parallel.data"] else ""
        return format_violation(key, value, f"{key_prefix}unknown key{remark}", near)
    if "incompatible with type hint 'Union[int, str]'" in text:
        above = [str(int(value.partition(".")[0]) + 1)] if re.fullmatch(r"[0-9]{1,5}\.[0-9]*", value) else []
        legal = [*above, *_suggest_default(refused_key), AUTO]
        legal = suggest_rhythms(value) if refused_key == "checkpoint.every" else [*dict.fromkeys(legal)]
        return format_violation(key, value, key_prefix + KEYS[refused_key].constraint, legal)
    if "is not a valid bool" in text:
        return format_violation(key, value, f"{key_prefix}must be true or false", ["true", "false"])
    if conversion := re.search(r"Value '(.*)' of type '(\w+)' could not be converted to (\w+)", text, re.S):
        value_text, kind, type_name = conversion.groups()
        is_whole_number = (kind, type_name) == ("float", "Integer") and float(value_text).is_integer()
        most = KEYS[refused_key].most if refused_key in KEYS else Key.most
        whole = is_whole_number and float(value_text) >= -most
        legal = [str(int(min(float(value_text), most)))] if whole else _suggest_default(refused_key)
        return format_violation(key, value, f"{key_prefix}must be {_KINDS.get(type_name, type_name)}", legal)
    if re.search("is not Optional|Missing mandatory value|Incompatible value 'None'", text):
        return format_violation(key, value, f"{key_prefix}must be given", _suggest_default(refused_key))
    if re.search(r"Cannot assign .* to Dict\[", text):
        return format_violation(key, value, f"{key_prefix}must be keys with values", [f"{key}.NAME=VALUE"])
    if "is not a ListConfig" in text:
        return format_violation(key, value, f"{key_prefix}must be a list", [f"[{value}]"])
    if isinstance(error, RecursionError):
        return format_violation(key, value, "includes itself, or holds itself")
    if "group override must be a string" in text or "can only concatenate" in text or "sequence item" in text:
        return format_violation(key, value, "must be a name, or a list of names")
    first_line = text.split("\n    full_key")[0].removeprefix(f"Error merging override {rewrite_argument(argument)}")
    return format_violation(key, value, key_prefix + " ".join(first_line.split()))


def _format_unknown_option(group: str, name: str) -> str:
    """Return the line that refuses an option that a group of files does not have."""
    if group.startswith(f"{SCALE}/"):
        return format_violation(SCALE, group.partition("/")[2], f"has no sizes for the experiment {name}")
    kind, known = f"{group}.kind", active_config_loader().get_group_options(group)
    registered = [f"{kind}={name} where a module in extend=[MODULE] registers it"]
    legal = [*closest_values(name, known), *(registered if kind in KEYS and KEYS[kind].open else [])]
    return format_violation(group, name, "unknown", legal)


def _format_refused_group(group: str, name: str) -> str:
    """Return the line that refuses a name in the group hardware, which no run reads, or in the group of scales."""
    from hydra.core.object_type import ObjectType

    if group == SCALE:
        folders = active_config_loader().get_group_options(SCALE, ObjectType.GROUP)
        return format_violation(SCALE, name, "no such folder of sizes", folders)
    constraint = f"no key of a run: --hardware {name} of python -m platform.plan, or cluster.hardware={name}"
    return format_violation(group, name, constraint)


def _suggest_default(key: str) -> list[Any]:
    """Return a key's default as a list of one value to suggest for a refused argument; [] without any."""
    value = flatten_config(Config()).get(key)
    return [value] if value or value == 0 else []


def _similar_keys(key: str) -> list[str]:
    """Return up to three configuration keys or groups that the user may have meant by the unknown `key` of an argument:
    one if another system calls it so, else similar ones, as a whole or in their last part."""
    if synonyms := find_synonyms(key):
        return synonyms
    group, _, key_rest = key.partition(".")
    if group in ("tensor", "branch") and get_close_matches(key_rest.partition(".")[0], ["axes"]) and "." in key_rest:
        return [f"{group}.axes.{key_rest.rpartition('.')[2]}"]  # an axis may have any name
    known = [*vars(Config()), *flatten_config(Config())]
    similar_names = get_close_matches(key, known, n=3, cutoff=0.7)
    similar_ends = get_close_matches(key.split(".")[-1], {name.split(".")[-1] for name in known}, n=3, cutoff=0.7)
    return list(dict.fromkeys([*similar_names, *(name for name in known if name.split(".")[-1] in similar_ends)]))[:3]
