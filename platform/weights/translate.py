"""Translation of a config.json of transformers to our model keys, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from platform.boundary.refusals import ConfigError, closest, in_words, refuse_all, violation
from platform.config.bounds import violations_of_values
from platform.config.checks import violations_of_configuration
from platform.config.fields import Config, Data, Model
from platform.weights.families.family import Family
from platform.weights.families.keys import Found, Inexpressible, Rule, as_json, sizes_of
from platform.weights.families.known import COMMON, FAMILIES

# model keys that say nothing about a trained model's function: how it is trained, and sizes of other kinds of models
_OF_TRAINING = ("source", "dropout", "fused_dropout", "label_smoothing", "within_documents", "source_length",
                "position_rows", "capacity_factor", "balance_loss", "balance_over", "balance_rate", "z_loss",
                "router_jitter")  # fmt: skip
_OF_OTHERS = ("io", "hidden")
_OWN = (*_OF_TRAINING, *_OF_OTHERS, "settings", "length", "tied")  # not at a default where config.json says nothing
_OF_EXPERTS = (
    *("experts_per_token", "experts_every", "dense_layers", "expert_d_ff", "expert_bias", "shared_experts"),
    *("router", "router_normalised", "router_scale", "router_bias"),
)
_OF_LATENTS = ("q_latent", "d_rope", "d_value")
_OF_GROUPS = ("router_groups", "router_groups_kept", "router_group_best")
_ROTARY = ("rope_factor", "rope_original_length", "rope_low", "rope_high", "rope_magnitude")


def family_of(found: Found) -> Family:
    """Return the family that a config.json names. Raises ConfigError for one that is not known, or a class of it that
    has other parts than a language model."""
    kind, classes = found.get("model_type"), found.get("architectures")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(violation("model_type", as_json(kind), "no family that is known", FAMILIES))
    family = FAMILIES[kind]
    if classes is not None and not (isinstance(classes, list) and len(classes) == 1 and classes[0] in family.read):
        raise ConfigError(violation("architectures", as_json(classes), f"model_type={kind} is known as", family.read))
    return family


def model_keys(found: Found, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return our configuration keys, without `model.`, that describe the same model as a config.json of transformers.
    `names`: names of the tensors beside it, which show if the output head has a tensor of its own.

    Raises ConfigError with a line for each key that ours do not express, and for each value that our key refuses.
    """
    family = family_of(found)
    usual = {key: value for key, value in vars(Model()).items() if key not in _OWN}
    out, wrong = {**usual, **family.fixed}, []
    rules = (*family.rules, *COMMON)
    for rule in rules:
        try:
            out |= rule.read(found)
        except Inexpressible as error:
            wrong.append(str(error))
    known = {name for rule in rules for name in rule.names}
    wrong += [
        f"{key}={as_json(value)}: our words do not express this key" for key, value in found.items() if key not in known
    ]
    if "tied" not in out:
        out["tied"] = "lm_head.weight" not in names
    refuse_all(wrong or _impossible(Model(**out)))
    return out


def _impossible(m: Model) -> list[str]:
    """Return a refusal line for each key of a model, read from saved weights, that is illegal alone or with others."""
    config = Config(model=m, data=Data(document_mask=m.within_documents))
    lines = [line for key, lines in violations_of_values(config).items() if key.startswith("model.") for line in lines]
    return lines or [line for line in violations_of_configuration(config) if line.startswith("model.")]


def stored_model(identity: Mapping[str, Any]) -> Model:
    """Return the model whose tensors a checkpoint has, from its untrusted identity. Raises ConfigError."""
    given = identity.get("model")
    if not isinstance(given, dict):
        raise ConfigError("the checkpoint says nothing of its model: it is no checkpoint of a run")
    model = Config.from_dict({"model": given}).model
    refuse_all(_impossible(model))
    return model


def meaning(m: Model) -> dict[str, Any]:
    """Return the keys of a model that determine its function, in one form, to compare a model at transformers with
    ours: sizes in place of zeros, and no key that others make meaningless."""
    out = {key: value for key, value in vars(m).items() if key not in (*_OF_TRAINING, *_OF_OTHERS)}
    out |= sizes_of(m)
    attention = m.attention_bias or ("all" if m.bias else "none")
    out["attention_bias"] = attention
    out["attention_scale"] = m.attention_scale or max(1, out["d_kv"]) ** -0.5
    if not m.query_key_norm:
        out["query_key_norm_over"] = "head"
    if not m.window:
        out["window_layers"] = []
    elif set(m.window_layers) >= set(range(m.layers)):
        out["window_layers"] = []
    unused = [] if m.positions == "rope" else ["rope_theta", "rope_pairs", "rope_scaling", *_ROTARY]
    unused += _ROTARY if m.rope_scaling == "none" else []
    unused += ["rope_truncate"] if m.rope_scaling != "yarn" else []
    unused += [] if m.experts else _OF_EXPERTS
    unused += ["d_ff"] if m.experts and m.experts_every == 1 and not m.dense_layers else []
    unused += [] if m.kv_latent else _OF_LATENTS
    unused += [] if m.experts and m.router_groups_kept < m.router_groups else _OF_GROUPS
    unused += ["length"] if m.positions == "relative" else ["buckets", "distance"]
    return {key: value for key, value in out.items() if key not in unused}


def config_of(m: Model, family: Family) -> dict[str, Any]:
    """Return transformers' config.json for our model, without element type. Raises ConfigError, a line per key."""
    out: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.name}
    rules: Iterable[Rule] = (*family.rules, *COMMON)
    for rule in rules:
        out |= rule.write(m)
    refuse_all(_unlike(m, out, family))
    return out


def _unlike(m: Model, written: Found, family: Family) -> Iterable[str]:
    """Yield a line for each key of our model that is another one when its config.json, as `written` for transformers,
    is read again."""
    try:
        again = meaning(Model(**model_keys(written, () if m.tied else ["lm_head.weight"])))
    except ConfigError as error:
        yield from (f"{family.name}: {line}" for line in error.violations)
        return
    wanted = meaning(m)
    for key in wanted.keys() | again.keys():
        if (value := wanted.get(key, getattr(m, key))) != again.get(key):
            other = again.get(key)
            why = "does not express it" if other is None else f"has {in_words(other) or 'none'}"
            yield violation(f"model.{key}", value, f"{family.architecture} {why}")


def expressing(m: Model, name: str = "") -> Family:
    """Choose the family of transformers' models (GPT-2, Llama, ...) that expresses our model: the one called `name`, or
    the first that does. Raises ConfigError with what it, or the nearest family, does not express, and which do."""
    refused = {family.name: _violations_of_family(m, family) for family in FAMILIES.values()}
    fitting = [family for family, lines in refused.items() if not lines]
    if name in fitting or (fitting and not name):
        return FAMILIES[name or fitting[0]]
    lines = refused.get(name) or ([] if fitting else min(refused.values(), key=len))
    if name:
        why = "does not express this model" if name in FAMILIES else "unknown"
        lines = [violation("--family", name, why, closest(name, fitting)), *lines]
    raise ConfigError(lines)


def _violations_of_family(m: Model, family: Family) -> list[str]:
    """Return the refusal lines of a family of transformers' models for a model; [] if it expresses the model."""
    try:
        config_of(m, family)
    except ConfigError as error:
        return error.violations
    return []
