"""Rules between a `config.json` of transformers and our model keys: what sets a key, what has one accepted value, and
what does not matter to the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any, NamedTuple

from platform.boundary.refusals import format_value
from platform.config.fields import Model
from platform.model.layers import dim_sizes, expert_width, linear_head_sizes

ConfigJson = Mapping[str, Any]  # a config.json
NEEDED = object()  # the default of a key that must be there
MOST_LAYERS = 1000
_LONGEST = 60  # characters of a value in a refusal


@dataclass(frozen=True)
class Rule:
    """Rule for some keys of a config.json, in both directions; `theirs`: the keys that it reads, apart by spaces."""

    theirs: str

    @property
    def key_names(self) -> Sequence[str]:
        """Return the keys of a config.json of transformers that this translation rule is about."""
        return self.theirs.split()

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return the keys of our model that this translation rule reads in a config.json. Raises Inexpressible."""
        return {}

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return the keys of a config.json of transformers that this translation rule writes for a model."""
        raise NotImplementedError


def resolve_sizes(m: Model) -> dict[str, int]:
    """Return our model keys whose 0 stands for a size in transformers' config.json, with that size."""
    sizes = {key: dim_sizes(m)[key] for key in ("kv_heads", "d_kv", "d_ff")}
    sizes |= {f"global_{key}": getattr(m, f"global_{key}") or sizes[key] for key in ("kv_heads", "d_kv")}
    sizes["shared_d_ff"] = m.shared_d_ff or expert_width(m) * m.shared_experts
    return {**sizes, "expert_d_ff": expert_width(m), "d_value": m.d_value or sizes["d_kv"], **linear_head_sizes(m)}


def json_excerpt(value: Any) -> str:
    """Return a value in transformers' config.json as JSON text of about 60 characters at most, for a refusal."""
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class Inexpressible(ValueError):
    """Signals a key of a config.json whose value our words do not express; the message is the refusal, in a line."""

    def __init__(self, key: str, value: Any, why: str):
        """Construct the refusal of a value in transformers' config.json that our model keys do not express."""
        super().__init__(f"{key}={json_excerpt(value)}: {why}")


def read_value(config_json: ConfigJson, name: str, default: Any, kinds: tuple[type, ...]) -> Any:
    """Return a key's value in transformers' config.json, or its default. Raises Inexpressible if not of `kinds`."""
    if name not in config_json and default is NEEDED:
        raise Inexpressible(name, "", "is missing")
    value = config_json.get(name, default)
    if type(value) not in kinds:
        raise Inexpressible(name, value, f"is no {' or '.join(k.__name__ for k in kinds if k is not type(None))}")
    return value


@dataclass(frozen=True)
class Renamed(Rule):
    """Rule that a key is one of our model keys, `ours`; of several keys the first is written, and the first that is
    there is read. `default`: value that transformers takes where it is missing; `null`: our value for null; `written`:
    function of the model that gives the value to write, by default our key's, or the size for which its 0 stands."""

    ours: str
    default: Any = NEEDED
    null: Any = None
    written: Callable[[Model], Any] | None = None

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return our model key with the value of transformers' key in config.json, in our type; `null` for null."""
        kind = type(getattr(Model(), self.ours))
        kinds = (int, float) if kind is float else (kind,)
        name = next((name for name in self.key_names if name in config_json), self.key_names[0])
        value = read_value(config_json, name, self.default, kinds if self.null is None else (*kinds, type(None)))
        return {self.ours: self.null if value is None else kind(value)}

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return transformers' key for config.json with the value of our model key; null in place of our `null`."""
        value = self.written(m) if self.written else resolve_sizes(m).get(self.ours, getattr(m, self.ours))
        return {self.key_names[0]: value}


