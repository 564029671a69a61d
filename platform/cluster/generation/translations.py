"""Translations of held-out pairs, compared with the given ones: BLEU, as sacrebleu computes it."""

from __future__ import annotations

from typing import Any

from platform.boundary.refusals import ConfigError, violation
from platform.cluster.generation.asked_model import AskedModel
from platform.data.corpus import Corpus
from platform.data.tokens.streams import PairStream
from platform.train.protocol.asked import Choice


def bleu(asked: AskedModel, corpus: Corpus, split: str, samples: int, beams: int) -> dict[str, Any]:
    """Let a trained model translate the first `samples` texts of a split of pairs, by a beam search, and return the
    BLEU of the translations: "bleu", its "signature" as sacrebleu gives it, and "pairs", their number. `beams`: texts
    that the search keeps. Raises ConfigError for data that are no pairs of texts."""
    from sacrebleu.metrics import BLEU

    if not corpus.vocabulary or not isinstance(next(iter(corpus.parts[0].streams.values())), PairStream):
        raise ConfigError(violation("--bleu", "", "compares translations, and the data are no pairs", ["data=pairs"]))
    found = corpus.batch(split, 0, samples)
    sources = [row[row >= 0].tolist() for row in found["source"]]
    wanted = [_text(corpus, row[row >= 0].tolist()) for row in found["labels"]]
    how = Choice(corpus.vocabulary.size, beams=beams)
    tokens = min(asked.model.length - 1, max((found["labels"] >= 0).sum(1).max() * 2, 8))
    written = [_text(corpus, answer.ids) for _, answer in asked.write(sources, int(tokens), how, [asked.end])]
    metric = BLEU()
    score = metric.corpus_score(written, [wanted])
    return {"bleu": score.score, "signature": str(metric.get_signature()), "pairs": samples}


def _text(corpus: Corpus, ids: list[int]) -> str:
    """Decode the token ids of a model's translation to text, without the id that ends it."""
    return corpus.decode([i for i in ids if i != corpus.special.end])
