"""Checks of data: violations in its keys and the beginnings of its files, and splits without a sample."""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

import numpy as np

from platform.boundary.local_files import find_protocol_fault
from platform.boundary.refusals import ConfigError, format_violation
from platform.config.fields import Data
from platform.data import text_sources as text_sources  # its import registers the kinds of sources
from platform.data import tokenizer
from platform.data.mixture import PATH_OPTIONS, DataSource, list_sources, name_source_in_line
from platform.data.objectives import Objective, name_objective_in_errors
from platform.data.source_kind import KINDS, find_source_kind, is_streamed
from platform.data.tokenizer import extra_special_tokens, load_named_vocabulary, read_chat_template
from platform.plan.layout import format_count
from platform.plan.model_types import LABEL_WEIGHTS, REFERENCES

_AT_ONCE = 1024  # samples whose labels are counted at once
_LOOKED = 1 << 26  # tokens of samples in which a label is looked for; later ones are refused when they are trained on


def violations_of_sources(data: Data, *, vocab: int = tokenizer.SMALLEST, reserved: int = 0) -> list[str]:
    """Return a refusal line for each of the user's mistakes in the keys of `data` that shows without tokenising, in
    well under a second: kind, fraction, paths, beginnings of files. `vocab`: number of the model's token ids, of which
    the training objective takes the last `reserved` for itself."""
    if data.kind not in (kinds := [*KINDS, "synthetic", "mixture"]):
        return [f"data={data.kind}: unknown; there are {', '.join(kinds)}"]
    try:
        sources = list_sources(data)
    except ConfigError as error:
        return error.violations
    violations = [line for source in sources for line in _violations_of_source(source)]
    textual = any(find_source_kind(source.data).texts for source in sources)
    return violations + ([] if data.kind == "synthetic" else _violations_of_tokenizer(data, vocab, reserved, textual))


def _violations_of_tokenizer(data: Data, vocab: int, reserved: int, textual: bool) -> list[str]:
    """Check how data is to be tokenised: return a refusal line for each mistake in the keys that choose a tokenizer or
    how one is trained. `vocab`: number of the model's token ids, of which the objective reserves `reserved`; `textual`:
    True if the data is text, which needs a tokenizer."""
    try:
        vocabulary = load_named_vocabulary(data)
        extra_special_tokens(data), read_chat_template(data)
    except ConfigError as error:
        return error.violations
    if vocabulary and vocabulary.size + reserved > vocab:
        reason = f"has {vocabulary.size} tokens, and the model has model.vocab={vocab}"
        if added := extra_special_tokens(data):
            reason += f"; among them are those of data.chat_template and data.special_tokens, {', '.join(added)}"
        if reserved:
            reason += f"; {reserved} more must be free, as none of its tokens stands for what is hidden, like [MASK]"
        legal = [f"model.vocab={vocabulary.size + reserved}"]
        return [format_violation("data.tokenizer", data.tokenizer, reason, legal)]
    least = tokenizer.SMALLEST + len(extra_special_tokens(data)) + reserved
    if textual and not vocabulary and vocab < least:
        hidden = f", {reserved} of them for what is hidden" if reserved else ""
        reason = f"a byte-level tokenizer needs at least {least}{hidden}"
        return [format_violation("model.vocab", vocab, reason, [least])]
    return []


def _violations_of_source(source: DataSource) -> list[str]:
    """Return a refusal line for each mistake in the keys of one data source, or at the beginning of its files, that
    shows without tokenising them."""
    data, lines = source.data, []
    if not (0 <= data.validation < 1 or (source.name and data.validation == 1)):
        lines.append(f"data.validation={data.validation}: a fraction from 0 to below 1 is needed, such as 0.05")
    if data.path and data.kind in ("stdlib", "synthetic"):
        lines.append(format_violation("data.path", data.path, f"data={data.kind} reads no path", ["data=text", '""']))
    elif data.kind != "synthetic":
        urls = {f"data.{name}": getattr(data, name) for name in PATH_OPTIONS}
        remote = {key: url for key, url in urls.items() if "://" in url}  # what is there shows when it is read
        reasons = {key: find_protocol_fault(url, writing=False) for key, url in remote.items()}
        lines += [format_violation(key, remote[key], reason, ["a path"]) for key, reason in reasons.items() if reason]
        lines += [] if remote else find_source_kind(data).violations_of_source(data)
    if is_streamed(data) and (data.kind == "synthetic" or not find_source_kind(data).blockwise):
        lines.append(format_violation("data.streaming", True, f"data={data.kind} is read as a whole", [False]))
    elif is_streamed(data) and data.validation and not data.validation_path:
        reason = "of a source that is never read as a whole no part can be held out"
        lines.append(format_violation("data.validation", data.validation, reason, [0, "data.validation_path=FILE"]))
    return [name_source_in_line(source, line) for line in lines]


