"""Special tokens: which tokens of a tokenizer begin and end documents, hide, and stand in for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from platform.data.chat_templates import ConfinedTokenizer

# Special tokens by role, for a tokenizer that does not say: the first that it has.
USUAL: Mapping[str, tuple[str, ...]] = {
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]"),
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "[CLS]"),
    "pad": ("<pad>", "[PAD]"),
    "mask": ("<mask>", "[MASK]"),
}
_ALSO = {"eos": "sep", "bos": "cls"}  # what BERT calls them
SENTINEL = "<extra_id_{}>"  # T5's, of which each has the id below that of the one before


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens with which samples are made. By default as in a tokenizer trained on the corpus, in
    which the id 0 stands in front of every document.

    `front`: the ids in front of every document: its last one begins this document, its first one ends the one before;
    `start`: id that a decoder reads first; `mask`: id in place of a hidden token, None: the vocabulary's last id;
    `sentinel`: id in place of the first missing span, None: the last id too; the ids below stand for the others, so
    that there are `sentinels` in all, 0: as many as are needed; `size`: vocabulary size, 0: the model's.
    """

    front: tuple[int, ...] = (0,)
    start: int = 0
    mask: int | None = None
    sentinel: int | None = None
    sentinels: int = 0
    size: int = 0

    @property
    def begin(self) -> int:
        """Return the id of the token that begins a document, the last of the tokens in front of it."""
        return self.front[-1]

    @property
    def end(self) -> int:
        """Return the id of the token that ends a document, the first of the tokens in front of the next."""
        return self.front[0]


def collect_named_tokens(settings: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return role -> special token (bos, eos, pad, ...) as a tokenizer's `settings` files name them, such as
    tokenizer_config.json; of several files the first counts."""
    tokens_by_role: dict[str, str] = {}
    for config in settings:
        for key, value in config.items():
            role, _, kind = key.rpartition("_")
            text = value.get("content") if isinstance(value, Mapping) else value
            if kind == "token" and role and isinstance(text, str):
                tokens_by_role.setdefault(role, text)
    return tokens_by_role


def complete_named_tokens(tokenizer: Tokenizer | ConfinedTokenizer, named: Mapping[str, str]) -> dict[str, str]:
    """Return the `named` special tokens and the tokenizer's USUAL mask; all USUAL ones if no end is named."""
    silent = not named.keys() & {"eos", _ALSO["eos"]}
    missing_roles = [role for role in USUAL if role not in named and (silent or role == "mask")]
    spellings = {
        role: next((t for t in USUAL[role] if tokenizer.token_to_id(t) is not None), "") for role in missing_roles
    }
    return {**named, **{role: text for role, text in spellings.items() if text}}


def find_special_ids(tokenizer: Tokenizer | ConfinedTokenizer, named: Mapping[str, str]) -> SpecialIds | None:
    """Return the ids of a tokenizer's special tokens, for samples to be made with. `named`: role -> its spelling. None
    if no token ends documents."""

    def find_role_id(role: str) -> int | None:
        """Return the id of the tokenizer's special token for a role, such as "eos"; None if it has none."""
        names = [named[r] for r in (role, _ALSO.get(role, "")) if r in named]
        return next((i for name in names if (i := tokenizer.token_to_id(name)) is not None), None)

    end, begin, pad = map(find_role_id, ("eos", "bos", "pad"))
    first = tokenizer.token_to_id(SENTINEL.format(0))
    if end is None:
        return None
    front = (end,) if begin in (None, end) else (end, begin)
    start = begin if begin not in (None, end) else pad if pad is not None else end
    sentinels = 0
    while first is not None and tokenizer.token_to_id(SENTINEL.format(sentinels)) == first - sentinels:
        sentinels += 1
    size = max(tokenizer.get_vocab().values()) + 1
    return SpecialIds(front, start, find_role_id("mask"), first, sentinels, size)