@dataclass(frozen=True)
class Words(Rule):
    """Rule that a key names what one of our model keys, `ours`, names otherwise; `words`: their name -> ours. The first
    of several for one of ours is written, and the first of all for what none names: it is another when read again."""

    ours: str
    words: Mapping[Any, Any]
    default: Any = NEEDED

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return our model key with our word for the value in a config.json. Raises Inexpressible if there is none."""
        value = read_value(config_json, self.theirs, self.default, tuple({type(word) for word in self.words}))
        if value not in self.words:
            known = ", ".join(map(format_value, self.words))
            raise Inexpressible(self.theirs, value, f"our words express {known}")
        return {self.ours: self.words[value]}

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return transformers' key for config.json with their word for the value of our model key."""
        ours = getattr(m, self.ours)
        return {self.theirs: next((theirs for theirs, word in self.words.items() if word == ours), [*self.words][0])}


@dataclass(frozen=True)
class Only(Rule):
    """Rule that a key has one accepted value, the first of `accepted`, or others that mean the same. The first stands
    for a missing key too. It is not `written` where only older versions write it; `why`: the reason in a refusal."""

    accepted: Sequence[Any]
    written: bool = True
    why: str = ""

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return {}, no key of our model. Raises Inexpressible for a value of the config.json's key not accepted."""
        value = config_json.get(self.theirs, self.accepted[0])
        if not any(value == other and type(value) is type(other) for other in self.accepted):
            why = self.why or f"our words express {json_excerpt(self.accepted[0])} alone"
            raise Inexpressible(self.theirs, value, why)
        return {}

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return transformers' key for config.json with its one accepted value."""
        return {self.theirs: self.accepted[0]} if self.written else {}


@dataclass(frozen=True)
class Free(Rule):
    """Rule that keys do not matter to logits and gradients: `theirs`, which are not written, and `defaults`, which
    are."""

    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key_names(self) -> Sequence[str]:
        """Return the keys of transformers' config.json that do not matter to the model's numbers."""
        return [*self.defaults, *super().key_names]

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return the keys of transformers' config.json that do not matter and have a default, with the default."""
        return dict(self.defaults)


@dataclass(frozen=True)
class FunctionRule(Rule):
    """Rule of two functions: `reading` gives our model keys for a config.json, `writing` theirs for a model."""

    reading: Callable[[ConfigJson], dict[str, Any]]
    writing: Callable[[Model], dict[str, Any]]

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return the keys of our model that the rule's function reads in a config.json. Raises Inexpressible."""
        return self.reading(config_json)

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return the keys of a config.json that the rule's function writes for a model."""
        return self.writing(m)


