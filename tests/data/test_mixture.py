"""Mixtures: one global order over several sources, whatever the plan and the interruptions."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config, Data, set_value
from platform.data.corpus import Corpus, SourceTokens, open_corpus
from platform.data.data_checks import violations_of_sources
from platform.data.mixture import DataSource, compute_shares, deal_samples_to_sources, list_sources, paths_by_key
from platform.data.objectives import Causal

SIZES = {"length": 32, "vocab": 400, "seed": 0}
some_shares = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 10**13)), min_size=1, max_size=8)


@given(some_shares, st.integers(0, 10**9), st.integers(1, 300))
def test_each_source_counts_its_samples_without_a_gap(parts, start, size):
    source, count = deal_samples_to_sources(parts, np.arange(start, start + size))
    for number in range(len(parts)):
        mine = count[source == number]
        assert np.array_equal(mine, mine[:1] + np.arange(len(mine)).reshape(-1)[: len(mine)])
    one = [deal_samples_to_sources(parts, k) for k in range(start, start + min(size, 5))]
    assert [(int(s), int(c)) for s, c in one] == list(zip(source.tolist(), count.tolist(), strict=True))[: len(one)]


@given(some_shares)
def test_every_beginning_has_the_shares_that_are_due(parts):
    source, count = deal_samples_to_sources(parts, np.arange(500))
    for number, share in enumerate(parts):
        mine = source == number
        assert np.array_equal(count[mine], np.arange(mine.sum()))
        due = np.arange(1, 501) * (share / sum(parts))
        assert np.abs(np.cumsum(mine) - due).max() < len(parts)  # each source before it rounds once


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 5))
def test_a_round_is_exact(parts, number):
    total = sum(parts)
    source, _ = deal_samples_to_sources(parts, np.arange(number * total, (number + 1) * total))
    assert Counter(source.tolist()) == dict(enumerate(parts))


def test_the_order_of_turns_never_changes():
    """Golden values: another order would make resumed runs read samples twice."""
    assert deal_samples_to_sources([3, 1, 2], np.arange(12))[0].tolist() == GOLDEN
    assert deal_samples_to_sources([1], np.arange(5))[1].tolist() == [0, 1, 2, 3, 4]


GOLDEN = [0, 2, 0, 2, 0, 1, 0, 2, 0, 2, 0, 1]


def sources(*entries: dict) -> list[DataSource]:
    return [DataSource(f"s{i}", Data(kind="text"), **more) for i, more in enumerate(entries)]


@pytest.mark.parametrize(
    ("entries", "sizes", "expected"),
    [
        ([{}], [70], [1]),
        ([{"weight": 0.3}], [70], [1]),
        ([{}, {}], [70, 30], [7, 3]),
        ([{"epochs": 2}, {"epochs": 0.5}], [70, 30], [28, 3]),
        ([{"weight": 3}, {"weight": 1}], [70, 30], [3, 1]),
        ([{"weight": 0.7}, {"weight": 0.3}], [7, 7], [734003, 314573]),  # to a millionth
        ([{"weight": 1e-9}, {"weight": 1}], [7, 7], [1, 1048576]),  # none is lost
    ],
)
def test_shares(entries, sizes, expected):
    assert compute_shares(sources(*entries), sizes) == expected


class Numbers:
    """A stream of which token t is t plus a multiple of a million, which tells its source."""

    def __init__(self, source: int, size: int):
        self.source, self.size = source, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.source * 10**6 + index


def corpus_of(sizes: list[int], parts: list[int], seed: int, length: int = 4) -> Corpus:
    streams = [{"train": Numbers(i, n), "validation": Numbers(i, 9)} for i, n in enumerate(sizes)]
    tokens = tuple(SourceTokens(f"s{i}", stream, f"digest {i}") for i, stream in enumerate(streams))
    return Corpus(10**7, Causal(length), seed, tokens, tuple(parts))


@st.composite
def mixtures(draw):
    sizes = draw(st.lists(st.integers(6, 60), min_size=1, max_size=5))
    parts = draw(st.lists(st.integers(1, 20), min_size=len(sizes), max_size=len(sizes)))
    return corpus_of(sizes, parts, draw(st.integers(0, 99)))


@given(mixtures(), st.integers(1, 200))
@settings(max_examples=25, deadline=None)
def test_epochs_are_those_that_samples_read(corpus, samples):
    """To a sample of each source, in which the shares are dealt."""
    epochs = corpus.count_epochs(samples)
    places = list(corpus.locate_samples("train", np.arange(samples)))
    for part in corpus.parts:
        count = sum(len(place.rows) for place in places if place.part is part)
        assert abs(epochs[part.name] * corpus.count_source_samples(part, "train") - count) <= len(corpus.parts)


def alone(corpus: Corpus, number: int) -> Corpus:
    return replace(corpus, parts=(replace(corpus.parts[number], name=""),), shares=(1,))


@given(mixtures(), st.data())
@settings(max_examples=25, deadline=None)
def test_one_order_for_every_plan_and_interruption(corpus, draw):
    """Steps are taken by replicas in microbatches, and taken again after a failure, under another width: what was
    trained on is samples 0, 1, 2, ... of the one order, each once."""
    batch, steps = draw.draw(st.sampled_from([4, 6, 8, 12])), 6
    whole = corpus.batch("train", 0, batch * steps)["tokens"]
    done: dict[int, np.ndarray] = {}
    step = 0
    while step < steps:
        width = draw.draw(st.sampled_from([w for w in (1, 2, 3, 4) if batch % w == 0]))
        micro = draw.draw(st.sampled_from([m for m in (1, 2, 3) if batch // width % m == 0]))
        until = min(steps, step + draw.draw(st.integers(1, 3)))
        for number in range(step, until):
            for first in range(number * batch, (number + 1) * batch, micro):
                done |= dict(enumerate(corpus.batch("train", first, first + micro)["tokens"], first))
        step = max(step, until - draw.draw(st.integers(0, 1))) if until < steps else until  # the last step is lost
    assert list(done) == list(range(batch * steps)) and np.array_equal(np.stack(list(done.values())), whole)


@given(mixtures())
@settings(max_examples=60, deadline=None)
def test_a_source_has_the_samples_that_it_would_have_alone(corpus):
    """In the same order: no sample is lost, or comes twice within an epoch of its source."""
    taken = corpus.batch("train", 0, 300)["tokens"]
    for number, part in enumerate(corpus.parts):
        mine = taken[taken[:, 0] // 10**6 == number]
        assert np.array_equal(mine, alone(corpus, number).batch("train", 0, len(mine))["tokens"] if len(mine) else mine)
        epoch = corpus.objective.samples(part.streams["train"])
        for start in range(0, len(mine) - epoch + 1, epoch):
            assert len({tuple(row) for row in mine[start : start + epoch]}) == epoch


def test_a_change_of_any_share_or_source_is_another_corpus():
    one = corpus_of([20, 20], [1, 2], 0)
    assert one.digest != corpus_of([20, 20], [2, 1], 0).digest
    assert one.digest == corpus_of([20, 20], [1, 2], 7).digest


@pytest.fixture
def two(tmp_path, words):
    """A mixture of two sources, each of twenty documents."""
    for name, ending in (("a", ".txt"), ("b", ".jsonl")):
        folder = tmp_path / name
        folder.mkdir()
        for i in range(20):
            text = words(i + 100 * (name == "b"))
            (folder / f"{i:02}{ending}").write_text(text if name == "a" else json.dumps({"body": text}))
    entries = {"a": {"path": str(tmp_path / "a")}, "b": {"path": str(tmp_path / "b"), "field": "body"}}
    return Data(kind="mixture", sources=entries, validation=0.1, cache=str(tmp_path / "cache"))


def test_one_tokenizer_and_an_entry_for_each(two, tmp_path, writing):
    corpus = open_corpus(two, **SIZES)
    assert len(list((tmp_path / "cache").iterdir())) == 3 and list(corpus.validation_splits) == ["a", "b"]
    assert [corpus.decode(corpus.encode("sheep"))] == ["sheep"]
    for name in ("a", "b"):
        rows = corpus.batch(f"validation/{name}", 0, 2)["tokens"]
        texts = {i + 100 * (name == "b") for i in range(20)}
        assert any(f"of text {i}:" in corpus.decode(rows.reshape(-1).tolist()) for i in texts)
    writing(None)
    again, trusted = open_corpus(two, **SIZES), open_corpus(two, **SIZES, entry=corpus.entry)
    for other in (again, trusted):
        assert other.digest == corpus.digest and other.shares == corpus.shares
        assert np.array_equal(other.batch("train", 5, 50)["labels"], corpus.batch("train", 5, 50)["labels"])


def test_another_weight_needs_no_tokens_anew(two, writing):
    plain = open_corpus(two, **SIZES)
    writing(None)
    two.sources["a"]["weight"], two.sources["b"]["weight"] = 3, 1
    weighed = open_corpus(two, **SIZES)
    assert weighed.shares == (3, 1) and weighed.digest != plain.digest
    rows = weighed.batch("train", 0, 40)["tokens"]
    sizes = {tuple(row) for row in plain.batch("train", 0, plain.sample_counts["train"])["tokens"]}
    assert {tuple(row) for row in rows} <= sizes


def test_other_machines_find_all_of_it_in_a_shared_folder(two, tmp_path, writing):
    corpus = open_corpus(two, **SIZES, shared=tmp_path / "run")
    writing(None)
    away = replace(two, cache=str(tmp_path / "no such cache"))
    second = open_corpus(away, **SIZES, entry=corpus.entry)
    assert corpus.entry.parent == tmp_path / "run" and second.digest == corpus.digest
    one = replace(two, sources={"a": two.sources["a"]})
    with pytest.raises(OSError, match="is not what the driver has found there"):
        open_corpus(one, **SIZES, entry=corpus.entry)


def test_a_mixture_of_one_is_that_one(two):
    one = replace(two, sources={"a": two.sources["a"]})
    single = Data(kind="text", path=two.sources["a"]["path"], validation=0.1, cache=two.cache)
    mixed, plain = (open_corpus(data, **SIZES) for data in (one, single))
    assert mixed.digest == plain.digest and mixed.entry == plain.entry
    assert np.array_equal(mixed.batch("train", 0, 99)["tokens"], plain.batch("train", 0, 99)["tokens"])


def test_a_held_out_split_of_each_source_s_own(two):
    two.sources["a"]["validation"] = 0.0
    corpus = open_corpus(two, **SIZES)
    assert list(corpus.validation_splits) == ["b"]


def test_a_source_that_is_held_out_as_a_whole(two):
    """It is a validation set of its own: no sample of it is trained on, and it does not count in the mean."""
    two.sources["b"]["validation"] = 1
    corpus = open_corpus(two, **SIZES)
    a, b = corpus.parts
    assert corpus.shares == (1, 0) and len(b.streams["train"]) == 0
    held = corpus.batch("validation/b", 0, 2)["tokens"]
    assert corpus.validation_splits["b"] == ("validation/b", 0) and corpus.validation_splits["a"][1] == 1
    trained = corpus.batch("train", 0, 3 * corpus.sample_counts["train"])["tokens"]
    assert not {tuple(row) for row in held} & {tuple(row) for row in trained}
    two.sources["a"]["validation"] = 0
    assert open_corpus(two, **SIZES).validation_splits == {"b": ("validation/b", 1)}


def test_turns_without_a_share_are_left_out():
    source, count = deal_samples_to_sources([0, 2, 0, 1], range(30))
    without, same = deal_samples_to_sources([2, 1], range(30))
    assert np.array_equal(source, np.array([1, 3])[without]) and np.array_equal(count, same)


WRONG = {
    "all held out": ({"a": {"path": "x", "validation": 1}}, "data.sources: all of them are held out"),
    "a weight of what is held out": (
        {"a": {"path": "x"}, "b": {"path": "x", "validation": 1, "weight": 2}},
        "data.sources.b.weight=2: data.sources.b.validation=1: all of it is held out",
    ),
    "no sources": ({}, "data.sources: data=mixture needs sources"),
    "a name with a dot": ({"a.b": {"path": "x"}}, "data.sources=a.b: the name of a source"),
    "a list": ({"a": ["x"]}, "data.sources.a=['x']: must be keys with values"),
    "an unknown key": ({"a": {"pth": "x"}}, "data.sources.a.pth=x: unknown key; nearest legal: data.sources.a.path"),
    "an unknown kind": ({"a": {"kind": "txt"}}, "data.sources.a.kind=txt: unknown; nearest legal: text"),
    "a mixture": ({"a": {"kind": "mixture"}}, "data.sources.a.kind=mixture: no source of a mixture"),
    "next to nothing": ({"a": {"path": "x", "epochs": 1e-300}}, "data.sources.a.epochs=1e-300: must be a number from"),
    "a weight of zero": ({"a": {"path": "x", "weight": 0}}, "data.sources.a.weight=0: must be a number from 1e-9"),
    "a weight of truth": ({"a": {"path": "x", "weight": True}}, "data.sources.a.weight=true: must be a number"),
    "a weight that is none": ({"a": {"path": "x", "weight": float("nan")}}, "data.sources.a.weight=nan: must be"),
    "both": ({"a": {"path": "x", "weight": 1, "epochs": 2}}, "data.sources.a.epochs=2: data.sources.a.weight says"),
    "some": ({"a": {"path": "x", "weight": 1}, "b": {"path": "x"}}, "data.sources.b.weight: must be given"),
    "a path that is a number": ({"a": {"path": 5}}, "data.sources.a.path=5: must be text"),
    "a validation of text": ({"a": {"validation": "x"}}, "data.sources.a.validation=x: must be a number"),
    "a validation above 1": ({"a": {"validation": 1.5}}, "data.sources.a.validation=1.5: must be >= 0 and < 1"),
    "a missing file": ({"a": {"path": "/nowhere/x"}}, "data.sources.a.path=/nowhere/x: no file or folder"),
    "no path": ({"a": {}}, "data.sources.a.path: data=text needs a file"),
    "too many": ({f"s{i}": {} for i in range(101)}, "data.sources: 101 sources, of which there may be 100"),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_are_named_by_their_keys(what):
    entries, expected = WRONG[what]
    lines = violations_of_sources(Data(kind="mixture", sources=entries))
    assert any(line.startswith(expected) for line in lines), lines
    assert all(line.isprintable() for line in lines)


def test_a_fault_deep_inside_names_its_source(two, tmp_path):
    with (tmp_path / "b" / "07.jsonl").open("ab") as file:
        file.write(b"\n" + b'{"body": "good"}\n' * 1000 + b'{"text": "x"}\n')
    with pytest.raises(ConfigError) as caught:
        open_corpus(two, **SIZES)
    [line] = caught.value.violations
    assert line.startswith(f"data.sources.b.path={tmp_path}/b/07.jsonl: data.field=body is missing in line 1002")


def test_a_source_without_a_whole_sample_is_named(two, tmp_path):
    (tmp_path / "tiny.txt").write_text("a b c")
    two.sources["c"] = {"path": str(tmp_path / "tiny.txt")}
    with pytest.raises(ConfigError) as caught:
        open_corpus(two, **SIZES)
    assert {line.split(" and ")[1].split(" has")[0] for line in caught.value.violations} == {
        "the train split of data.sources.c",
        "the validation split of data.sources.c",
    }


def test_paths_are_found_and_set_wherever_they_are():
    config = Config()
    config.data = Data(kind="mixture", sources={"a": {"path": "x"}, "b": {"target_path": "y"}, "c": "z"})
    keys = {key: path for key, path in paths_by_key(config.data).items() if path}
    assert keys == {"data.sources.a.path": "x", "data.sources.b.target_path": "y"}
    for key, path in keys.items():
        set_value(config, key, f"/{path}")
    assert [sorted(paths_by_key(config.data).values())[-2:]] == [["/x", "/y"]]
    assert list_sources(Data())[0].config_key == "data"


@pytest.mark.parametrize("name", ["a.b", "a b", "", "path", 1, None])
def test_a_name_that_no_key_can_have_is_refused(name):
    data = Data(kind="mixture", sources={name: {"path": "x"}, "b": {"path": "y"}})
    assert paths_by_key(data).keys() - {"data.sources.path.path"} == {*paths_by_key(Data()), "data.sources.b.path"}
    if name != "path":
        with pytest.raises(ConfigError, match=f"data.sources={name}: the name of a source has letters, digits and _"):
            list_sources(data)


@given(
    st.lists(st.floats(1e-9, 1e9, exclude_max=True), min_size=2, max_size=5),
    st.lists(st.integers(1, 10**9), min_size=5),
)
@settings(max_examples=60)
def test_shares_of_any_epochs_can_be_counted(epochs, sizes):
    sources = [DataSource(str(i), Data(kind="text"), epochs=n) for i, n in enumerate(epochs)]
    shares = compute_shares(sources, sizes[: len(sources)])
    assert sum(shares) < 1 << 63 and min(shares) >= 1
    source, count = deal_samples_to_sources(shares, np.arange(50))
    assert ((0 <= source) & (source < len(shares)) & (count >= 0)).all()
