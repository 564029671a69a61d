"""Model that is asked: prompts as token ids (texts, conversations or ids: `read_prompts`), texts in batches of like
length, and the workers' answers on them.

`violations_of_memory` compares the memory that answers need at least, by the plan, with the memory that there is: a
request that cannot be served is refused before a model is loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from platform.boundary import documents
from platform.boundary.refusals import ConfigError, format_violation, refuse_all, refuse_failures
from platform.boundary.schema import Malformed
from platform.cluster.crew.crew import Worker
from platform.cluster.crew.job import gpu_count
from platform.cluster.resources import machine_memory
from platform.config.fields import Config, Model
from platform.data.chat_templates import parse_conversation
from platform.data.special_tokens import SpecialIds
from platform.data.tokenizer import Vocabulary
from platform.model.attention import configure_layer
from platform.model.layers import dim_sizes
from platform.plan.accelerators import nominal_memory
from platform.plan.generation_passes import ROOM
from platform.plan.layout import format_count, pad_to_multiple
from platform.plan.plan import Plan
from platform.train.replies import AskedTexts, Choice, Scored, Written

LARGEST = 1 << 28  # bytes of a file of prompts
KINDS = ("prompt", "messages", "ids")  # fields of a line of .jsonl, one of which says what is to be continued
_IDS = 1 << 53  # no model has as many
_TURNS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")  # that end a message of a conversation


@dataclass(frozen=True)
class Prompt:
    """Prompt as it was given: one of a text, a conversation (`messages`) and token ids, under its name in `fields`.
    `where`: a name of it for refusals."""

    fields: Mapping[str, Any]
    where: str


def read_prompts(path: str) -> list[Prompt]:
    """Read the prompts that an asked model is to continue from a file: one per line of text, or per object of .jsonl,
    by `prompt`, `messages` or `ids`. Raises ConfigError, naming the line."""
    try:
        text = documents.read_bytes(Path(path), LARGEST).decode()
    except (OSError, Malformed, UnicodeDecodeError) as error:
        raise ConfigError("--prompts", path, f"cannot be read: {documents.printable_line(error)}") from None
    lines = [(n, line.removesuffix("\r")) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError("--prompts", path, "holds no prompt")
    if not path.endswith(".jsonl"):
        return [Prompt({"prompt": line}, f"{path}:{n}") for n, line in lines]
    return [Prompt(_parse_prompt_object(line, f"{path}:{n}"), f"{path}:{n}") for n, line in lines]


def _parse_prompt_object(line: str, where: str) -> dict[str, Any]:
    """Parse a line of a .jsonl file of prompts for an asked model; return its object. Raises ConfigError if none."""
    with refuse_failures("--prompts", where, Malformed, why="no JSON: {}"):
        prompt_object = documents.parse_json(line.encode())
    kinds = [kind for kind in KINDS if isinstance(prompt_object, dict) and kind in prompt_object]
    if len(kinds) != 1:
        raise ConfigError("--prompts", where, f"an object with one of {', '.join(KINDS)} is needed")
    return prompt_object


def find_end_ids(vocabulary: Vocabulary | None, generation_config: bytes) -> list[int]:
    """Return the token ids that end an asked model's answer: of documents, messages, or in generation_config.json."""
    end_ids = set(_parse_end_ids(generation_config))
    if vocabulary is not None:
        end_ids.add(vocabulary.special.end)
        end_ids |= {i for token in _TURNS if (i := vocabulary.tokenizer.token_to_id(token)) is not None}
    return sorted(end_ids)


def _parse_end_ids(generation_config: bytes) -> Iterator[int]:
    """Yield the token ids by which a generation_config.json ends an asked model's answer; none if it is unreadable."""
    try:
        end_ids = documents.parse_json(generation_config or b"{}").get("eos_token_id")
    except (Malformed, AttributeError):
        return
    yield from (i for i in (end_ids if isinstance(end_ids, list) else [end_ids]) if type(i) is int and 0 <= i < _IDS)


def answer_room(rows: Sequence[Sequence[int]], model: Model) -> int:
    """Return how many tokens of an asked model's length the longest prompt of `rows` leaves to answer; 1 or more."""
    read = 1 if model.kind == "encoder_decoder" else max(map(len, rows))
    return max(1, model.length - read)