@dataclass(frozen=True)
class DropoutRule(Rule):
    """Rule that several keys are all our one model.dropout; `default`: value where one is missing."""

    default: float

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return our model key dropout for transformers' config.json. Raises Inexpressible if its dropouts differ."""
        first, *others = self.key_names
        rate = read_value(config_json, first, self.default, (int, float))
        for name in others:
            if (other := read_value(config_json, name, self.default, (int, float))) != rate:
                raise Inexpressible(name, other, f"{first} is {rate:g}, and our model.dropout is one")
        return {"dropout": float(rate)}

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return the dropout keys of transformers' config.json, all with our model's dropout."""
        return dict.fromkeys(self.key_names, m.dropout)


@dataclass(frozen=True)
class RotaryRule(Rule):
    """Rule of rotary positions: `rope_parameters`, or `rope_theta` and `rope_scaling` as older versions write them.
    `theta`, `scaling`, `share`: defaults of the family, where a config.json says nothing of them; with a `share` its
    partial_rotary_factor is always written. `original`: default of original_max_position_embeddings, in a family that
    has it beside rope_parameters, and takes it from there."""

    theirs: str = "rope_parameters rope_theta rope_scaling"
    theta: float = 10000.0
    scaling: Mapping[str, Any] = field(default_factory=dict)
    share: float | None = None
    original: int | None = None

    @property
    def key_names(self) -> Sequence[str]:
        """Return the keys of a config.json on rotary positions, of this family."""
        kept = {"partial_rotary_factor": self.share, _ORIGINAL: self.original}
        return [*super().key_names, *(name for name, default in kept.items() if default is not None)]

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return our model keys rope_* for the rotary positions in a config.json. Raises Inexpressible for other kinds
        of scaling, or numbers of them."""
        maps = (dict, type(None))
        scaling_key = "rope_scaling" if config_json.get("rope_scaling") else "rope_parameters"
        scaling = dict(read_value(config_json, scaling_key, None, maps) or self.scaling)
        theta = scaling.pop("rope_theta", None) or read_value(config_json, "rope_theta", self.theta, (int, float))
        share = read_value(config_json, "partial_rotary_factor", self.share or 1.0, (int, float))
        share = read_value(scaling, "partial_rotary_factor", share, (int, float))
        scaling.pop("partial_rotary_factor", None)
        kinds = [scaling.pop(name, None) for name in ("rope_type", "type")]
        kind = next((k for k in kinds if k is not None), "default")
        kind = "longrope" if kind == "su" else kind
        if not isinstance(kind, str) or kind not in _SCALINGS:
            raise Inexpressible(f"{scaling_key}.rope_type", kind, f"our words express {', '.join(_SCALINGS)}")
        model_keys: dict[str, Any] = {"rope_theta": float(_check_not_negative(f"{scaling_key}.rope_theta", theta))}
        model_keys |= {"rope_scaling": "none" if kind == "default" else kind, "rope_share": float(share)}
        if kind == "dynamic":
            model_keys["rope_original_length"] = _check_not_negative(_LENGTH, config_json.get(_LENGTH))
        for name, ours in _SCALINGS[kind].items():
            value = scaling.pop(name, None)
            value = self._read_default(config_json, scaling, kind, name) if value is None else value
            model_keys[ours] = _read_number(f"{scaling_key}.{name}", value, type(getattr(Model(), ours)))
        for name, value in scaling.items():
            if (name, value) not in _NEUTRAL and not (value is None and name in _YARN_WEIGHTS):
                raise Inexpressible(f"{scaling_key}.{name}", value, f"our rope_scaling={kind} has no such number")
        return model_keys

    def _read_default(self, config_json: ConfigJson, scaling: dict[str, Any], kind: str, name: str) -> Any:
        """Return what transformers takes for a number of rotary positions that a config.json lacks, or says otherwise:
        the original length beside rope_parameters, the factor by both lengths, yarn's magnitude by its two weights,
        which are taken out of `scaling`."""
        lengths: list[Any] = [
            config_json.get(_LENGTH),
            config_json.get(_ORIGINAL, self.original) or scaling.get(_ORIGINAL),
        ]
        if name == _ORIGINAL:
            return lengths[1] or lengths[0]
        if name == "factor" and kind == "proportional":
            return 1.0
        if name == "factor" and kind in ("yarn", "longrope") and all(type(n) is int and n > 0 for n in lengths):
            return max(1.0, lengths[0] / lengths[1])
        weights: list[Any] = [scaling.get(weight) for weight in _YARN_WEIGHTS]
        if name == "attention_factor" and kind == "yarn" and all(type(w) in (int, float) and w > 0 for w in weights):
            top, of_all = (yarn_magnitude(scaling.get("factor") or 1.0, scaling.pop(w)) for w in _YARN_WEIGHTS)
            return top / of_all
        return _DEFAULTS.get(name)

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return `rope_parameters` of transformers' config.json for a model, without numbers at their defaults."""
        kind = "default" if m.rope_scaling == "none" else m.rope_scaling
        numbers = {name: getattr(m, ours) for name, ours in _SCALINGS.get(kind, {}).items()}
        implied = dict(_DEFAULTS)
        if kind == "proportional":
            implied["factor"] = 1.0
        if kind == "longrope":
            implied["factor"] = max(1.0, m.length / max(1, m.rope_original_length))
        if self.share is not None or m.rope_share != 1:
            numbers["partial_rotary_factor"] = m.rope_share
        other_numbers = {name: value for name, value in numbers.items() if value != implied.get(name)}
        beside = {} if self.original is None else {_ORIGINAL: m.rope_original_length or self.original}
        return {"rope_parameters": {"rope_theta": m.rope_theta, "rope_type": kind, **other_numbers}, **beside}


