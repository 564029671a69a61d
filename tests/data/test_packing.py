"""Rows of whole documents, and documents that are kept apart: nothing is lost, and a row teaches what its documents
would teach one by one."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import packing
from platform.data.corpus import open_corpus
from platform.data.objectives import Causal
from platform.data.packing import best_fit
from platform.data.special_tokens import SpecialIds
from platform.data.streams import DocumentStream, PackedStream
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from tests.harness import reference_transformer
from tests.harness.oracle import configure, trainer_of

LENGTH = 16


def bounds(seed: int, documents: int, longest: int) -> np.ndarray:
    sizes = np.random.default_rng(seed).integers(1, longest, documents)
    return np.append(0, np.cumsum(sizes))


def slow_best_fit(sizes: list[int], length: int) -> list[list[int]]:
    """Best-fit decreasing as it is told in a sentence: rows of numbers of pieces."""
    rows: list[list[int]] = []
    for piece in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rooms = {i: length - sum(sizes[j] for j in row) for i, row in enumerate(rows)}
        fitting = [i for i in rooms if rooms[i] >= sizes[piece]]
        if not fitting:
            rows.append([piece])
        else:
            rows[min(fitting, key=lambda i: rooms[i])].append(piece)
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_best_fit_is_what_it_says(seed):
    ends = bounds(seed, 60, 40)
    pieces, rows = best_fit(ends, LENGTH)
    parts = [pieces[a:b] for a, b in zip(rows[:-1], rows[1:], strict=True)]
    assert sorted(np.concatenate([np.arange(a, a + n) for a, n in pieces])) == list(range(ends[-1]))
    filled = [part[:, 1].sum() for part in parts]
    assert max(filled) <= LENGTH
    sizes = pieces[np.argsort(pieces[:, 0]), 1]
    assert sorted(filled) == sorted(sizes[row].sum() for row in slow_best_fit(sizes.tolist(), LENGTH))
    starts = [part[:, 0].min() for part in parts]
    assert starts == sorted(starts) and all((np.diff(part[:, 0]) > 0).all() for part in parts)
    cut = [n for a, n in pieces if a not in ends]  # pieces that continue a document
    assert all(n <= LENGTH for n in cut) and len(pieces) == len(ends) - 1 + len(cut)
    assert len(rows) - 1 <= 1.1 * ends[-1] / LENGTH  # little padding


def test_nothing_and_one_long_document():
    assert [len(part) for part in best_fit(np.array([0, 0]), LENGTH)] == [0, 1]
    pieces, rows = best_fit(np.array([0, 2 * LENGTH + 3]), LENGTH)
    assert pieces.tolist() == [[0, LENGTH], [LENGTH, LENGTH], [2 * LENGTH, 3]] and rows.tolist() == [0, 1, 2, 3]


NONE = SpecialIds((-1,), -1)  # no token tells documents apart
STARTS = np.array([0, 3, 8])
STREAM = DocumentStream(np.arange(100, 110), STARTS)


def causal(stream, length, *, within=True, special=NONE):
    goal = Causal(length, special, within)
    count = goal.samples(stream)
    batch = goal.batch(stream, np.arange(count), np.zeros(count, np.uint64))
    assert goal.predicted(stream, np.arange(count)) == (batch["labels"] >= 0).sum()
    return {name: rows.tolist() for name, rows in batch.items()}


def test_windows_that_keep_documents_apart():
    """No index token: what follows a document's last token is not predicted from it."""
    batch = causal(STREAM, 9)
    assert batch["tokens"] == [list(range(100, 109))]
    assert batch["labels"] == [[101, 102, -1, 104, 105, 106, 107, -1, 109]]
    assert batch["begins"] == [[0, 0, 0, 3, 3, 3, 3, 3, 8]]
    assert batch["positions"] == [[0, 1, 2, 0, 1, 2, 3, 4, 0]]
    assert causal(STREAM, 9, within=False)["labels"] == [list(range(101, 110))]


def test_packed_rows():
    pieces, rows = best_fit(np.append(STARTS, 10), 6)
    packed = PackedStream(STREAM, pieces, rows)
    batch = causal(packed, 6)
    assert batch["tokens"] == [[100, 101, 102, 108, 109, -1], [103, 104, 105, 106, 107, -1]]
    assert batch["labels"] == [[101, 102, -1, 109, -1, -1], [104, 105, 106, 107, -1, -1]]
    assert batch["begins"] == [[0, 0, 0, 3, 3, 5], [0, 0, 0, 0, 0, 5]]
    assert batch["positions"] == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 0]]
    assert causal(packed, 6, within=False)["labels"] == batch["labels"]  # what follows in the row is another document