def violations_of_length(prompts: Sequence[Prompt], rows: Sequence[Ids], model: Model, tokens: int) -> Iterator[str]:
    """Yield a refusal line for each prompt that, with `tokens` of answer, exceeds the asked model's length."""
    for prompt, ids in zip(prompts, rows, strict=True):
        if model.kind == "encoder_decoder":
            most = model.source_length or model.length
            if len(ids) > most:
                why = f"has {format_count(len(ids), 'token')}, and its encoder reads {most}"
                yield format_violation("prompt", prompt.where, why)
        elif len(ids) + tokens > model.length:
            room = model.length - len(ids)
            size, limit = format_count(len(ids), "token"), f"model.length={model.length}"
            why = f"has {size}, and with --tokens={tokens} more than {limit}"
            yield format_violation("prompt", prompt.where, why, [f"--tokens={room}"] if room > 0 else [])
    if model.kind == "encoder_decoder" and tokens + 1 > model.length:
        why = f"is more than model.length={model.length} has room for"
        yield format_violation("--tokens", tokens, why, [model.length - 1])


T = TypeVar("T")
Ids = Sequence[int]
Ask = Callable[..., list[Any]]  # `Crew.call_ranks` of a crew whose workers answer, or what stands before it


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts as a model does. `vocabulary`: None for one without a tokenizer, which reads ids alone. `chat`: a
    text is the message of a user. `bare`: nothing is put in front of a text, else the token that begins a document."""

    model: Model
    vocabulary: Vocabulary | None
    chat: bool = False
    bare: bool = False

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt for an asked model. Raises ConfigError with the mistakes of all."""
        rows, mistakes = [], list[str]()
        for prompt in prompts:
            try:
                rows.append(self.encode_prompt(prompt))
            except ConfigError as error:
                mistakes += error.violations
        refuse_all(mistakes)
        return rows

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt for an asked model. Raises ConfigError if the model cannot read it."""
        kind = next(kind for kind in KINDS if kind in prompt.fields)
        value = prompt.fields[kind]
        where, most = prompt.where, self.model.vocab
        if kind != "ids":
            token_ids = self._tokenize_prompt(kind, value, where)
        elif isinstance(value, list) and all(type(i) is int and 0 <= i < most for i in value):
            token_ids = value
        else:
            raise ConfigError("prompt", where, f"ids are a list of integers from 0 to {most - 1}")
        if not token_ids:
            raise ConfigError("prompt", where, "is empty")
        return token_ids

    def _encode_text(self, text: str, where: str) -> list[int]:
        """Return the ids by which an asked model reads a prompt's text, or a chat template's. Raises ConfigError."""
        assert self.vocabulary
        return self.vocabulary.encode(_check_text(text, where))

    def _tokenize_prompt(self, kind: str, value: Any, where: str) -> list[int]:
        """Return the token ids of a prompt for an asked model. `kind`: "prompt" if `value` is a text, "messages" if it
        is a conversation. Raises ConfigError, naming `where` the prompt is from, if it cannot be tokenised."""
        vocabulary = self.vocabulary
        if vocabulary is None:
            reason = "there is none beside the model, and a text needs one"
            raise ConfigError("data.tokenizer", "", reason, ["data.tokenizer=PATH", "a prompt of ids"])
        if kind == "prompt" and not isinstance(value, str):
            raise ConfigError("prompt", where, "is no text")
        messages = value if kind == "messages" else [{"role": "user", "content": value}] if self.chat else None
        if messages is None:
            ids = self._encode_text(value, where)
            return ids if self.bare else add_boundary_token(ids, self.model, vocabulary.special)
        if (talk := parse_conversation(messages)) is None:
            raise ConfigError("prompt", where, "messages are a list of objects with a role")
        for text in _iterate_strings(talk):
            _check_text(text, where)
        token_ids: list[int] = []
        for text, special in vocabulary.chat.render_prompt_parts(talk):
            number = vocabulary.tokenizer.token_to_id(text) if special else None
            token_ids += self._encode_text(text, where) if number is None else [number]
        ends = self.model.kind == "encoder_decoder" and not self.bare
        return [*token_ids, vocabulary.special.end] if ends else token_ids


def add_boundary_token(ids: Ids, model: Model, special: SpecialIds) -> list[int]:
    """Return an asked model's prompt with the token that begins a document first or, in an encoder, its end last."""
    if model.kind == "encoder_decoder":
        return [*ids, special.end]
    return [special.begin, *ids] if special.begin >= 0 else [*ids]