_LENGTH, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_LINEAR = {"factor": "rope_factor"}
_LONGER = {**_LINEAR, _ORIGINAL: "rope_original_length"}
_SCALINGS: dict[str, dict[str, str]] = {  # kind of scaling -> its numbers, by their name: our key
    "default": {},
    "linear": _LINEAR,
    "dynamic": _LINEAR,
    "llama3": {**_LONGER, "low_freq_factor": "rope_low", "high_freq_factor": "rope_high"},
    "yarn": {"attention_factor": "rope_magnitude", **_LONGER, "beta_slow": "rope_low", "beta_fast": "rope_high",
             "truncate": "rope_truncate"},
    "longrope": {**_LONGER, "short_factor": "rope_short", "long_factor": "rope_long",
                 "attention_factor": "rope_magnitude"},
    "proportional": _LINEAR,
}  # fmt: skip
_DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": 0.0, "truncate": True}  # where one is missing
_NEUTRAL = (("truncate", True),)
_YARN_WEIGHTS = ("mscale", "mscale_all_dim")


def yarn_magnitude(factor: float, weight: float) -> float:
    """Return the factor on queries, or on scores, by which YaRN answers angles scaled by `factor` (its mscale)."""
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0


def _read_number(name: str, value: Any, kind: type) -> Any:
    """Return a number, list or truth value of transformers' config.json in the type `kind`. Raises Inexpressible."""
    if kind is bool:
        return read_value({name: value}, name, NEEDED, (bool,))
    if kind is list:
        return [float(_check_not_negative(name, n)) for n in read_value({name: value}, name, NEEDED, (list,))]
    return kind(_check_not_negative(name, value))


def _check_not_negative(name: str, value: Any) -> float:
    """Return a number >= 0 in transformers' config.json; raises Inexpressible, naming key `name`, for other values."""
    if type(value) not in (int, float) or value < 0:
        raise Inexpressible(name, "" if value is None else value, "is no number" if value is not None else "is missing")
    return value


@dataclass(frozen=True)
class LayerWindowRule(Rule):
    """Rule that some layers have a window: `layer_types`, else those from `max_window_layers` on, if
    `use_sliding_window` (Qwen), or, where a family has no such keys, all but each layer number `every` (GPT-OSS: 2),
    which a key sliding_window_pattern may say. `width`: default of sliding_window."""

    theirs: str = "use_sliding_window sliding_window max_window_layers layer_types"
    width: int = 4096
    every: int = 2

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return our model keys window and window_layers for a config.json. Raises Inexpressible if its keys contradict
        each other."""
        layers = read_value(config_json, "num_hidden_layers", NEEDED, (int,))
        if not 0 < layers <= MOST_LAYERS:
            return {}  # refused by the bounds of model.layers
        alternate = "use_sliding_window" not in self.key_names
        used = alternate or read_value(config_json, "use_sliding_window", False, (bool,))
        width = read_value(config_json, "sliding_window", self.width, (int, type(None))) if used else None
        first = read_value(config_json, "max_window_layers", 28, (int,))
        kinds = read_value(config_json, "layer_types", None, (list, type(None)))
        every = read_value(config_json, _PATTERN, self.every, (int,)) if _PATTERN in self.key_names else self.every
        if every < 1:
            raise Inexpressible(_PATTERN, every, "is no number of layers")
        if kinds is None:
            is_windowed = lambda i: (i + 1) % every > 0 if alternate else bool(width) and i >= first  # noqa: E731
            kinds = list(_list_layer_types(layers, is_windowed))
        if len(kinds) != layers or not all(kind in LAYER_KINDS for kind in kinds):
            raise Inexpressible(
                "layer_types", kinds, f"our words express {' and '.join(LAYER_KINDS)}, one for each layer"
            )
        windowed = [i for i, kind in enumerate(kinds) if kind == LAYER_KINDS[1]]
        if windowed and not width:
            said = " and ".join(name for name in self.key_names if name in ("use_sliding_window", "sliding_window"))
            raise Inexpressible("layer_types", kinds, f"{said}: there is none")
        some = windowed if len(windowed) < layers else []
        return {"window": width if width and windowed else 0, "window_layers": some}

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return the keys of a config.json on attention windows; `max_window_layers` where the windowed layers are the
        last."""
        windowed = [i for i in range(m.layers) if m.window and (not m.window_layers or i in m.window_layers)]
        last = windowed and windowed == list(range(windowed[0], m.layers))
        values = {
            "use_sliding_window": bool(m.window),
            "sliding_window": m.window or None,
            "max_window_layers": windowed[0] if last else 28,
            "layer_types": list(_list_layer_types(m.layers, lambda i: i in windowed)),
        }
        return {name: values[name] for name in self.key_names if name in values}