def test_what_ends_a_document_is_predicted():
    """Of tokens alone, with one token between documents, and with two."""
    one = np.array([0, 5, 6, 0, 7, 8, 9])
    assert causal(one, 6, special=SpecialIds())["labels"] == [[5, 6, 0, 7, 8, 9]]
    two = np.array([1, 2, 5, 6, 1, 2, 7, 8])  # 1 ends, 2 begins
    batch = causal(two, 7, special=SpecialIds((1, 2), 2))
    assert batch["labels"] == [[-1, 5, 6, 1, -1, 7, 8]] and batch["begins"] == [[0, 1, 1, 1, 1, 5, 5]]


def test_a_piece_of_a_document_predicts_its_next_token():
    pieces, rows = best_fit(np.array([0, 10]), 4)
    batch = causal(PackedStream(DocumentStream(np.arange(10), np.array([0])), pieces, rows), 4)
    assert batch["labels"] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, -1, -1, -1]]
    assert batch["begins"][2] == [0, 0, 2, 2] and batch["begins"][1] == [0, 0, 0, 0]


@pytest.mark.parametrize("front", [(0,), (1, 2)])
@pytest.mark.parametrize("overlong", ["split", "cut", "drop"])
def test_rows_that_teach_nothing_are_not_made(tmp_path, front, overlong, caplog):
    """Exactly those rows that the objective gives no label, and the rest as they were."""
    caplog.set_level("INFO")
    left = 0
    for seed in range(12):
        draw, special = np.random.default_rng(seed), SpecialIds(front, front[-1])
        starts = bounds(seed, 30, 40)
        ids = draw.integers(3, 60, starts[-1])
        ids[starts[:-1]] = front[-1]
        stream = DocumentStream(ids, starts[:-1], draw.random(len(ids)) < draw.choice([0.0, 0.01, 0.05, 0.5]))
        every = PackedStream(stream, *best_fit(starts, LENGTH, overlong))
        labels = np.array(causal(every, LENGTH, special=special)["labels"])
        taught = (labels >= 0).any(1)
        streams = packing.pack_streams(
            {"train": stream}, tmp_path / str(seed), LENGTH, front[-1], overlong, end=front[0]
        )
        wanted = labels[taught] if taught.any() else labels
        assert causal(streams["train"], LENGTH, special=special)["labels"] == wanted.tolist()
        assert streams["train"].left_out == len(labels) - len(wanted)
        left += streams["train"].left_out
        if streams["train"].left_out:
            assert f"{streams['train'].left_out} of {len(labels)} rows teach nothing and are left out" in caplog.text
    assert left


