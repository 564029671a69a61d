"""Instruction data: conversations as their template writes them, of which only the answers are learned."""

import json
from dataclasses import replace

import numpy as np
import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config, Data
from platform.config.identity import run_identity
from platform.data.corpus import open_corpus
from platform.data.data_checks import violations_of_sources

TALKS = [
    [
        {"role": "system", "content": "You count sheep."},
        {"role": "user", "content": f"How many are {i} and {i}?"},
        {"role": "assistant", "content": f"They are {2 * i}: baa <|im_end|>"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": f"That was number {i} é"},
    ]
    for i in range(40)
]
SHAPE = {"length": 64, "vocab": 400, "seed": 0}


@pytest.fixture
def talks(tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    return Data(kind="instructions", path=str(tmp_path / "t.jsonl"), field="messages", chat_template="chatml",
                packing="best_fit", cache=str(tmp_path / "cache"))  # fmt: skip


def pair(tmp_path, **more):
    rows = [{"prompt": f"{i} and {i}?", "response": f"are {2 * i}"} for i in range(40)] + [
        {"prompt": "?", "response": " "}
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(kind="instructions", path=str(tmp_path / "p.jsonl"), field="prompt", target_field="response",
                cache=str(tmp_path / "cache"), **more)  # fmt: skip


def learned(corpus, split="train") -> list[str]:
    """What is learned of each document, in the order of the stream."""
    stream = corpus.parts[0].streams[split].tokens
    texts = []
    for start, end in zip(stream.starts, [*stream.starts[1:], len(stream)], strict=True):
        place = np.arange(start, end)
        texts.append(corpus.decode(stream[place[stream.learned[place]]].tolist()))
    return texts


@pytest.mark.parametrize("apart", [True, False])
def test_samples_that_teach_nothing_are_not_cut(tmp_path, apart):
    """Exactly those that the objective gives no label."""
    talks = [[{"role": "user", "content": "word " * n}, {"role": "assistant", "content": "yes"}] for n in range(60)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    data = Data(kind="instructions", path=str(tmp_path / "t.jsonl"), field="messages", chat_template="chatml",
                validation=0.2, document_mask=apart, cache=str(tmp_path / "cache"))  # fmt: skip
    corpus = open_corpus(data, length=24, vocab=320, seed=0)
    for split, stream in corpus.parts[0].streams.items():
        every = np.arange(corpus.objective.samples(stream))
        taught = [i for i in every if corpus.objective.predicted(stream, every[i : i + 1])]
        assert 0 < len(taught) < len(every) and corpus.count_samples(split) == len(taught)
        places = [index for *_, index in corpus.locate_samples(split, np.arange(len(taught)))]
        assert sorted(np.concatenate(places)) == taught
    again = open_corpus(data, length=24, vocab=320, seed=0, entry=corpus.entry)
    assert again.digest == corpus.digest and np.array_equal(again.batch("train", 0, 9)["labels"],
                                                            corpus.batch("train", 0, 9)["labels"])  # fmt: skip


@pytest.mark.parametrize("overlong", ["split", "cut"])
def test_no_step_is_without_a_label(tmp_path, overlong, caplog):
    """Half of the documents are longer than a row, and only the ends of those have an answer."""
    caplog.set_level("INFO")
    long, short = (
        [{"role": "user", "content": asked}, {"role": "assistant", "content": "yes"}] for asked in ("word " * 200, "hi")
    )
    lines = [json.dumps({"messages": talk}) + "\n" for talk in [long] * 20 + [short] * 20]
    (tmp_path / "t.jsonl").write_text("".join(lines))
    data = Data(kind="instructions", path=str(tmp_path / "t.jsonl"), field="messages", chat_template="chatml",
                packing="best_fit", overlong=overlong, validation=0, cache=str(tmp_path / "cache"))  # fmt: skip
    corpus = open_corpus(data, length=32, vocab=320, seed=0)
    assert all(corpus.predicted("train", i, i + 1) for i in range(3 * corpus.sample_counts["train"]))
    assert "rows teach nothing and are left out" in caplog.text
    assert corpus.digest != corpus.entry.name and "train: 20 of 40 documents are longer than a row" in caplog.text
    again = open_corpus(data, length=32, vocab=320, seed=0, entry=corpus.entry)
    assert (again.digest, again.sample_counts) == (corpus.digest, corpus.sample_counts)


def test_only_answers_are_learned(talks):
    corpus = open_corpus(replace(talks, validation=0.1), **SHAPE)
    answers = ["".join(f"{m['content']}<|im_end|>\n" for m in talk if m["role"] == "assistant") for talk in TALKS]
    assert sorted(learned(corpus) + learned(corpus, "validation")) == sorted(answers)
    batch = corpus.batch("train", 0, corpus.sample_counts["train"])
    texts = [corpus.decode(row[row >= 0].tolist()) for row in batch["labels"]]
    assert "How" not in "".join(texts) and sum(text.count("baa") for text in texts) == len(learned(corpus))
    for row, labels in zip(batch["tokens"], batch["labels"], strict=True):  # a label is the token behind it
        assert all(label == row[i + 1] for i, label in enumerate(labels[:-1]) if label >= 0 and row[i + 1] >= 0)
    assert corpus.predicted("train", 0, 3) == (batch["labels"][:3] >= 0).sum()


def test_the_text_is_the_templates(talks):
    """The document is what the template writes, in its special tokens; a message that spells one gets none."""
    corpus = open_corpus(talks, **SHAPE)
    stream = corpus.parts[0].streams["train"].tokens
    ids = stream[np.arange(stream.starts[0], stream.starts[1])].tolist()
    number = int(corpus.decode(ids).partition("How many are ")[2].partition(" ")[0])
    assert corpus.decode(ids) == corpus.vocabulary.chat.render_text(TALKS[number])
    end = corpus.vocabulary.tokenizer.token_to_id("<|im_end|>")
    assert ids.count(end) == len(TALKS[0]) and corpus.decode(ids).count("<|im_end|>") == len(TALKS[0]) + 1


def test_prompts_and_answers_without_a_template(tmp_path):
    corpus = open_corpus(pair(tmp_path, validation=0), **SHAPE)
    stream = corpus.parts[0].streams["train"]
    first = stream[np.arange(stream.starts[1])].tolist()
    assert first[0] == first[-1] == 0 and corpus.decode(first).startswith("<|endoftext|>0 and 0?are 0")
    learnt = corpus.decode(stream[np.nonzero(stream.learned)[0]].tolist())
    assert learnt == "".join(f"are {2 * i}<|endoftext|>" for i in range(40)) and len(stream.starts) == 40


def test_prompts_and_answers_by_a_template(tmp_path):
    corpus = open_corpus(pair(tmp_path, chat_template="chatml", validation=0), **SHAPE)
    stream = corpus.parts[0].streams["train"]
    assert corpus.decode(stream[np.arange(stream.starts[1])].tolist()) == (
        "<|im_start|>user\n0 and 0?<|im_end|>\n<|im_start|>assistant\nare 0<|im_end|>\n"
    )


def test_a_cut_stream_learns_no_prompt(talks):
    corpus = open_corpus(replace(talks, packing="cut"), **SHAPE)
    batch = corpus.batch("train", 0, corpus.sample_counts["train"])
    assert "How" not in corpus.decode(batch["labels"][batch["labels"] >= 0].tolist())
    assert "How" in corpus.decode(batch["tokens"].reshape(-1).tolist())


WRONG = {
    "no_field": ({"text": "a"}, "line 2 has no messages in data.field=messages"),
    "no_answer": ({"messages": TALKS[0][:2]}, "line 2 has no answer: no message with role assistant"),
    "no_role": ({"messages": [{"content": "a"}]}, "line 2 has no messages"),
    "empty": ({"messages": []}, "line 2 has no messages"),
    "refused": (
        {"messages": TALKS[0][1:3] * 2 + TALKS[0][1:2] * 2 + TALKS[0][2:3]},
        "line 2: data.chat_template: refuses",
    ),
}
STRICT = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}" \
         "{% endif %}{{ m.content }}{% endfor %}"  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_records_are_refused_with_their_line(talks, tmp_path, name):
    record, reason = WRONG[name]
    (tmp_path / "strict").write_text(STRICT)
    lines = [json.dumps({"messages": TALKS[0][1:3]}), json.dumps(record)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as error:
        open_corpus(replace(talks, chat_template=str(tmp_path / "strict")), **SHAPE)
    assert "t.jsonl: " in str(error.value) and reason in str(error.value) and "\n" not in str(error.value)
    assert not [*(tmp_path / "cache").glob("*")] if (tmp_path / "cache").exists() else True


def test_what_shows_at_once(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    data = Data(kind="instructions", path=str(tmp_path / "a.txt"), field="messages")
    assert "no file of records" in violations_of_sources(data)[0]
    assert "needs a file of records" in violations_of_sources(replace(data, path=""))[0]
    (tmp_path / "a.jsonl").write_text('{"a": 1}')
    [line] = violations_of_sources(replace(data, path=str(tmp_path / "a.jsonl")))
    assert "line 1 has no messages" in line and "its fields: a" in line


def test_damaged_entries_are_made_again(talks):
    """Each file of it, and of its rows, is verified when a run opens it."""
    corpus = open_corpus(talks, **SHAPE)
    wanted = corpus.batch("train", 0, 6)
    files = sorted(file for file in corpus.entry.parent.glob("*/*") if file.is_file())
    names = ("learned.bin", "starts.bin", "tokens.bin", "tokenizer.json", "meta.json", "train_rows.bin")
    assert {file.name for file in files} >= set(names)
    for file in files:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        batch = open_corpus(talks, **SHAPE).batch("train", 0, 6)
        assert all(np.array_equal(batch[name], rows) for name, rows in wanted.items()), file.name
        assert file.read_bytes() != raw, file.name


SILENT = {"words": "x y z x y z", "names": "{% for m in messages %}{{ m['role'] }} {% endfor %}", "blank": "{{ x }}",
          "questions": "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}",
          "ends": "{% for m in messages %}<end>{% endfor %}"}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_a_template_that_writes_no_answer_is_refused(talks, tmp_path, name):
    (tmp_path / "k.jinja").write_text(SILENT[name])
    with pytest.raises(ConfigError, match="t.jsonl: line 1: ") as refused:
        open_corpus(replace(talks, chat_template=str(tmp_path / "k.jinja")), **SHAPE)
    assert "data.chat_template: does not write the text of message 2 as it is, and once" in str(refused.value)
    assert not [*tmp_path.glob("cache/*")]


def test_a_blank_answer_among_others_is_none(talks, tmp_path):
    blank = [{"role": "user", "content": "?"}, {"role": "assistant", "content": " \n"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in [*TALKS, blank]))
    with pytest.raises(ConfigError, match="line 41 has no answer"):
        open_corpus(talks, **SHAPE)


def test_a_split_that_teaches_nothing_is_refused(talks, tmp_path, monkeypatch):
    """Whatever made its tokens."""
    corpus = open_corpus(replace(talks, validation=0.1), **SHAPE)
    assert corpus.predicted("train", 0, 4) and corpus.describe_sample("train", 0).startswith("sample ")
    monkeypatch.setattr("platform.data.objectives.token_loss_mask", lambda stream: np.zeros(len(stream), bool))
    with pytest.raises(ConfigError) as refused:
        open_corpus(replace(talks, validation=0.1), **SHAPE)
    assert len(refused.value.violations) == 2
    assert all("none has a label that counts: nothing would be learned" in line for line in refused.value.violations)


def rows_at(tmp_path, rows, **keys):
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(kind="instructions", path=str(tmp_path / "r.jsonl"), packing="best_fit", cache=str(tmp_path / "cache"),
                chat_template="chatml", **keys)  # fmt: skip


def written(corpus) -> set[str]:
    """The documents of both splits, as text."""
    documents = set()
    for stream in corpus.parts[0].streams.values():
        tokens = stream.tokens
        for start, end in zip(tokens.starts, [*tokens.starts[1:], len(tokens)], strict=True):
            documents.add(corpus.decode(tokens[np.arange(start, end)].tolist()))
    return documents


def test_conversations_of_sharegpt(talks, tmp_path):
    roles = {"system": "system", "user": "human", "assistant": "gpt"}
    rows = [{"conversations": [{"from": roles[m["role"]], "value": m["content"]} for m in talk]} for talk in TALKS]
    corpus = open_corpus(rows_at(tmp_path, rows, field="conversations"), **SHAPE)
    assert written(corpus) == written(open_corpus(talks, **SHAPE))
    assert sorted(learned(corpus)) == sorted(learned(open_corpus(talks, **SHAPE)))


ALPACA = [
    {"instruction": f"Add {i}.", "input": f"To {i}." if i % 2 else "", "output": f"It is {2 * i}."} for i in range(40)
]
PAIR = {"field": "instruction", "target_field": "output"}


def test_records_of_alpaca(tmp_path):
    data = rows_at(tmp_path, ALPACA, input_field="input", **PAIR)
    texts = written(open_corpus(data, **SHAPE))
    assert any("user\nAdd 3.\nTo 3.<|im_end|>" in text for text in texts)
    assert any("user\nAdd 2.<|im_end|>" in text for text in texts)
    without = open_corpus(replace(data, input_field="none"), **SHAPE)
    assert not any("To " in text for text in written(without)) and without.entry != open_corpus(data, **SHAPE).entry


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_an_input_that_nothing_reads_is_refused(tmp_path, ending):
    data = rows_at(tmp_path, ALPACA[1:], **PAIR)
    if ending == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(ALPACA[1:]), tmp_path / "r.parquet")
        data = replace(data, path=str(tmp_path / "r.parquet"))
    [line] = violations_of_sources(data, vocab=400)
    assert "1 has text in field input too" in line
    assert line.endswith("nearest legal: data.input_field=input or, to leave it out, data.input_field=none")
    for value in ("input", "none"):
        assert not violations_of_sources(replace(data, input_field=value), vocab=400)


def test_unread_input_is_the_same_run_as_before():
    before, config = run_identity(Config()), Config()
    config.data.input_field = "none"
    assert run_identity(config) == before
    config.data.input_field = "input"
    assert run_identity(config) != before


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("overlong", ["split", "cut", "drop"])
def test_what_becomes_of_a_conversation_that_is_longer_than_a_row(tmp_path, overlong, streaming):
    talk = [{"role": "user", "content": "Count."}]
    rows = [{"messages": [*talk, {"role": "assistant", "content": "one two three " * (8 if i == 3 else 1)}]}
            for i in range(30)]  # fmt: skip
    data = rows_at(tmp_path, rows, field="messages", overlong=overlong, validation=0, streaming=streaming)
    corpus = open_corpus(data, length=40, vocab=300, seed=0)
    stream = corpus.parts[0].stream_or_first_block("train")
    sizes = np.diff([*stream.tokens.starts, len(stream)])
    longer = int((sizes > 40).sum())
    kept = {"split": sizes.sum(), "cut": np.minimum(sizes, 40).sum(), "drop": sizes[sizes <= 40].sum()}[overlong]
    assert longer == 1 and stream.pieces[:, 1].sum() == kept
    batch = corpus.batch("train", 0, corpus.sample_counts["train"])
    assert (batch["tokens"] >= 0).sum() == kept
    if not streaming:
        again = open_corpus(data, length=40, vocab=300, seed=0, entry=corpus.entry)
        assert np.array_equal(again.batch("train", 0, 3)["tokens"], corpus.batch("train", 0, 3)["tokens"])


def test_a_corpus_whose_documents_are_all_dropped_is_refused(talks):
    with pytest.raises(ConfigError, match="model.length=8: a sample is"):
        open_corpus(replace(talks, overlong="drop"), length=8, vocab=400, seed=0)