_PATTERN = "sliding_window_pattern"
LAYER_KINDS = ("full_attention", "sliding_attention")


def _list_layer_types(layers: int, windowed: Callable[[int], bool]) -> Iterator[str]:
    """Yield each layer's attention as `layer_types` of config.json has it: sliding_attention if `windowed`."""
    return (LAYER_KINDS[windowed(i)] for i in range(layers))


@dataclass(frozen=True)
class LayerRotaryRule(Rule):
    """Rule of windows and rotary positions that differ by a layer's kind: `rope_parameters` has a map for each, of
    which the one of layers with a window scales nothing; older versions say the base of these as `local_key`.
    `windows`: rule of the layers with a window; `rotary`: rule of the other layers' positions; `local`: default base of
    layers with a window."""

    windows: LayerWindowRule
    rotary: RotaryRule
    local: float
    local_key: str = "rope_local_base_freq"

    @property
    def key_names(self) -> Sequence[str]:
        """Return the keys of a config.json on windows and rotary positions."""
        return [*self.windows.key_names, *self.rotary.key_names, self.local_key]

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return our model keys on windows and rotary positions for a config.json. Raises Inexpressible."""
        parameters = read_value(config_json, "rope_parameters", None, (dict, type(None))) or {}
        nested = {kind: parameters.get(kind) or {} for kind in LAYER_KINDS} if {*LAYER_KINDS} & {*parameters} else None
        of_others = {**config_json, "rope_parameters": nested[LAYER_KINDS[0]] if nested else parameters}
        model_keys = self.windows.read_model_keys(config_json) | self.rotary.read_model_keys(of_others)
        said = dict(nested[LAYER_KINDS[1]]) if nested else {}
        base = said.pop("rope_theta", None) or read_value(config_json, self.local_key, self.local, (int, float))
        if said and said != {"rope_type": "default"}:
            raise Inexpressible(f"rope_parameters.{LAYER_KINDS[1]}", said, "our words express a base alone, not scaled")
        if model_keys.get("window"):
            model_keys["window_rope_theta"] = float(_check_not_negative(self.local_key, base))
        return model_keys

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return the keys of a config.json on a model's windows and rotary positions."""
        windows, whole = self.windows.write_config_keys(m), self.rotary.write_config_keys(m)["rope_parameters"]
        bases = {"rope_theta": m.window_rope_theta or (m.rope_theta if m.window else self.local)}
        unscaled = {"rope_type": "default"} if m.window_rope_theta or not m.window else {**whole}
        return {**windows, "rope_parameters": {LAYER_KINDS[0]: whole, LAYER_KINDS[1]: {**unscaled, **bases}}}


QUANTISED, FP8_BLOCK = "quantization_config", "weight_block_size"


def read_quantisation(config_json: ConfigJson) -> tuple[int, int] | str:
    """Return the block of fp8 weights in a config.json of transformers, `mxfp4`, or "" for plain weights. Raises
    Inexpressible for weights that are quantised in another way."""
    described = read_value(config_json, QUANTISED, None, (dict, type(None)))
    if not described:
        return ""
    method, block = described.get("quant_method"), described.get(FP8_BLOCK)
    if method == "mxfp4":
        return "mxfp4"
    is_block = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if method != "fp8" or described.get("fmt", "e4m3") != "e4m3" or not is_block:
        raise Inexpressible(QUANTISED, described, f"our words read mxfp4, and fp8 (e4m3) with a {FP8_BLOCK}")
    return block[0], block[1]


