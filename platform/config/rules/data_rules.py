"""Rules that refuse the keys of group data, and keys of the model that do not go with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from platform.boundary.refusals import violation
from platform.config.fields import OBJECTIVES, Config, Data, objective_of

WHOLE = ("masked", "span_denoising", "pairs")  # objectives that read no documents apart, and learn of all tokens


def _data(config: Config) -> Iterator[str]:
    """Yield a refusal line for a configuration of data without a path, sources that nothing reads, and an evaluation
    without a held-out split."""
    data = config.data
    if data.kind == "text" and not data.path:
        yield violation("data.path", "", "data=text needs a file, a folder or a glob", ["data.path=FILE"])
    if data.tokenizer in ("", "train"):
        for name in ("tokenizer_words", "end_token", "begin_token"):
            if value := getattr(data, name):
                constraint = "says something of a tokenizer that data.tokenizer names, and there is none"
                yield violation(f"data.{name}", value, constraint, ["data.tokenizer=PATH"])
    if data.input_field and "instructions" not in _kinds(data):
        yield violation("data.input_field", data.input_field, "only data=instructions reads it", ['""'])
    if data.sources and data.kind != "mixture":
        yield violation("data.sources", ", ".join(data.sources), "only data=mixture reads them", ["data=mixture"])
    if config.eval.every and not (
        data.validation or data.validation_path or any(map(_held_out, data.sources.values()))
    ):
        reason = f"eval.every={config.eval.every} needs a held-out split"
        held = "data.validation_path=FILE" if data.streaming else 0.05  # a stream has no part to hold out
        yield violation("data.validation", 0, reason, [held, "eval.every=0"])


def _held_out(source: Any) -> bool:
    """Return True if the configuration of a mixture's source holds a part of it out for validation."""
    return isinstance(source, dict) and bool(source.get("validation") or source.get("validation_path"))


def _kinds(data: Data) -> set[str]:
    """Return the kinds (text, records, tokens, ...) of all sources that the configuration group `data` names."""
    if data.kind != "mixture":
        return {data.kind}
    return {str(source.get("kind", "text")) for source in data.sources.values() if isinstance(source, dict)}


def _objective(config: Config) -> Iterator[str]:
    """Yield a refusal line if the configured training objective does not go with the model's kind, the data or the
    sequence lengths, or if a model other than an encoder-decoder has a source length."""
    data, m = config.data, config.model
    objective, legal = objective_of(config), OBJECTIVES[m.kind]
    kinds = _kinds(data)
    if objective not in legal or (kinds != {"pairs"} if objective == "pairs" else "pairs" in kinds):
        fitting = [o for o in legal if (o == "pairs") == ("pairs" in kinds)]
        fitting = fitting or [f"model.kind={kind}" for kind, known in OBJECTIVES.items() if "pairs" in known]
        if "pairs" in kinds and len(kinds) > 1:
            fitting = ["sources that are all of kind: pairs, or none"]
        constraint = f"model.kind={m.kind} and data={data.kind} do not go with it"
        yield violation("data.objective", objective, constraint, fitting)
    elif objective == "span_denoising" and (m.length < 3 or m.source_length == 1):
        yield violation("model.length", m.length, "span denoising needs at least 3, and a source of 2", [3])
    elif objective in WHOLE and "instructions" in kinds:
        fitting = [o for o in legal if o not in WHOLE and o != "pairs"] or ["data=text"]
        yield violation("data.objective", objective, "learns of prompts too, which data=instructions has", fitting)
    if m.source_length and m.kind != "encoder_decoder":
        yield violation("model.source_length", m.source_length, f"model.kind={m.kind} has one length", [0])


def _documents(config: Config) -> Iterator[str]:
    """Yield a refusal line if the configuration keeps documents apart or whole where they have no boundaries, or if its
    model and data do not agree about that."""
    data, within = config.data, config.model.within_documents
    if within != data.document_mask:
        constraint = f"is what data.document_mask={str(data.document_mask).lower()} says"
        yield violation(
            "model.within_documents",
            within,
            constraint,
            [data.document_mask, f"data.document_mask={str(within).lower()}"],
        )
    if data.overlong != "split" and data.packing == "cut":
        constraint = "data.packing=cut cuts rows from the tokens end to end"
        yield violation("data.overlong", data.overlong, constraint, ["split", "data.packing=best_fit"])
    for name, neutral in (("document_mask", False), ("packing", "cut")):
        if (value := getattr(data, name)) == neutral:
            continue
        if data.kind == "synthetic":
            yield violation(f"data.{name}", value, "data=synthetic has no documents", [neutral])
        elif (objective := objective_of(config)) in WHOLE:
            yield violation(f"data.{name}", value, f"data.objective={objective} does not read it", [neutral])


RULES = (_data, _objective, _documents)
