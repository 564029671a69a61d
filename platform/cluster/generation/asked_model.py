"""Model that is asked: prompts as token ids, texts in batches of like length, and the workers' answers on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from platform.boundary import documents
from platform.boundary.refusals import ConfigError, violation
from platform.cluster.generation.prompts import KINDS, Prompt
from platform.config.fields import Model
from platform.data.tokenizers.chat import conversation
from platform.data.tokenizers.specials import SpecialIds
from platform.data.vocabulary import Vocabulary
from platform.train.protocol.asked import AskedTexts, Choice, Scored, Written

T = TypeVar("T")
Ids = Sequence[int]
Ask = Callable[..., list[Any]]  # `Crew.call` of a crew whose workers answer, or what stands before it


@dataclass(frozen=True)
class Reader:
    """Reads prompts as a model does. `vocabulary`: None for one without a tokenizer, which reads ids alone. `chat`: a
    text is the message of a user. `bare`: nothing is put in front of a text, else the token that begins a document."""

    model: Model
    vocabulary: Vocabulary | None
    chat: bool = False
    bare: bool = False

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt for a trained model. Raises ConfigError if the model cannot read it."""
        kind = next(kind for kind in KINDS if kind in prompt.given)
        value = prompt.given[kind]
        found = self._of_ids(value, prompt.where) if kind == "ids" else self._of_text(kind, value, prompt.where)
        if not found:
            raise ConfigError(violation("prompt", prompt.where, "is empty"))
        return found

    def _encoded(self, text: str, where: str) -> list[int]:
        """Return the token ids of a prompt's text, or of one that a chat template made of it. Raises ConfigError."""
        assert self.vocabulary
        return self.vocabulary.encode(_whole(text, where))

    def _of_ids(self, value: Any, where: str) -> list[int]:
        """Return a prompt given as token ids unchanged. Raises ConfigError unless all are ids of the vocabulary."""
        most = self.model.vocab
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < most for i in value):
            raise ConfigError(violation("prompt", where, f"ids are a list of integers from 0 to {most - 1}"))
        return value

    def _of_text(self, kind: str, value: Any, where: str) -> list[int]:
        """Return the token ids of a prompt. `kind`: "prompt" if `value` is a text, "messages" if it is a conversation.
        Raises ConfigError, naming `where` the prompt is from, if it cannot be tokenised."""
        vocabulary = self.vocabulary
        if vocabulary is None:
            reason = "there is none beside the model, and a text needs one"
            raise ConfigError(violation("data.tokenizer", "", reason, ["data.tokenizer=PATH", "a prompt of ids"]))
        if kind == "prompt" and not isinstance(value, str):
            raise ConfigError(violation("prompt", where, "is no text"))
        messages = value if kind == "messages" else [{"role": "user", "content": value}] if self.chat else None
        if messages is None:
            ids = self._encoded(value, where)
            return ids if self.bare else as_prompt(ids, self.model, vocabulary.special)
        if (talk := conversation(messages)) is None:
            raise ConfigError(violation("prompt", where, "messages are a list of objects with a role"))
        for text in _texts(talk):
            _whole(text, where)
        found: list[int] = []
        for text, special in vocabulary.chat.prompt_parts(talk):
            number = vocabulary.tokenizer.token_to_id(text) if special else None
            found += self._encoded(text, where) if number is None else [number]
        ends = self.model.kind == "encoder_decoder" and not self.bare
        return [*found, vocabulary.special.end] if ends else found


def as_prompt(ids: Ids, model: Model, special: SpecialIds) -> list[int]:
    """Return a prompt's token ids with the token that begins a document in front or, in an encoder, its end behind."""
    if model.kind == "encoder_decoder":
        return [*ids, special.end]
    return [special.begin, *ids] if special.begin >= 0 else [*ids]


def _whole(text: str, where: str) -> str:
    """Return a prompt's text unchanged. Raises ConfigError if it has half a character, which no tokenizer reads."""
    if half := documents.half_character(text):
        raise ConfigError(violation("prompt", where, f"is no text: it has {half}"))
    return text


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a conversation, a prompt, as plain data: in lists, and keys and values of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        parts = [*value, *value.values()] if isinstance(value, Mapping) else value
        yield from (text for part in parts for text in _texts(part))