def check_quantisation(config_json: ConfigJson) -> dict[str, Any]:
    """Return no keys of our model: how weights are quantised is read with them. Raises Inexpressible."""
    read_quantisation(config_json)
    return {}


# Family of models that transformers and we know, as data: keys of its config.json, names of its tensors; and what
# several families have in common.
#
# One Hugging Face tensor holds one or more of our parameters, each flattened to a matrix [output, input]: one after
# another, or a row of each in turn (`alternate`), or one `beside` another. GPT-2's are stored as [input, output]
# (`turned`).
# `{i}` is the number of a layer, `{e}` the number of an expert. A parameter of experts is a matrix for each: a tensor
# with `{e}` in its name holds the matrix of one, a tensor without stacks the matrices of all. Rows are in the order in
# which transformers writes them; a row of parameters that a model lacks counts for nothing in it.


class TensorRow(NamedTuple):
    """Name of a Hugging Face tensor, and of our parameters that it holds, one after another, or one after another for
    each head (`by_head`), or a row of each in turn (`alternate`). `turned`: it is stored as [what it contracts, what it
    adds]; `gated`: it is there only where feed-forward layers have a gate (True), or none (False); `groups`: our model
    key with the number of heads that `by_head` takes in turn, where others share each, as many of each parameter;
    `channels`: it has a dim of one index before the last, as a convolution of each channel by itself; `beside`: columns
    of one follow the last one's."""

    theirs: str
    ours: tuple[str, ...]
    turned: bool = False
    gated: bool | None = None
    alternate: bool = False
    by_head: bool = False
    groups: str = "heads"
    channels: bool = False
    beside: bool = False


@dataclass(frozen=True)
class Family:
    """Family of models: `architecture` is the class that has all tensors; `read`: the classes that may be read, where
    others have more or fewer.

    `fixed`: our model keys that are alike in the whole family; what neither they nor `rules`, for the keys of
    config.json, say is at its default. `rows`: rows of tensors; `prefix`: optional beginning of names, missing as where
    the class without a head was saved; `same`: names that repeat another tensor (tied), with {i} where each module of
    multi-token prediction does; `buffers`: names of tensors
    that are no parameters, and are not read; `fused`: other rows, in which a layer's experts are stacked.
    """

    name: str
    architecture: str
    fixed: Mapping[str, Any]
    rules: Sequence[Rule]
    rows: Sequence[TensorRow]
    prefix: str
    same: Mapping[str, str] = field(default_factory=dict)
    buffers: Sequence[str] = ()
    fused: Sequence[TensorRow] = ()
    read: Sequence[str] = ()


def module_rows(names: Mapping[str, str], turned: bool = False) -> Iterator[TensorRow]:
    """Yield a model family's table rows for weight and bias of modules; `names`: transformers' name -> ours."""
    for theirs, ours in names.items():
        endings = (".gain", ".bias") if ours.endswith("norm") else ("", "_bias")
        for kind, ending in zip(("weight", "bias"), endings, strict=True):
            our_names = tuple(f"{name}{ending}" for name in ours.split())
            yield TensorRow(f"{theirs}.{kind}", our_names, turned and kind == "weight")


ONE_STACK = Only("is_encoder_decoder", (False,), written=False)

PLAIN = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}
PLAIN |= {"gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "swish": "silu"}
GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_new": "geglu_tanh", "relu": "reglu"}
GATED |= {"swish": "swiglu", "gelu_python": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_fast": "geglu_tanh"}


def special_token_defaults(begin: int | None, end: int | None, pad: int | None = None) -> dict[str, Any]:
    """Return a model family's defaults in config.json: the keys for ids of special tokens, and use_cache."""
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad, "use_cache": True}