def violations_of_small_splits(
    source: DataSource, streams: Mapping[str, Any], objective: Objective, length: int
) -> list[str]:
    """Return a refusal line for each split of a data source that is too small for one sample of the objective (`length`
    tokens), with the nearest legal settings. `streams`: split -> its tokens."""
    tokens = {split: len(stream) for split, stream in streams.items()}
    needed, total = objective.needs, sum(tokens.values())
    violations, more = [], "a larger data.block" if is_streamed(source.data) else "more text"
    unread = "train" if not source.is_trained else "validation" if source.data.validation == 0 else ""
    empty_splits = [split for split, stream in streams.items() if objective.samples(stream) < 1]
    for split in (split for split in empty_splits if split != unread):
        remedies = [f"model.length={tokens[split] - 1}"] if tokens[split] > 1 and needed > length else []
        if split == "validation" and total >= 3 * needed:
            remedies.append(f"{source.config_key}.validation={ceil(200 * needed / total) / 100:g}")
        of = f" of {source.config_key}" if source.name else ""
        violations.append(
            f"model.length={length}: a sample is {format_count(needed, 'token')}, and the {split} split{of} has"
            f" {tokens[split]}; nearest legal: {' or '.join([*remedies, more])}"
        )
    return violations


def check_sample(name: str, batch: Callable[[], Mapping[str, Any]], lengths: Mapping[str, int]) -> None:
    """Make a data sample by calling `batch`, as the objective `name` does, and check that the model can read it.
    `lengths`: name of each data tensor that the model reads -> its length in tokens. Raises ConfigError for a missing
    tensor, a wrong shape or type, or any error in a user's own objective."""
    with name_objective_in_errors(name):
        tensors = dict(batch())
    names_made = ", ".join(tensors) or "none"
    if missing := [tensor_name for tensor_name in lengths if tensor_name not in tensors]:
        reason = f"makes no data tensor {missing[0]!r}, which the model reads: {names_made}"
        raise ConfigError(f"data.objective={name}: {reason}")
    for tensor_name, length in lengths.items():
        shape, dtype = np.shape(tensors[tensor_name]), np.asarray(tensors[tensor_name]).dtype
        kind = np.dtype(np.float64 if tensor_name in (LABEL_WEIGHTS, REFERENCES) else np.int64)
        if shape != (1, length) or dtype != kind:
            description = f"makes {tensor_name!r} as {dtype} of shape {list(shape)}"
            reads = f"the model reads {kind} [1, {length}]"
            raise ConfigError(f"data.objective={name}: {description} for one sample; {reads}")
        if tensor_name != REFERENCES and not np.isfinite(tensors[tensor_name]).all():  # workers make these later
            raise ConfigError(f"data.objective={name}: makes {tensor_name!r} with a weight that is no finite number")


def violations_of_unlabelled_splits(source: DataSource, streams: Mapping[str, Any], objective: Objective) -> list[str]:
    """Return a refusal line for each split of a data source in which no sample has a label, so that a run would learn
    nothing of it, with a loss of 0. `streams`: split -> its tokens, of which a long one is looked at only at its
    beginning."""
    violations = []
    for split, stream in streams.items():
        samples = max(0, objective.samples(stream))
        looked = min(samples, max(_AT_ONCE, _LOOKED // objective.needs))
        parts = (np.arange(i, min(i + _AT_ONCE, looked)) for i in range(0, looked, _AT_ONCE))
        if samples and not any(objective.predicted(stream, index) for index in parts) and looked == samples:
            of = f"path={source.data.path}" if source.data.path else f"kind={source.data.kind}"
            reason = f"of the {samples} samples of its {split} split none has a label that counts"
            hint = "nothing would be learned; nearest legal: other data"
            violations.append(f"{source.config_key}.{of}: {reason}: {hint}")
    return violations
