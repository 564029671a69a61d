"""What a listing shows of a step is what the ranks of its plan train on, whatever the data and the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from platform.config.fields import Config, Data
from platform.config.ramps import find_sequence_length, step_sample_range
from platform.data.corpus import open_run_corpus
from platform.data.step_listing import format_step_heading
from platform.data.step_view import ReadingRanks, StepView, TakenStep, describe_reader, ranks_in_words
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from platform.train import stage_passes
from platform.train.stage_passes import StagePasses
from tests.harness.oracle import configure, trainer_of
from tests.harness.threads import run_threads

SMALL = {"layers": 2, "d_model": 16, "heads": 4, "length": 16, "vocab": 400}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Texts, conversations and pairs, and a cache."""
    root = tmp_path_factory.mktemp("shown")
    (root / "texts").mkdir()
    for i in range(12):
        (root / "texts" / f"{i:02}.txt").write_text(
            "".join(f"text {i}, line {j}: {i * j} sheep\n" for j in range(9 + i))
        )
    says = [("user", "how many sheep, {}?"), ("assistant", "{} sheep")]
    talks = [[{"role": role, "content": text.format(i)} for role, text in says] for i in range(40)]
    (root / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    pairs = ({"text": f"{i} sheep", "target": f"{i} wolves"} for i in range(60))
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return root


def data_of(folder: Path, kind: str) -> dict[str, Any]:
    """The keys of group data, by kind."""
    texts = {"kind": "text", "path": str(folder / "texts")}
    talks = {"kind": "instructions", "path": str(folder / "talks.jsonl"), "field": "messages"}
    held = {"validation": 0.0}
    pairs = {"kind": "pairs", "path": str(folder / "pairs.jsonl"), "field": "text", "target_field": "target"}
    sources = {"a": {"path": texts["path"], "weight": 0.6}, "b": {**talks, "weight": 0.4}}
    return {
        "text": texts | held,
        "packed": texts | held | {"packing": "best_fit", "document_mask": True},
        "talks": talks | held | {"chat_template": "chatml", "packing": "best_fit", "document_mask": True},
        "mixture": {"kind": "mixture", "sources": sources, "chat_template": "chatml", "packing": "best_fit"} | held,
        "streamed": texts | held | {"streaming": True, "block": 1000},
        "masked": texts | held | {"objective": "masked"},
        "spans": texts | held | {"objective": "span_denoising"},
        "pairs": pairs | held,
    }[kind]


def configured(folder: Path, kind: str, *scheme: Any, **more: Any) -> Config:
    """A small model on one kind of data under a plan."""
    model = {"masked": {"kind": "encoder"}}.get(kind, {})
    if kind in ("spans", "pairs"):
        model = {"kind": "encoder_decoder", "source_length": 32}
    c = configure(*scheme, **SMALL, **model, **more)
    own = {key: value for key, value in data_of(folder, kind).items() if key in Data.__dataclass_fields__}
    c.data = Data(**own, cache=str(folder / "cache"))
    c.model.within_documents = c.data.document_mask
    return c


PLANS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "one process": ("text", (), {}),
    "data 2 x t 2": ("packed", ("1d", {"t": 2}), {"data": 2}),
    "contexts": ("text", (), {"context": 2}),
    "3d": ("masked", ("3d", {"x": 2, "y": 1, "z": 2}), {}),
    "pipeline": ("talks", (), {"pipeline": "1f1b", "stages": 2, "data": 2}),
    "mixture": ("mixture", (), {"data": 2}),
    "streamed": ("streamed", (), {"data": 2}),
    "spans": ("spans", ("1d", {"t": 2}), {"data": 2}),
    "pairs": ("pairs", (), {"data": 2, "microbatch": 2}),
}


def shown(c: Config, plan: Plan, step: int) -> StepView:
    """The view of a step."""
    return StepView(
        TakenStep(c, step, step_sample_range(c.train, step), find_sequence_length(c, step), plan), open_run_corpus(c)
    )


