"""Batch of texts as passes read it: token ids padded to one length, and the positions at which the texts begin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from platform.plan.core.passes import PIECE
from platform.plan.language.layout import padded
from platform.train.protocol.asked import AskedTexts

ROUND = 16  # shorter texts are padded to a multiple of it, so that batches of like length share their passes


class Batch:
    """Texts padded with rows to a multiple of `unit` and with tokens to one length, on the left for texts that are
    continued (`left`), so that all go on at one index. Each text has `copies` rows next to each other. `source`: the
    tokens of an encoder's row, 0 without; `most`: limit of tokens of a text that is scored; `ranks` that share each
    text, where a pass reads a `piece` of it."""

    def __init__(
        self,
        texts: AskedTexts,
        unit: int,
        *,
        left: bool = True,
        copies: int = 1,
        source: int = 0,
        most: int = 0,
        ranks: int = 1,
    ):
        """Pad texts, given as token ids, to a batch int64 [rows, tokens] that generation passes read. `unit`: number of
        which the number of texts is made a multiple; `left`: pad in front, for texts to be continued; `copies`: rows
        per text, for beams; `source`: tokens of an encoder's row, 0 without an encoder; `most`: limit of tokens of a
        text to be scored; `ranks`: number of ranks that share each text."""
        count = len(texts.ids)
        more = padded(count, unit) - count
        rows = [*texts.ids, *[[0]] * more]
        longest = max(map(len, rows))
        self.ranks, least = ranks, padded(PIECE, ranks)
        self.piece = least * max(1, ranks // (len(rows) * copies))  # of which a rank has no more than alone
        if not left:  # the last token of a text is only predicted
            self.longest = max(longest, min(padded(longest - 1, ROUND) + 1, most))
        else:
            unit = padded(ROUND, ranks) if longest <= least else least
            self.longest = longest if longest == 1 else padded(longest, unit)
        self.texts, self.rows = count, len(rows) * copies
        ids = torch.zeros(len(rows), self.longest, dtype=torch.int64)
        for row, found in zip(ids, rows, strict=True):
            row.narrow(0, self.longest - len(found) if left else 0, len(found)).copy_(torch.tensor(found))
        begins = torch.tensor([self.longest - len(found) if left else 0 for found in rows])
        self.ids, self.begins = (t.repeat_interleave(copies, 0) for t in (ids, begins))
        numbers = [*(texts.numbers or range(count)), *[0] * more]
        self.numbers = torch.tensor(numbers).repeat_interleave(copies, 0)
        self.source = self._source(texts.sources, len(rows), source).repeat_interleave(copies, 0) if source else None

    @staticmethod
    def _source(sources: Sequence[Sequence[int]], rows: int, length: int) -> Tensor:
        """Return the encoder's token ids, int64 [rows, length], padded with -1; a row without a text has a single 0."""
        out = torch.full((rows, length), -1)
        out[:, 0] = 0
        for row, found in zip(out, sources, strict=False):
            row[: len(found)] = torch.tensor(found)
        return out

    def data(self, tokens: Tensor, offset: int) -> dict[str, Tensor]:
        """Return the data tensors, by name, of a generation pass that reads `tokens` [rows, n] from `offset` on."""
        index = torch.arange(offset, offset + tokens.shape[1])
        begins = torch.minimum(index, self.begins.unsqueeze(1))  # padding sees itself, lest it see nothing
        found = {"tokens": tokens, "begins": begins, "positions": (index - begins).contiguous()}
        return found if self.source is None else {**found, "source": self.source}
