"""Texts that the driver has continued or scored: as token ids, and what the workers say of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from platform.boundary.schema import Count, Real


@dataclass(frozen=True)
class AskedTexts:
    """Texts as token ids: each one's ids in the decoder and, if there is an encoder, its `sources`. `numbers`: indices
    of the texts among all that are asked for; draws depend on them."""

    ids: list[list[Count]]
    sources: list[list[Count]] = field(default_factory=list)
    numbers: list[Count] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """Rule by which tokens are chosen: the likeliest if `temperature` is 0, else one drawn from softmax(logits /
    temperature), restricted to the `top_k` likeliest (0: all) and of these to the fewest that have `top_p` of the
    probability together (Holtzman et al. 2020). `seed`: seed of the draws; `vocab`: ids are below it. `beams`: texts
    that a beam search keeps, 1: none; it finds the one of the largest log-probability / length^`length_penalty`."""

    vocab: Count
    temperature: Real = 0.0
    top_k: Count = 0
    top_p: Real = 1.0
    seed: Count = 0
    beams: Count = 1
    length_penalty: Real = 1.0


@dataclass(frozen=True)
class Written:
    """Continuation of a text: its ids, without the one that ended it, and whether one did. `log_probability`:
    log-probability of the whole, in nats, where a search has found it."""

    ids: list[Count]
    ended: bool
    log_probability: Real | None = None


@dataclass(frozen=True)
class Scored:
    """Log-probability of the end of a text, given its beginning, in nats, and whether each of its tokens is the
    likeliest there."""

    log_probability: Real
    greedy: bool
