"""Merges of BPE, for vocabularies that are published as tokens in their order, without the pairs that make them."""

from collections.abc import Iterable, Iterator, Mapping


def merges_of(tokens: Iterable[str], known: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield a BPE tokenizer's merges, the pairs of `known` tokens that make each of `tokens`, ordered by their ids."""
    for token in tokens:
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        legal = [(left, right) for left, right in pairs if left in known and right in known]
        yield from sorted(legal, key=lambda pair: (known[pair[0]], known[pair[1]]))
