"""The words that files hold for classes are data: these, whatever the classes are called."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from platform.config.fields import Data
from platform.data import objectives
from platform.data.corpus import open_corpus
from platform.data.objectives import objective_cache_word
from platform.monitor import events
from platform.monitor.events import EVENTS, JournalEvent
from platform.plan import plan_data
from platform.plan.operations.op import Op
from platform.plan.operations.registry import Ops

KEPT = Path(__file__).parent
JOURNAL = """
    barred changed checkpoint checkpoint_failed checkpoint_prune_failed checkpoint_refused cluster_lost damaged done
    drained examined failure first_step formed forming gave_up goodput hiring initialised injected learned_out
    measured_step no_places not_proven not_scored not_started not_whole notice predicted_step profiled reforming
    refused released replanning restored rolled_back running sampled slow spike starting stopped superseded
    timing took_over traffic undecided unsaved waiting
""".split()
PLAN = """
    Adapter BranchPlace Chunk Collective Conversion Cut Einsum EinsumGroup Layout Mesh Operation Panels Parameter Plan
    PlannedOperation Planner Quantisation Recompute RotaryScaling Router ScaledProducts Scheme Spec Step
    StoredStates
""".split()
OPERATIONS = """
    add_loss_ahead attention combine combine_rows concatenate convolve cross_entropy delta_rule dispatch
    dispatch_rows dropout einsum expand_kv features fused_attention jitter linear_cross_entropy lookup mlp
    multiply_by norm normalise one_hot pointwise pointwise_each project recall recurrence reduce relative_bias
    relayout relayout_each remember reshape residual residual_norm ring_attention rotate route scale scale_by
    sequence_mean shift sinusoid softmax split_branches squared_error sum_branches token_loss
""".split()
BLOCKS = "7be4c08db5416c6b534b28a16e3808ebe2c36947d21f4ac9865516c66e12e0be"  # of the kept texts, in samples of 16


def below(kind: type) -> list[type]:
    """A class's subclasses, and theirs."""
    return [one for child in kind.__subclasses__() for one in (child, *below(child))]


@pytest.fixture
def rename() -> Iterator[Callable[[type], None]]:
    """Give classes another name, for a test."""
    names: dict[type, str] = {}

    def renamed(kind: type) -> None:
        names.setdefault(kind, kind.__name__)
        kind.__name__ = "Renamed"

    yield renamed
    for kind, name in names.items():
        kind.__name__ = name


def test_the_words_of_the_journal():
    assert sorted(EVENTS) == JOURNAL
    assert all(kind.word == word for word, kind in EVENTS.items())
    ours = [kind for kind in below(JournalEvent) if kind.__module__.startswith("platform.")]
    assert {kind for kind in ours if not kind.__subclasses__()} == set(EVENTS.values()), "a kind without a word"
    assert events.event_to_plain(JournalEvent())["event"] == "journal_event"


def test_a_renamed_event_is_read_and_written_as_before(rename):
    for kind in (JournalEvent, *below(JournalEvent)):
        rename(kind)
    path = KEPT / "run" / "journal.jsonl"
    assert [
        json.dumps(events.event_to_plain(event)) for event in events.read_events(path)
    ] == path.read_text().splitlines()

    class Again(events.JournalEvent, word="done_again"):
        """Event of this test."""

    del EVENTS["done_again"]
    assert events.event_to_plain(Again())["event"] == "done_again"


def test_the_words_of_a_plan():
    assert sorted(plan_data._CLASSES) == PLAN


@pytest.mark.parametrize("name", ["plan.json", "experts.json"])
def test_a_renamed_part_of_a_plan_is_read_and_written_as_before(rename, name):
    for kind in plan_data._CLASSES.values():
        rename(kind)
    text = (KEPT / name).read_text().rstrip("\n")
    again = plan_data.encode_plan(plan_data.decode_plan(json.loads(text)))
    assert json.dumps(again, sort_keys=True, separators=(",", ":")) == text


def test_the_words_of_operations():
    """Plans name operations by them; `Ops` is the language of models, whose words users write."""
    assert sorted(word.kind for word in vars(Ops).values() if isinstance(word, Op)) == OPERATIONS


@pytest.mark.parametrize("name", sorted(objectives.GIVEN))
def test_a_renamed_objective_has_the_same_word(rename, name):
    shape = objectives.SampleShape(length=8, source_length=8, vocab=64)
    objective = objectives.OBJECTIVES[name](shape)
    rename(type(objective))
    words = {"causal": "Causal", "masked": "Masked", "pairs": "Pairs", "span_denoising": "SpanDenoising"}
    words["preference"] = "PreferencePairs"
    assert objective_cache_word(objective) == words[name]


def test_an_objective_of_the_user_s_own_has_its_own_name():
    class Mine(objectives.Causal):
        """Objective of this test."""

    assert objective_cache_word(Mine(8)) == "Mine"


def test_the_blocks_of_a_stream_stay_where_they_are(tmp_path, rename):
    """Of a stream's tokens that an earlier version has cached."""
    rename(objectives.Causal)
    texts = str(KEPT / "texts")
    data = Data(kind="text", path=texts, streaming=True, block=1000, validation_path=texts, cache=str(tmp_path))
    corpus = open_corpus(data, length=16, vocab=280, seed=0)
    assert (
        corpus.parts[0].streams["train"].folder.name
        == "7be4c08db5416c6b534b28a16e3808ebe2c36947d21f4ac9865516c66e12e0be"
    )
