"""Multi-token prediction in plain PyTorch, token by token, written from DeepSeek-V3's report (section 2.2, equations 21
to 25), with a mean over the rows that count in place of its 1 / T; no code of the platform's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from platform.config.fields import Model
from tests.harness import reference_transformer as plain


def loss(c: Model, w: Mapping[str, Tensor], data: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss of the model's head plus lambda / D times that of each module, and all of them, the head's first.

    Data tensors [batch, length]; `begins`: where the document of a token begins, which counts within_documents."""
    tokens, labels = data["tokens"], data["labels"]
    begins = data["begins"] if c.within_documents else torch.zeros_like(tokens)
    length = tokens.shape[1]
    h = plain.stack(c, w, "", plain.embed(c, w, "", tokens, begins=begins), None, begins=begins)
    table = w["embedding" if c.tied else "head"][: c.vocab]
    everywhere = [(b, i, labels[b, i]) for b in range(len(tokens)) for i in range(length) if labels[b, i] >= 0]
    losses = [mean_loss(c, h, table, everywhere)]
    for k in range(1, c.predict_ahead + 1):
        number = c.layers + k - 1
        name = f"layers.{number}"
        next_embedding = torch.zeros_like(h)
        rows = []
        for b in range(len(tokens)):
            for i in range(length - k):
                if begins[b, i + k] > i:  # another document's
                    continue
                next_embedding[b, i] = w["embedding"][tokens[b, i + k]] * c.embedding_scale
                if labels[b, i + k] >= 0:
                    rows.append((b, i, labels[b, i + k]))
        both = torch.cat(
            [plain.norm(c, w, f"{name}.hidden_norm", h), plain.norm(c, w, f"{name}.embedding_norm", next_embedding)], -1
        )
        x = both @ torch.cat([w[f"{name}.merge_hidden"], w[f"{name}.merge_embedding"]], 1).t()
        hidden = plain.HIDDEN * plain.behind(c, length, number, begins).to(x.dtype)
        read = plain.norm(c, w, f"{name}.attention.norm", x)
        x = x + plain.attention(c, w, f"{name}.attention", read, read, hidden)
        x = x + plain.feed_forward(c, w, f"{name}.mlp", plain.norm(c, w, f"{name}.mlp.norm", x))
        h = plain.norm(c, w, f"{name}.norm", x)
        losses.append(mean_loss(c, h, table, rows))
    return losses[0] + c.predict_ahead_weight / c.predict_ahead * sum(losses[1:]), losses


def mean_loss(c: Model, h: Tensor, table: Tensor, rows: list) -> Tensor:
    """Mean of -log p(label) over rows (sequence, place, label)."""
    if not rows:
        return h.new_zeros(())
    return -sum(torch.log_softmax(table @ h[b, i] * c.logit_scale, 0)[label] for b, i, label in rows) / len(rows)