class AskedModel:
    """Model whose workers answer the calls of `ask` (`Worker.continue_texts`, `Worker.score_texts`). `vocabulary`: None
    if it has none; `batch`: texts at a time; `special`: the ids that begin and end texts, by default the
    vocabulary's."""

    def __init__(self, ask: Ask, model: Model, vocabulary: Vocabulary | None, batch: int = 16, special: Any = None):
        """Prepare to ask a trained model's workers, by calls of `ask`, in batches of `batch` texts."""
        self._ask, self._batch, self.model, self.vocabulary = ask, batch, model, vocabulary
        self.pairs = self.model.kind == "encoder_decoder"
        special = special or (vocabulary.special if vocabulary else SpecialIds())
        self.start, self.begin, self.end = special.start, special.begin, special.end

    def _batches(self, texts: Sequence[T]) -> Iterator[Sequence[T]]:
        """Divide the texts to ask a model about, in order, into batches of the size that it takes at a time."""
        return (texts[first : first + self._batch] for first in range(0, len(texts), self._batch))

    def write(self, prompts: Sequence[Ids], tokens: int, how: Choice, ends: Ids) -> Iterator[tuple[int, Written]]:
        """Yield the number of each prompt with the model's continuation, of `tokens` at most, in batches in the given
        order. `prompts`: token ids; `how`: rule by which tokens are chosen; `ends`: ids that end a continuation.
        Prompts and texts may be longer than the model: a text that has filled its length goes on from its last half,
        and an encoder reads the end of its prompt."""
        most, read, going = self.model.length, self.model.source_length or self.model.length, dict(enumerate(prompts))
        written: dict[int, list[int]] = {n: [] for n in going}
        for turn in range(tokens):
            alike: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)  # by the tokens that fit behind them
            for n, prompt in going.items():
                row = [*([self.start] if self.pairs else prompt), *written[n]]
                row = row if len(row) <= most else row[-max(1, most // 2) :]
                alike[min(tokens - len(written[n]), most + 1 - len(row))].append((n, row))
            for room, some in [(room, some) for room, rows in alike.items() for some in self._batches(rows)]:
                sources = [list(prompts[n][-read:]) for n, _ in some] if self.pairs else []
                numbers = [n + (turn << 32) for n, _ in some]  # draws of another turn are others
                texts = AskedTexts([row for _, row in some], sources, numbers)
                answers = self._ask("continue_texts", texts, room, how, list(ends))[0]
                for (n, _), found in zip(some, answers, strict=True):
                    written[n] += found.ids
                    if found.ended or len(written[n]) == tokens:
                        del going[n]
                        yield n, replace(found, ids=written[n])

    def score(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Scored]:
        """Return the log-probability that a trained model gives each text after its context, for `pairs` (context,
        text) of token ids. Of a context the last tokens are read that fit; without one, or by a decoder that follows an
        encoder, a text is scored after the token that begins a text."""
        found: list[Scored | None] = [None] * len(pairs)
        rows = [self._row(*pair) for pair in pairs]
        for numbers in self._batches(sorted(range(len(rows)), key=lambda n: -len(rows[n][0]))):
            ids, starts, sources = (list(column) for column in zip(*(rows[n] for n in numbers), strict=True))
            texts = AskedTexts(ids, sources if self.pairs else [])
            for number, scored in zip(numbers, self._ask("score_texts", texts, starts)[0], strict=True):
                found[number] = scored
        return [scored for scored in found if scored]

    def _row(self, context: Ids, text: Ids) -> tuple[list[int], int, list[int]]:
        """Return the input from which a trained model scores a text after a context: the decoder's ids, the index at
        which the text begins there, and the encoder's ids, [] without an encoder."""
        most = self.model.length + 1  # the last token is only predicted
        if self.pairs:
            read = self.model.source_length or self.model.length
            return [self.start, *text][:most], 1, [*context[-(read - 1) :], self.end]
        ids = [*(context or [self.begin]), *text]
        ids = ids[-most:]
        return ids, max(1, len(ids) - len(text)), []

    def score_whole(self, texts: Sequence[Ids]) -> list[float]:
        """Return the log-probability that a trained model gives each of several texts of any length, in nats: each
        token once, after the token that begins a text or the tokens before it in its window, as long as the model."""
        most = self.model.length
        windows, owners = [], []
        for number, ids in enumerate(texts):
            whole = [self.begin, *ids]
            for first in range(0, len(ids), most):
                stop = min(first + most, len(ids))
                begin = max(0, stop - most)  # the last window is full
                windows.append((whole[begin : first + 1], whole[first + 1 : stop + 1]))
                owners.append(number)
        totals = [0.0] * len(texts)
        for number, scored in zip(owners, self.score(windows), strict=True):
            totals[number] += scored.log_probability
        return totals
