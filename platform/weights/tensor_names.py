"""Names of a model's tensors at transformers and here: which of theirs hold which of ours, and in which shape; and the
translation of a config.json of transformers to our model keys, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, groupby, takewhile
from math import prod
from typing import Any

import torch
from torch import Tensor

from platform.boundary.refusals import ConfigError, closest_values, format_value, format_violation, refuse_all
from platform.checkpoint.blocks import Box
from platform.config.fields import Config, Data, Model, violations_of_values
from platform.config.identity import FREE
from platform.config.validation import violations_of_configuration
from platform.model import build_model
from platform.model.layers import linear_head_sizes
from platform.plan.model_types import STATES, Parameter
from platform.weights.config_keys import ConfigJson, Family, Inexpressible, Rule, TensorRow, json_excerpt, resolve_sizes
from platform.weights.families import COMMON, FAMILIES

MOST_MATRICES = 1 << 20  # of experts: as many as an index of files names


@dataclass(frozen=True)
class MatrixPart:
    """Parameter of ours, or the block `box` of it that belongs to one expert or head, and the matrix that transformers
    sees in it: `rows` are what its product adds, `columns` what it contracts. A vector has one column."""

    name: str
    shape: tuple[int, ...]
    rows: int
    columns: int
    box: Box


@dataclass(frozen=True)
class HfTensor:
    """Tensor of theirs, by name, and the parameters of ours that it holds: it is the matrix of their rows, one after
    another, or a row of each in turn (`alternate`); `turned`: stored with columns first; `vector`: its matrix has one
    column, and it is stored as a vector; `stacked`: the number of experts whose matrices it stacks, else 0;
    `channels`: it has a dim of one index before its columns; `beside`: columns of one follow the last one's."""

    name: str
    parts: tuple[MatrixPart, ...]
    turned: bool
    vector: bool = False
    alternate: bool = False
    stacked: int = 0
    channels: bool = False
    beside: bool = False

    @property
    def matrix_parts(self) -> list[tuple[MatrixPart, ...]]:
        """Return the parts of each matrix that this tensor stacks, or of the one that it is."""
        each = len(self.parts) // max(1, self.stacked)
        return [self.parts[i : i + each] for i in range(0, len(self.parts), each)]

    def join_blocks(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return this tensor of transformers, made of the `blocks` of our parameters that are its parts."""
        matrices, remaining_blocks = [], iter(blocks)
        for parts in self.matrix_parts:
            rows = [next(remaining_blocks).reshape(part.rows, part.columns) for part in parts]
            matrix = torch.stack(rows, 1).flatten(0, 1) if self.alternate else torch.cat(rows, int(self.beside))
            matrices.append(matrix.t() if self.turned else matrix)
        return torch.stack(matrices).reshape(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in which transformers stores this tensor."""
        first, *others = self.matrix_parts[0]
        rows = first.rows if self.beside else first.rows + sum(p.rows for p in others)
        columns = first.columns + sum(p.columns for p in others) * self.beside
        one: tuple[int, ...] = (rows,) if self.vector else (columns, rows) if self.turned else (rows, columns)
        one = (rows, 1, columns) if self.channels else one
        return (self.stacked, *one) if self.stacked else one


def list_parameters(m: Model) -> dict[str, tuple[Parameter, tuple[int, ...]]]:
    """Return name -> (parameter, global shape) of every parameter of a model, to match with names of saved weights; of
    states, those on which what a trained model says depends."""
    model = build_model(m)
    model_parameters = [p for p in model.parameters() if STATES.get(p.role, "model") == "model"]
    return {p.name: (p, tuple({**model.sizes, **dict(p.sizes)}[d] for d in p.dims)) for p in model_parameters}


def list_stored_tensors(m: Model, family: Family, stacks_experts: bool = False) -> list[HfTensor]:
    """List the tensors by which transformers stores a model of a family, in its order, with stacks of experts if
    `stacks_experts`. Each parameter is in one. Raises ConfigError, naming the parameters for which the family has
    none."""
    tensors: list[HfTensor] = []
    unmatched = list_parameters(m)
    if (count := sum(shape[0] for p, shape in unmatched.values() if _is_per_expert(p))) > MOST_MATRICES:
        raise ConfigError(f"names: {count} matrices of experts are more than {MOST_MATRICES}")
    gated = any(name.endswith(".mlp.gate") for name in unmatched)
    layers = m.layers + m.predict_ahead
    for name, ours, row in _expand_rows(family.fused if stacks_experts else family.rows, layers):
        if row.gated not in (None, gated) or not all(part in unmatched for part in ours):
            continue
        row_parameters = [unmatched.pop(part) for part in ours]
        first = row_parameters[0][0]
        vector = name.endswith("bias") or first.name.endswith(".gain") or len(first.dims) == 1
        if row.by_head:
            groups = linear_head_sizes(m).get(row.groups, m.heads)
            each = [tuple(_describe_heads(*one, i, groups, vector) for one in row_parameters) for i in range(groups)]
            tensors.append(HfTensor(name, tuple(chain.from_iterable(each)), row.turned, vector))
            continue
        if not _is_per_expert(first):
            matrices = tuple(_describe_matrix(*one, vector) for one in row_parameters)
            tensors.append(HfTensor(name, matrices, row.turned, vector, channels=row.channels, beside=row.beside))
            continue
        each = [tuple(_describe_one_matrix(*one, e) for one in row_parameters) for e in range(m.experts)]
        if "{e}" in name:
            tensors += [
                HfTensor(name.replace("{e}", str(e)), parts, row.turned, vector) for e, parts in enumerate(each)
            ]
        else:
            parts = tuple(chain.from_iterable(each))
            tensors.append(HfTensor(name, parts, row.turned, vector, row.alternate, m.experts))
    if unmatched:
        raise ConfigError(f"names: {family.architecture} has no tensor for {', '.join(unmatched)}")
    return tensors


def _is_per_expert(p: Parameter) -> bool:
    """Return True if our parameter `p` is a matrix or bias for each expert, which saved weights may hold one by one."""
    return p.dims[0] == "experts" and p.role in ("in", "out")


def _expand_rows(rows: Sequence[TensorRow], layers: int) -> Iterator[tuple[str, list[str], TensorRow]]:
    """Yield (tensor's name at transformers, names of our parameters, row) for a family's table of names, by layer."""
    for numbered, group in groupby(rows, lambda row: "{i}" in row.theirs):
        some = list(group)
        for i in range(layers if numbered else 1):
            for row in some:
                yield row.theirs.replace("{i}", str(i)), [name.replace("{i}", str(i)) for name in row.ours], row


def _describe_matrix(p: Parameter, shape: tuple[int, ...], vector: bool) -> MatrixPart:
    """Describe our parameter `p` as transformers stores it, a matrix [rows, columns]; one column if `vector`."""
    if vector:
        return MatrixPart(p.name, shape, prod(shape), 1, Box.whole_tensor(shape))
    rows = shape[0] if p.role == "out" else prod(shape[:-1])
    return MatrixPart(p.name, shape, rows, prod(shape) // rows, Box.whole_tensor(shape))


def _describe_heads(p: Parameter, shape: tuple[int, ...], number: int, groups: int, vector: bool) -> MatrixPart:
    """Describe the heads of one of the `groups` in our parameter `p` as transformers stores them."""
    heads, columns = shape[0] // groups, 1 if vector else shape[-1]
    box = Box((number * heads, *(0 for _ in shape[1:])), (heads, *shape[1:]))
    return MatrixPart(p.name, shape, heads * prod(shape[1:]) // columns, columns, box)


def _describe_one_matrix(p: Parameter, shape: tuple[int, ...], number: int) -> MatrixPart:
    """Describe the matrix or bias of one expert in our parameter `p` as transformers stores it."""
    rows, columns = shape[1], prod(shape[2:])
    return MatrixPart(p.name, shape, rows, columns, Box((number, *(0 for _ in shape[1:])), (1, *shape[1:])))


@dataclass(frozen=True)
class MatchedTensors:
    """Tensors of a checkpoint of transformers by the names under which a family has them. `stored_names`: the family's
    name -> the name in the files; `repeated`: (name in the files, name of the family) of tensors that must equal
    another."""

    stored_names: dict[str, str]
    repeated: tuple[tuple[str, str], ...]


def match_tensor_names(
    names: Collection[str], wanted: Iterable[HfTensor], m: Model, family: Family
) -> tuple[MatchedTensors, list[str]]:
    """Match the names in the files of a model that transformers saved with the tensors `wanted`; return the tensors
    found, and a line for the missing and one for the foreign ones."""
    known = {tensor.name for tensor in wanted}
    file_by_name = {name: name for name in names}
    if family.prefix and not any(name.startswith(family.prefix) for name in names):  # saved without the class's head
        file_by_name = {f"{family.prefix}{name}": name for name in names if name not in known}
        file_by_name |= {name: name for name in names if name in known}
    buffers = {name.replace("{i}", str(i)) for name in family.buffers for i in range(m.layers + m.predict_ahead)}
    same = list_repeats(m, family, known)
    names_in_files = {name: file for name, file in file_by_name.items() if name in known}
    others = ((name, file) for name, file in file_by_name.items() if name not in known)
    repeated = tuple((file, same[name]) for name, file in others if name in same)
    foreign_names = file_by_name.keys() - known - same.keys() - buffers
    lines = []
    if missing := [name for name in known if name not in names_in_files]:
        lines.append(f"names: {_join_names(missing)}: missing")
    if foreign_names:
        foreign = _join_names(file_by_name[name] for name in foreign_names)
        lines.append(f"names: {foreign}: no part of {family.architecture} with this config.json")
    return MatchedTensors(names_in_files, repeated), lines


def list_repeats(m: Model, family: Family, known: Collection[str]) -> dict[str, str]:
    """Return the names of tensors that repeat another one of a model at transformers, with its name among `known`."""
    modules = range(m.layers, m.layers + m.predict_ahead)
    pairs = [(n, of) for name, of in family.same.items() for n in _number_name(name, modules)]
    return {name: of if of in known else family.same.get(of, of) for name, of in pairs}


def _number_name(name: str, numbers: Iterable[int]) -> list[str]:
    """Return the names of tensors that a name with {i} stands for; without, the name itself."""
    return [name.replace("{i}", str(i)) for i in numbers] if "{i}" in name else [name]


def _join_names(names: Iterable[str]) -> str:
    """Return names of tensors of saved weights as text: sorted, with commas in between."""
    return ", ".join(sorted(names))


# model keys that say nothing about a trained model's function: all that may change on resume, and more of how it is
# trained; sizes of other kinds of models
_NOT_OF_FUNCTION = (
    *(key.removeprefix("model.") for key in FREE if key.startswith("model.")),
    *("source", "within_documents", "source_length", "balance_over", "io", "hidden", "predict_ahead"),
)
_OWN = (*_NOT_OF_FUNCTION, "settings", "length", "tied")  # not at a default where config.json says nothing
_OF_EXPERTS = (
    *("experts_per_token", "experts_every", "dense_layers", "expert_d_ff", "expert_bias", "shared_experts"),
    *(
        "shared_d_ff",
        "expert_norms",
        "expert_factors",
        "shared_expert_gate",
        "router",
        "router_normalised",
        "router_scale",
        "router_bias",
    ),
)
_OF_LATENTS = ("q_latent", "d_rope", "d_value")
_OF_DELTA_RULES = ("linear_key_heads", "linear_value_heads", "linear_d_key", "linear_d_value", "linear_taps")
_OF_GROUPS = ("router_groups", "router_groups_kept", "router_group_best")
_OF_ROTATIONS = ("rope_theta", "rope_pairs", "rope_share", "no_rope_layers", "window_rope_theta")
_ROTARY = ("rope_factor", "rope_original_length", "rope_low", "rope_high", "rope_magnitude", "rope_short", "rope_long")


def find_family(config_json: ConfigJson) -> Family:
    """Return the family that a config.json names. Raises ConfigError for one that is not known, or a class of it that
    has other parts than a language model."""
    kind, classes = config_json.get("model_type"), config_json.get("architectures")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError("model_type", json_excerpt(kind), "no family that is known", FAMILIES)
    family = FAMILIES[kind]
    known = family.read or [family.architecture]
    if classes is not None and not (isinstance(classes, list) and len(classes) == 1 and classes[0] in known):
        raise ConfigError("architectures", json_excerpt(classes), f"model_type={kind} is known as", known)
    return family


def translate_config_json(config_json: ConfigJson, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return our configuration keys, without `model.`, that describe the same model as a config.json of transformers.
    `names`: names of the tensors beside it, which show if the output head has a tensor of its own, and how many modules
    of multi-token prediction there are.

    Raises ConfigError with a line for each key that ours do not express, and for each value that our key refuses.
    """
    family = find_family(config_json)
    usual = {key: value for key, value in vars(Model()).items() if key not in _OWN}
    model_values, violations = {**usual, **family.fixed}, []
    rules = (*family.rules, *COMMON)
    for rule in rules:
        try:
            model_values |= rule.read_model_keys(config_json)
        except Inexpressible as error:
            violations.append(str(error))
    known = {name for rule in rules for name in rule.key_names}
    unknown = ((key, value) for key, value in config_json.items() if key not in known)
    violations += [f"{key}={json_excerpt(value)}: our words do not express this key" for key, value in unknown]
    names = set(names)
    model_values.setdefault("tied", "lm_head.weight" not in names)
    joins = [row.theirs for row in family.rows if row.theirs.endswith("eh_proj.weight")]
    numbers = count(model_values.get("layers", 0))
    model_values["predict_ahead"] = sum(
        1 for _ in takewhile(lambda i: any(name.replace("{i}", str(i)) in names for name in joins), numbers)
    )
    refuse_all(violations or _violations_of_model(Model(**model_values)))
    return model_values


def _violations_of_model(m: Model) -> list[str]:
    """Return a refusal line for each key of a model, read from saved weights, that is illegal alone or with others."""
    config = Config(model=m, data=Data(document_mask=m.within_documents))
    lines = [line for key, lines in violations_of_values(config).items() if key.startswith("model.") for line in lines]
    return lines or [line for line in violations_of_configuration(config) if line.startswith("model.")]


def parse_stored_model(identity: Mapping[str, Any]) -> Model:
    """Return the model that a checkpoint's weights are of, by its untrusted identity. Raises ConfigError."""
    stored_keys = identity.get("model")
    if not isinstance(stored_keys, dict):
        raise ConfigError("the checkpoint says nothing of its model: it is no checkpoint of a run")
    model = Config.from_dict({"model": stored_keys}).model
    refuse_all(_violations_of_model(model))
    return model


def functional_keys(m: Model) -> dict[str, Any]:
    """Return the keys of a model that determine its function, in one form, to compare a model at transformers with
    ours: sizes in place of zeros, and no key that others make meaningless."""
    keys = {key: value for key, value in vars(m).items() if key not in _NOT_OF_FUNCTION}
    keys |= resolve_sizes(m)
    keys["attention_bias"] = m.attention_bias or ("all" if m.bias else "none")
    keys["attention_scale"] = m.attention_scale or max(1, keys["d_kv"]) ** -0.5
    if not m.query_key_norm:
        keys["query_key_norm_over"] = "head"
    if not m.window or set(m.window_layers) >= set(range(m.layers)):
        keys["window_layers"] = []
    if not keys["window_layers"]:
        keys |= {key: keys[key.removeprefix("global_")] for key in ("global_d_kv", "global_kv_heads")}
    if not m.window or (m.window_rope_theta == m.rope_theta and m.rope_scaling == "none"):
        keys["window_rope_theta"] = 0.0
    keys["no_rope_layers"], keys["linear_layers"] = sorted({*m.no_rope_layers}), sorted({*m.linear_layers})
    unused = [] if m.positions == "rope" else [*_OF_ROTATIONS, "rope_scaling", *_ROTARY]
    unused += _ROTARY if m.rope_scaling == "none" else []
    unused += ["rope_truncate"] if m.rope_scaling != "yarn" else []
    unused += [] if m.experts else _OF_EXPERTS
    unused += ["d_ff"] if m.experts and m.experts_every == 1 and not m.dense_layers else []
    unused += [] if m.kv_latent else _OF_LATENTS
    unused += [] if m.linear_layers else _OF_DELTA_RULES
    unused += [] if m.experts and m.router_groups_kept < m.router_groups else _OF_GROUPS
    unused += ["length"] if m.positions == "relative" else ["buckets", "distance"]
    return {key: value for key, value in keys.items() if key not in unused}


def build_config_json(m: Model, family: Family) -> dict[str, Any]:
    """Return transformers' config.json for our model, without element type. Raises ConfigError, a line per key."""
    config_json: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.name}
    rules: Iterable[Rule] = (*family.rules, *COMMON)
    for rule in rules:
        config_json |= rule.write_config_keys(m)
    refuse_all(_violations_of_round_trip(m, config_json, family))
    return config_json


def _violations_of_round_trip(m: Model, written: ConfigJson, family: Family) -> Iterable[str]:
    """Yield a line for each key of our model that is another one when its config.json, as `written` for transformers,
    is read again."""
    try:
        read_keys = functional_keys(Model(**translate_config_json(written, () if m.tied else ["lm_head.weight"])))
    except ConfigError as error:
        yield from (f"{family.name}: {line}" for line in error.violations)
        return
    expected_keys = functional_keys(m)
    for key in expected_keys.keys() | read_keys.keys():
        if (value := expected_keys.get(key, getattr(m, key))) != read_keys.get(key):
            other = read_keys.get(key)
            why = "does not express it" if other is None else f"has {format_value(other) or 'none'}"
            yield format_violation(f"model.{key}", value, f"{family.architecture} {why}")


def choose_family(m: Model, name: str = "") -> Family:
    """Choose the family of transformers' models (GPT-2, Llama, ...) that expresses our model: the one called `name`, or
    the first that does. Raises ConfigError with what it, or the nearest family, does not express, and which do."""
    refused = {family.name: _violations_of_family(m, family) for family in FAMILIES.values()}
    fitting = [family for family, lines in refused.items() if not lines]
    if name in fitting or (fitting and not name):
        return FAMILIES[name or fitting[0]]
    lines = refused.get(name) or ([] if fitting else min(refused.values(), key=len))
    if name:
        why = "does not express this model" if name in FAMILIES else "unknown"
        lines = [format_violation("--family", name, why, closest_values(name, fitting)), *lines]
    raise ConfigError(lines)


def _violations_of_family(m: Model, family: Family) -> list[str]:
    """Return the refusal lines of a family of transformers' models for a model; [] if it expresses the model."""
    if m.predict_ahead and not any("{i}" in name for name in family.same):
        why = f"{family.architecture} has no modules of multi-token prediction"
        return [format_violation("model.predict_ahead", m.predict_ahead, why)]
    try:
        build_config_json(m, family)
    except ConfigError as error:
        return error.violations
    return []