def _check_text(text: str, where: str) -> str:
    """Return the text of an asked model's prompt unchanged. Raises ConfigError if it has half a character."""
    if half := documents.find_lone_surrogate(text):
        raise ConfigError("prompt", where, f"is no text: it has {half}")
    return text


def _iterate_strings(value: Any) -> Iterator[str]:
    """Yield all strings in a prompt to an asked model, a conversation: in lists, and mappings' keys and values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        children = [*value, *value.values()] if isinstance(value, Mapping) else value
        yield from (text for part in children for text in _iterate_strings(part))


class AskedModel:
    """Model whose workers answer the calls of `ask` (`Worker.continue_texts`, `Worker.score_texts`). `vocabulary`: None
    if it has none; `batch`: texts at a time; `special`: the ids that begin and end texts, by default the
    vocabulary's."""

    def __init__(self, ask: Ask, model: Model, vocabulary: Vocabulary | None, batch: int = 16, special: Any = None):
        """Prepare to ask a trained model's workers, by calls of `ask`, in batches of `batch` texts."""
        self.ask, self._batch, self.model, self.vocabulary = ask, batch, model, vocabulary
        self.pairs = self.model.kind == "encoder_decoder"
        special = special or (vocabulary.special if vocabulary else SpecialIds())
        self.start, self.begin, self.end = special.start, special.begin, special.end

    def _split_batches(self, texts: Sequence[T]) -> Iterator[Sequence[T]]:
        """Divide the texts to ask a model about, in order, into batches of the size that it takes at a time."""
        return (texts[first : first + self._batch] for first in range(0, len(texts), self._batch))

    def continue_prompts(
        self, prompts: Sequence[Ids], tokens: int, choice: Choice, ends: Ids
    ) -> Iterator[tuple[int, Written]]:
        """Yield the number of each prompt with the model's continuation, of `tokens` at most, in batches in the given
        order. `prompts`: token ids; `choice`: rule by which tokens are chosen; `ends`: ids that end a continuation.
        Prompts and texts may be longer than the model: a text that has filled its length goes on from its last half,
        and an encoder reads the end of its prompt."""
        most, unfinished = self.model.length, dict(enumerate(prompts))
        read = self.model.source_length or most
        written: dict[int, list[int]] = {n: [] for n in unfinished}
        for turn in range(tokens):
            # by the tokens that fit behind them
            rows_by_room: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
            for n, prompt in unfinished.items():
                row = [*([self.start] if self.pairs else prompt), *written[n]]
                row = row if len(row) <= most else row[-max(1, most // 2) :]
                rows_by_room[min(tokens - len(written[n]), most + 1 - len(row))].append((n, row))
            batches = ((room, batch) for room, rows in rows_by_room.items() for batch in self._split_batches(rows))
            for room, batch in batches:
                sources = [list(prompts[n][-read:]) for n, _ in batch] if self.pairs else []
                numbers = [n + (turn << 32) for n, _ in batch]  # draws of another turn are others
                texts = AskedTexts([row for _, row in batch], sources, numbers)
                answers = self.ask(Worker.continue_texts, texts, room, choice, list(ends))[0]
                for (n, _), answer in zip(batch, answers, strict=True):
                    written[n] += answer.ids
                    if answer.ended or len(written[n]) == tokens:
                        del unfinished[n]
                        yield n, replace(answer, ids=written[n])

    def score_continuations(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Scored]:
        """Return the log-probability that a trained model gives each text after its context, for `pairs` (context,
        text) of token ids. Of a context the last tokens are read that fit; without one, or by a decoder that follows an
        encoder, a text is scored after the token that begins a text."""
        scores: list[Scored | None] = [None] * len(pairs)
        rows = [self._build_scoring_row(*pair) for pair in pairs]
        for numbers in self._split_batches(sorted(range(len(rows)), key=lambda n: -len(rows[n][0]))):
            ids, starts, sources = (list(column) for column in zip(*(rows[n] for n in numbers), strict=True))
            texts = AskedTexts(ids, sources if self.pairs else [])
            for number, scored in zip(numbers, self.ask(Worker.score_texts, texts, starts)[0], strict=True):
                scores[number] = scored
        return [scored for scored in scores if scored]

    def _build_scoring_row(self, context: Ids, text: Ids) -> tuple[list[int], int, list[int]]:
        """Return the input from which a trained model scores a text after a context: the decoder's ids, the index at
        which the text begins there, and the encoder's ids, [] without an encoder."""
        most = self.model.length + 1  # the last token is only predicted
        if self.pairs:
            read = self.model.source_length or self.model.length
            return [self.start, *text][:most], 1, [*context[-(read - 1) :], self.end]
        ids = [*(context or [self.begin]), *text][-most:]
        return ids, max(1, len(ids) - len(text)), []

    def score_full_texts(self, texts: Sequence[Ids]) -> list[float]:
        """Return the log-probability that a trained model gives each of several texts of any length, in nats: each
        token once, after the token that begins a text or the tokens before it in its window, as long as the model."""
        most = self.model.length
        windows, owners = [], []
        for number, ids in enumerate(texts):
            full_ids = [self.begin, *ids]
            for first in range(0, len(ids), most):
                stop = min(first + most, len(ids))
                begin = max(0, stop - most)  # the last window is full
                windows.append((full_ids[begin : first + 1], full_ids[first + 1 : stop + 1]))
                owners.append(number)
        totals = [0.0] * len(texts)
        for number, scored in zip(owners, self.score_continuations(windows), strict=True):
            totals[number] += scored.log_probability
        return totals


_LOGIT = 8  # bytes: tokens are chosen in double precision


def violations_of_memory(config: Config, plan: Plan, rows: int, tokens: int, beams: int) -> Iterator[str]:
    """Yield a refusal line if an asked model's workers have too little memory together to generate `rows` texts at a
    time, each of `tokens` with its answer and so many `beams`: weights, keys and values, and logits, each counted
    once."""
    weights = plan.parameter_count * plan.itemsize["compute"]
    row = _bytes_of_row(config.model, pad_to_multiple(tokens, ROOM), plan.itemsize["compute"])
    needed_bytes, available_bytes = weights + row * rows * beams, _total_worker_memory(config, plan.mesh.world_size)
    if needed_bytes <= available_bytes:
        return
    fit = max(0, int((available_bytes - weights) // row))
    needed_text = f"{needed_bytes / 1e9:,.1f} GB for {format_count(rows, 'text')} at a time"
    why = f"needs at least {needed_text}, and there are {available_bytes / 1e9:,.1f} GB"
    if beams > 1:
        yield format_violation("--beams", beams, why, [fit // rows] if fit >= rows else ["--batch=1"] * (rows > 1))
    elif rows > 1:
        yield format_violation("--batch", rows, why, [fit] if fit else [])
    else:
        yield format_violation("CHECKPOINT", config.train.init, why, ["more workers"])


def _bytes_of_row(model: Model, tokens: int, itemsize: int) -> int:
    """Return the bytes that a text of so many `tokens` takes as an asked model generates it: keys, values, logits."""
    of_layers = [dim_sizes(configure_layer(model, layer)) for layer in range(model.layers)]
    width = sum(sizes["kv_heads"] * (sizes["d_kv"] + (model.d_value or sizes["d_kv"])) for sizes in of_layers)
    seen = tokens + (model.source_length or model.length) * (model.kind == "encoder_decoder")
    return seen * width * itemsize + model.vocab * _LOGIT


def _total_worker_memory(config: Config, workers: int) -> float:
    """Return the bytes of memory that all workers of an asked model have; inf if unknown before they start."""
    cluster = config.cluster
    if cluster.gpu and (of_one := nominal_memory(cluster.gpu)):
        return of_one * workers
    if cluster.kind in ("inline", "processes") and cluster.device != "cuda" and not gpu_count():
        return machine_memory()
    return inf