def trained(c: Config, plan: Plan, step: int, monkeypatch) -> list[tuple[int, int, str, Any, Any]]:
    """What ranks read in a step: (rank, first sequence, data tensor, layout, its block)."""
    blocks_read, load = [], StagePasses.load_input_blocks

    def noted(passes: StagePasses, split: str, first: int, end: int | None = None, chunk: Any = None) -> Any:
        blocks = load(passes, split, first, end, chunk)
        rank = plan.mesh.find_rank(passes.communicator.coordinates)
        for name, readers in (passes._parts[chunk.number] if chunk else passes.stage).reader_layouts.items():
            blocks_read.extend((rank, first, name, at, blocks[name][key]) for key, at in readers.items())
        return blocks

    monkeypatch.setattr(StagePasses, "load_input_blocks", noted)
    corpus = open_run_corpus(c)
    run_threads(plan.mesh, lambda communicator: trainer_of(c, plan, communicator, corpus).step(step))
    return blocks_read


def differences(c: Config, step: int, monkeypatch) -> list[str]:
    """The places at which what ranks have trained on is not what is shown, or by whom it is said to be read."""
    plan = make_plan(c)
    view = shown(c, plan, step)
    of_length = plan.plan_of_length(view.taken.length)
    rows = [*view.read_sequences(0, view.num_sequences)]
    wrong, read = [], set()
    for rank, first, name, layout, block in trained(c, plan, step, monkeypatch):
        coordinates = plan.mesh.rank_coordinates(rank)
        if not layout.has_block(coordinates):
            continue
        stage = of_length.stage_part(coordinates["stage"])
        columns = [
            i
            for at, n in stage.planner.stretches_of_rank("length", len(rows[0].tensors[name]), layout, coordinates)
            for i in range(at, at + n)
        ]
        ((start, count),) = stage.planner.stretches_of_rank("batch", stage.sizes["batch"], layout, coordinates)
        for i, row in enumerate(range(start, start + count)):
            position = first + row - view.taken.samples[0] * view.pieces_per_sample
            if position >= view.num_sequences:
                continue
            if not np.array_equal(rows[position].tensors[name][columns], block[:, i].numpy()):
                wrong.append(f"rank {rank} reads other {name} at {position}")
            tokens = {t for r in rows[position].readers if rank in r.ranks for at, n in r.tokens
                      for t in range(at, at + n)}  # fmt: skip
            if name != "source" and not set(columns) <= tokens:
                wrong.append(f"rank {rank} is not said to read {name} at {position}")
            read.add((position, name))
    assert {(p, name) for p in range(view.num_sequences) for name in of_length.reader_layouts} == read
    return wrong


@pytest.mark.parametrize("name", PLANS)
def test_a_view_shows_what_ranks_train_on(folder, name, monkeypatch):
    kind, scheme, more = PLANS[name]
    assert not differences(configured(folder, kind, *scheme, **more), 2, monkeypatch)


@pytest.mark.parametrize("pieces", [2, 4])
def test_work_of_documents_is_counted_as_pair_by_pair(folder, pieces):
    """Of each microbatch and replica by the slowest rank; two layers, of which one has a window."""
    window = {"window": 3, "window_layers": [1]}
    c = configured(
        folder, "packed", context=2, context_kind="ring", context_pieces=pieces, data=2, microbatch=2, **window
    )
    view, slowest, mean, pairs = shown(c, make_plan(c), 1), 0, 0.0, list[list[int]]()
    place = np.arange(SMALL["length"])
    for sequence in view.read_sequences(0, view.num_sequences):
        visible = (place <= place[:, None]) & (place >= sequence.tensors["begins"][:, None])
        near = visible & (place > place[:, None] - 3)
        queries = [np.concatenate([place[a : a + n] for a, n in r.tokens]) for r in sequence.readers]
        pairs.append([int(visible[mine].sum() + near[mine].sum()) for mine in queries])
    for first in range(0, view.num_sequences, 2):
        each = np.sum(pairs[first : first + 2], 0)
        slowest, mean = slowest + each.max(), mean + each.mean()
    assert view.num_sequences == 8 and view.work_imbalance == pytest.approx(slowest / mean) and view.work_imbalance > 1
    (line,) = [line for line in format_step_heading(view) if line.startswith("work: ")]
    assert f"the busiest of 2 ranks that share a sequence has {view.work_imbalance:.2f} times the mean" in line


