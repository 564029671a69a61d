"""Choice of the next token from logits: the likeliest, or one that is drawn, alike under every plan."""

from __future__ import annotations

import torch
from torch import Tensor

from platform.parallel.kernels import random
from platform.train.protocol.asked import Choice

_DRAW = 2.0**-32


def choose(logits: Tensor, how: Choice, sequences: Tensor, position: int) -> Tensor:
    """Return the ids, int64 [batch], of the tokens at `position` of the answers, from `logits` [batch, vocab]. A draw
    depends on the seed, the number of the sequence in `sequences`, int64 [batch], and the position alone."""
    logits = logits[:, : how.vocab].double()
    if not how.temperature:
        return logits.argmax(-1)
    p = torch.softmax(restricted(logits / how.temperature, how), -1)
    drawn = random.bits(random.key(how.seed, "answer", position), sequences.to(p.device)) & 0xFFFFFFFF
    total = p.cumsum(-1)
    found = torch.searchsorted(total, (drawn.double() * _DRAW * total[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    found = found.clamp_max(p.shape[-1] - 1)
    impossible = p.gather(1, found.unsqueeze(-1)).squeeze(-1) == 0  # by rounding alone
    return torch.where(impossible, p.argmax(-1), found)


def restricted(logits: Tensor, how: Choice) -> Tensor:
    """Return `logits` [batch, vocab] with -inf for all tokens that top_k and top_p leave out."""
    if 0 < how.top_k < logits.shape[-1]:
        least = logits.topk(how.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if how.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True, stable=True)
        p = torch.softmax(ordered, -1)
        beyond = p.cumsum(-1) - p >= how.top_p  # what the likelier ones have together is enough
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, places, beyond), -torch.inf)
    return logits