@pytest.fixture
def records(tmp_path):
    """Tokens of documents with lengths of every kind, as somebody else made them."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 61, n).tolist() for n in draw.integers(2, 40, 50)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"ids": row}) + "\n" for row in rows))
    return Data(kind="tokens", path=str(tmp_path / "t.jsonl"), field="ids", cache=str(tmp_path / "cache"),
                packing="best_fit", document_mask=True)  # fmt: skip


def test_every_token_of_an_epoch_comes_once(records):
    corpus = open_corpus(records, length=LENGTH, vocab=61, seed=1)
    count = corpus.sample_counts["train"]
    epoch = corpus.batch("train", 0, count)
    stream = corpus.parts[0].streams["train"]
    assert sorted(epoch["tokens"][epoch["tokens"] >= 0]) == sorted(stream[np.arange(len(stream))])
    again = open_corpus(records, length=LENGTH, vocab=61, seed=1, entry=corpus.entry)
    for name, rows in again.batch("train", 3, 9).items():
        assert np.array_equal(rows, epoch[name][3:9])
    cut = open_corpus(replace(records, packing="cut"), length=LENGTH, vocab=61, seed=1)
    assert cut.digest == corpus.digest and cut.sample_counts["train"] < count


def test_rows_in_the_cache_are_checked(records):
    corpus = open_corpus(records, length=LENGTH, vocab=61, seed=1)
    [place] = {p.parent for p in corpus.entry.parent.glob("*/train_rows.bin")}
    wanted = corpus.batch("train", 0, 8)
    rows = np.fromfile(place / "train_pieces.bin", "<i8")
    (place / "train_pieces.bin").write_bytes((rows + 1).astype("<i8").tobytes())
    mended = open_corpus(records, length=LENGTH, vocab=61, seed=1).batch("train", 0, 8)
    assert all(np.array_equal(mended[name], wanted[name]) for name in wanted)
    (place / "train_rows.bin").unlink()
    with pytest.raises(OSError):
        open_corpus(records, length=LENGTH, vocab=61, seed=1, entry=corpus.entry)


def test_documents_of_a_row_change_places_only_where_they_are_kept_apart(records, monkeypatch):
    """Rows are of the same documents, in an order of their own; those whose tokens see other documents stay."""
    backwards = lambda pieces, rows, length: np.concatenate([p[::-1] for p in np.split(pieces, rows[1:-1])])  # noqa: E731
    monkeypatch.setattr(packing, "even_rows", backwards)
    plain, apart = (open_corpus(replace(records, document_mask=mask), length=LENGTH, vocab=61, seed=1)
                    for mask in (False, True))  # fmt: skip
    [old, new] = (c.batch("train", 0, c.sample_counts["train"])["tokens"] for c in (plain, apart))
    assert (old != new).any() and (np.sort(old, 1) == np.sort(new, 1)).all()


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_packed_row_teaches_what_its_documents_teach_alone(records, positions):
    """The loss and the gradient of a step on packed rows are those of a plain model that reads one document at a time;
    one that sees across documents has others."""

    def step(mask: bool):
        c = configure(data=1, microbatch=2, global_batch=12, positions=positions, within_documents=mask, vocab=61)
        plan = make_plan(replace(c, data=replace(records, document_mask=mask)))
        corpus = open_corpus(replace(records, document_mask=mask), length=LENGTH, vocab=61, seed=1)
        trainer = trainer_of(c, plan, SingleRank(plan.mesh), corpus)
        loss, _ = trainer.compute_gradients(1)
        return c, trainer, loss, corpus.batch("train", 0, 12)

    c, trainer, loss, batch = step(True)
    assert (batch["begins"].max(1) > 0).any()
    weights = {name: w.detach().clone().requires_grad_() for name, w in trainer.weights.master.items()}
    alone = {name: [] for name in ("tokens", "labels")}
    for tokens, labels, begins in zip(batch["tokens"], batch["labels"], batch["begins"], strict=True):
        for start in np.unique(begins[tokens >= 0]):
            own = (begins == start) & (tokens >= 0)
            alone["tokens"].append(np.pad(tokens[own], (0, LENGTH - own.sum())))
            alone["labels"].append(np.pad(labels[own], (0, LENGTH - own.sum()), constant_values=-1))
    plain = replace(c.model, within_documents=False)
    wanted = reference_transformer.loss(plain, weights, {n: torch.tensor(np.stack(r)) for n, r in alone.items()})
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    wanted.backward()
    for name, w in weights.items():
        torch.testing.assert_close(trainer.weights.gradients[name].view_as(w), w.grad, rtol=1e-9, atol=1e-12)
    assert step(False)[2] != pytest.approx(loss, rel=1e-4)


def test_what_tells_no_documents_apart_is_refused(tmp_path):
    np.arange(5000, dtype="<u2").tofile(tmp_path / "t.bin")
    data = Data(kind="tokens", path=str(tmp_path / "t.bin"), cache=str(tmp_path / "cache"))
    for more in ({"packing": "best_fit"}, {"document_mask": True}):
        with pytest.raises(ConfigError, match=f"data.separator=-1: data.{[*more][0]} needs documents"):
            open_corpus(replace(data, **more), length=LENGTH, vocab=5000, seed=0)


@pytest.mark.parametrize("seed", range(4))
def test_labels_are_counted_without_the_ids(seed):
    """As many as a batch has: streams with and without marks of what is learned, documents of no token, rows of pieces,
    samples that come twice, and ends that are starts too."""
    random = np.random.default_rng(seed)
    for number in range(60):
        size, length = int(random.integers(40, 400)), int(random.integers(3, 20))
        starts = np.sort(np.append(0, random.integers(0, size, random.integers(0, size // 3))))
        learned = random.random(size) < 0.6 if number % 3 else None
        stream = DocumentStream(random.integers(0, 4, size), starts, learned)
        if number % 2:
            stream = PackedStream(stream, *best_fit(np.append(np.unique(starts), size), length))
        special = SpecialIds(tuple(random.integers(-1, 3, 2).tolist()))
        goal = Causal(length, special, within=bool(number % 5))
        index = random.integers(0, goal.samples(stream), 12)
        labels = goal.batch(stream, index, np.zeros(12, np.uint64))["labels"]
        assert goal.predicted(stream, index) == (labels >= 0).sum()