def test_without_contexts_or_documents_that_are_kept_apart_there_is_no_work_to_compare(folder):
    for kind, more in (("packed", {"data": 2}), ("text", {"context": 2})):
        c = configured(folder, kind, **more)
        view = shown(c, make_plan(c), 1)
        assert not view.work_imbalance and not any(line.startswith("work") for line in format_step_heading(view))


def test_many_pieces_are_not_all_named():
    tokens = tuple((first, 4) for first in range(0, 64, 8))
    said = describe_reader(ReadingRanks((0,), "context 0", (0, 2), tokens), 64)
    assert said == "context 0 (rank 0) tokens 0-3, 8-11, ... 56-59, 8 pieces"


def test_shorter_sequences_are_shown_as_they_are(folder, monkeypatch):
    c = configured(folder, "text", data=2)
    c.train.length_ramp, c.model.position_rows = ["0:4", "2:16"], 16
    assert not differences(c, 2, monkeypatch)


def test_negative_control_other_samples(folder, monkeypatch):
    """Where ranks train on the next samples, the comparison sees it."""
    read = stage_passes.read_sequence_batch
    monkeypatch.setattr(
        stage_passes, "read_sequence_batch", lambda corpus, split, i, j, n: read(corpus, split, i + 1, j + 1, n)
    )
    assert len(differences(configured(folder, "text", data=2), 1, monkeypatch)) >= 8


def test_documents_are_named_by_their_files(folder, monkeypatch):
    """Read back by hand: the tokens of a sequence are in the files that it names, and no file is named wrongly."""
    monkeypatch.chdir(folder)
    for kind, name in (
        ("packed", "texts/{:02}.txt"),
        ("streamed", "texts/{:02}.txt in block"),
        ("text", "texts/{:02}"),
    ):
        c = configured(folder, kind)
        view = shown(c, make_plan(c), 1)
        for sequence in view.read_sequences(0, view.num_sequences):
            text = view.corpus.decode([t for t in sequence.tensors["tokens"].tolist() if t >= 0])
            spoken = {int(part.split(",")[0]) for part in text.split("text ")[1:] if "," in part[:4]}
            assert sequence.documents and all(
                any(document.startswith(name.format(i)) for document in sequence.documents) for i in spoken
            ), (text, sequence.documents)
            if kind == "packed":
                assert len(sequence.documents) == len(set(sequence.documents))


def test_pairs_and_conversations_are_named_by_their_records(folder, monkeypatch):
    monkeypatch.chdir(folder)
    c = configured(folder, "talks")
    view = shown(c, make_plan(c), 1)
    for sequence in view.read_sequences(0, 2):
        asked = view.corpus.decode([t for t in sequence.tensors["tokens"].tolist() if t >= 0]).split("how many sheep, ")
        numbers = {int(part.split("?")[0]) for part in asked[1:] if "?" in part}
        named = {int(d.rpartition(" ")[2]) - 1 if "document" in d else 0 for d in sequence.documents}
        assert numbers <= named
    c = configured(folder, "pairs")
    for sequence in shown(c, make_plan(c), 1).read_sequences(0, 8):
        text = open_run_corpus(c).decode([t for t in sequence.tensors["source"].tolist() if t >= 0])
        number = int(text.split(" sheep")[0])
        assert sequence.documents == [f"pairs.jsonl, pair {number + 1}" if number else "pairs.jsonl"]


def test_ranks_are_said_in_ranges():
    assert [ranks_in_words(some) for some in ([3], [0, 1, 2, 8], [4, 2])] == ["rank 3", "ranks 0-2,8", "ranks 2,4"]
