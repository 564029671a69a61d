"""Records of conversations in every form that people have: read, or refused with the setting that cures it."""

import csv
import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data.conversations import read_instructions
from platform.data.corpus import open_corpus
from platform.data.data_checks import violations_of_sources
from platform.data.data_files import read_json_array
from tests.data.test_instructions import ALPACA, SHAPE, TALKS, learned

ASK, ANSWER = {"role": "user", "content": "2 and 2?"}, {"role": "assistant", "content": "four"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
CALLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def source(tmp_path):
    """Writes records, each forty times, and gives the source of them."""

    def write(*records, name="r.jsonl", template="chatml", **keys) -> Data:
        if template != "chatml":
            (tmp_path / "t.jinja").write_text(template)
            template = str(tmp_path / "t.jinja")
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records * 40))
        return Data(kind="instructions", path=str(tmp_path / name), field="messages", chat_template=template,
                    packing="best_fit", validation=0, cache=str(tmp_path / "cache"), **keys)  # fmt: skip

    return write


def written(corpus) -> set[str]:
    """The documents, as text."""
    tokens = corpus.parts[0].streams["train"].tokens
    bounds = zip(tokens.starts, [*tokens.starts[1:], len(tokens)], strict=True)
    return {corpus.decode(tokens[np.arange(*each)].tolist()) for each in bounds}


def refusal(data: Data) -> str:
    with pytest.raises(ConfigError) as refused:
        open_corpus(data, **SHAPE)
    [line] = refused.value.violations
    assert line.startswith(f"data.path={data.path}: line 1")
    return line


def test_tools_are_written_or_refused(source):
    """W2b, W2c: neither tools nor calls vanish."""
    calls = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
        ANSWER,
    ]
    record = {"tools": [TOOL], "messages": calls}
    cure = "nearest legal: another data.chat_template or, to leave it out, data.unread="
    assert refusal(source(record)).endswith(f"does not write tools; {cure}[tools]")
    assert refusal(source({"messages": calls})).endswith(f"does not write all tool_calls; {cure}[tool_calls]")
    corpus = open_corpus(source(record, template=CALLING.replace("{{ m.content }}", "{{ m.content or '' }}")), **SHAPE)
    assert {*learned(corpus)} == {'[get_weather {"city": "Rome"}]</>four</>'}
    assert all(text.startswith('[{"type": "function", "function": {"name": "get_weather"') for text in written(corpus))
    silent = open_corpus(source({"tools": [TOOL], "messages": [ASK, ANSWER]}, unread=["tools"]), **SHAPE)
    assert {*learned(silent)} == {"four<|im_end|>\n"}


def test_sharegpt_with_system_tools_and_calls(source):
    """W2a, W2e, D8: its calls are learned, its observations are the tools', and its system is written."""
    talk = [("human", "2 and 2?"), ("function_call", '{"name": "add", "arguments": {"a": 2}}'), ("observation", "4"),
            ("gpt", "four")]  # fmt: skip
    record = {"conversations": [{"from": name, "value": text} for name, text in talk], "system": "Be brief.",
              "tools": json.dumps([{"name": "add", "parameters": {}}])}  # fmt: skip
    corpus = open_corpus(source(record, template=CALLING), **SHAPE)
    assert {*learned(corpus)} == {'[add {"a": 2}]</>four</>'}
    [text] = written(corpus)
    assert text.startswith('[{"type": "function", "function": {"name": "add"') and "<system>Be brief.</><user>" in text
    record["conversations"][0]["from"] = "someone"
    assert "message 0 is from 'someone', which is no role; nearest legal: human, gpt" in refusal(source(record))
    record["conversations"][0:2] = [
        record["conversations"][0] | {"from": "human"},
        {"from": "function_call", "value": "x"},
    ]
    assert "message 1 from function_call is no call" in refusal(source(record))


@pytest.mark.parametrize("off", [{"weight": 0}, {"train": False}])
def test_an_answer_of_no_weight_is_not_learned(source, off):
    """W2d."""
    messages = [ASK, {"role": "assistant", "content": "five"} | off, ASK, ANSWER | {"weight": 1}]
    corpus = open_corpus(source({"messages": messages}), **SHAPE)
    assert {*learned(corpus)} == {"four<|im_end|>\n"} and all("five" in text for text in written(corpus))
    assert "has no answer" in refusal(source({"messages": [ASK, ANSWER | off]}))


REFUSED = {
    "half": ([ASK, ANSWER | {"weight": 0.5}], {}, "message 1 has weight=0.5; nearest legal: 0, 1"),
    "asked": ([ASK | {"train": True}, ANSWER], {}, "only answers are learned; nearest legal: to leave it"),
    "image": ([ASK | {"content": [{"type": "image"}]}, ANSWER], {}, "message 0 has a part of type 'image'"),
    "number": ([ASK | {"content": 4}, ANSWER], {}, "message 0 has content that is no text"),
    "silent": ([ASK, ANSWER | {"content": ""}, ASK, ANSWER], {}, "has an answer without text, message 1"),
    "history": ([ASK, ANSWER], {"history": [["a", "b"]]}, "has a field history, which is not read"),
    "twice": ([{"role": "system", "content": "a"}, ASK, ANSWER], {"system": "b"}, "a field system beside messages"),
    "tools": ([ASK, ANSWER], {"tools": "hammer"}, "has a field tools that is no list of tools"),
    "calls": ([ASK, ANSWER | {"tool_calls": ["x"]}], {}, "message 1 has tool_calls without names"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_dropped_is_refused(source, name):
    messages, fields, reason = REFUSED[name]
    assert reason in refusal(source({"messages": messages, **fields}))


def test_content_in_parts(source):
    """W7, D8: parts of text are a text, with a tokenizer of the corpus too."""
    parts = [{"type": "text", "text": "fo"}, {"type": "text", "text": "ur"}]
    for template in ("chatml", CALLING):
        corpus = open_corpus(source({"messages": [ASK, ANSWER | {"content": parts}]}, template=template), **SHAPE)
        assert all(text.startswith("four<") for text in learned(corpus))
    only = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}</>{% endfor %}"
    only += "{% if add_generation_prompt %}<assistant>{% endif %}"
    assert {*learned(open_corpus(source({"messages": [ASK, ANSWER]}, template=only), **SHAPE))} == {"four</>"}


def test_a_tokenizer_is_not_trained_on_nothing(tmp_path):
    """W7: of a source without a character."""
    (tmp_path / "x.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(ConfigError) as refused:
        open_corpus(Data(kind="text", path=str(tmp_path / "x.jsonl"), cache=str(tmp_path / "cache")), **SHAPE)
    assert "no text in it" in str(refused.value) or "all of them are empty" in str(refused.value)


FORMS = {
    "ShareGPT": ([{"conversations": [{"from": "human", "value": "2 and 2?"}, {"from": "gpt", "value": "four"}]}],
                 "data.field=conversations"),
    "Alpaca": (ALPACA[1:3], "data.field=instruction data.target_field=output data.input_field=input"),
    "prompts and completions": ([{"prompt": "2 and 2?", "completion": "four"}],
                                "data.field=prompt data.target_field=completion"),
    "OpenAI": ([{"messages": [ASK, ANSWER]}], "data.field=messages"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_recognised_and_said_in_one_line(source, form, caplog):
    """D9."""
    records, settings = FORMS[form]
    data = source(*records)
    with caplog.at_level(logging.INFO):
        recognised = open_corpus(replace(data, field="text"), **SHAPE)
    lines = [record.getMessage() for record in caplog.records if "records as" in record.getMessage()]
    assert lines == [f"data.path={data.path}: records as {form} has them: {settings}"]
    named = dict(setting.removeprefix("data.").split("=") for setting in settings.split())
    assert written(recognised) == written(open_corpus(replace(data, **named), **SHAPE))
    if form != "OpenAI":
        [line] = violations_of_sources(replace(data, field="other"), vocab=400)
        assert line.endswith(f"nearest legal: {settings}")


def test_prompts_of_messages_are_not_learned(source):
    record = {"prompt": [ASK, {"role": "assistant", "content": "five"}, ASK], "completion": [ANSWER]}
    assert {*learned(open_corpus(source(record), **SHAPE))} == {"four<|im_end|>\n"}


def test_arrays_and_tables_of_text_hold_the_same_records(source, tmp_path):
    """D7."""
    lines = source(*ALPACA)
    wanted = [instruction.messages for _, instruction in read_instructions([tmp_path / "r.jsonl"], lines)]
    (tmp_path / "a.json").write_text(json.dumps(ALPACA * 40, indent=1))
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, [*ALPACA[0]], delimiter=separator)
            writer.writeheader()
            writer.writerows(ALPACA * 40)
    for name in ("a.json", "a.csv", "a.tsv"):
        data = replace(lines, path=str(tmp_path / name))
        assert [each.messages for _, each in read_instructions([tmp_path / name], data)] == wanted
        assert not violations_of_sources(data, vocab=400)
        assert "are" not in refusal_of_text(replace(data, kind="text", field="output"))


def refusal_of_text(data: Data) -> str:
    """As data=text each is read by data.field, not as prose."""
    assert not violations_of_sources(data, vocab=400)
    [line] = violations_of_sources(replace(data, field="none"), vocab=400)
    return line


GOOD = '{"prompt": "a", "completion": "b"}'
BROKEN = {
    "a.json": {
        '{"messages": []}': "record 1 is no object; a .json file is one array of objects",
        "": "no array of objects",
        f"[{GOOD}": "torn: the end of its array is missing",
        '[{"a": "x': "torn: the end of its array is missing",
        "[1, 2]": "record 1 is no object; a .json file is one array of objects",
        f"[{GOOD} {GOOD}]": "before record 2 there is no comma",
        '[{"messages": [}]}]': "record 1 is not JSON",
        f'[{{"a": {"[" * 100_000}{"]" * 100_000}}}]': "record 1 is ",
        "[] 1": "there is more behind its array",
    },
    "a.csv": {
        "prompt,completion\na,b,c\n": "line 2 ends a row of 3 cells, of 2 columns",
        'prompt,completion\n"a,b\n': "is no row of a table: unexpected end of data",
        "x,y\n1,2\n": "no such column; its columns: x, y",
    },
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_broken_arrays_and_tables_are_refused_in_one_line(source, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        [*read_instructions([tmp_path / name], replace(source(), path=str(tmp_path / name)))]
    [line] = refused.value.violations
    assert line.startswith(f"data.path={tmp_path / name}: ") and BROKEN[name][text] in line and len(line) < 400


def test_an_array_is_read_a_part_at_a_time(source, tmp_path, monkeypatch):
    """Wherever a part ends: in a text, behind a backslash, between records."""
    records = [{"messages": [ASK, ANSWER | {"content": f'{i} \\ "quoted] {{" é'}]} for i in range(30)]
    (tmp_path / "a.json").write_text(json.dumps(records, ensure_ascii=False))
    for part in (1, 2, 7, 100):
        monkeypatch.setattr("platform.data.data_files._CUT", part)
        assert [values for _, values in read_json_array(tmp_path / "a.json", [])] == records


def test_the_day_is_that_of_the_configuration(source):
    """W3: by strftime_now, in a template that asks for it."""
    dated = "{{ strftime_now('%d %B %Y') }}: " + CALLING
    assert refusal(source({"messages": [ASK, ANSWER]}, template=dated)).endswith("nearest legal: data.date=YYYY-MM-DD")
    corpus = open_corpus(source({"messages": [ASK, ANSWER]}, template=dated, date="2026-02-03"), **SHAPE)
    assert all(text.startswith("03 February 2026: <user>") for text in written(corpus))
    [line] = violations_of_sources(source({"messages": [ASK, ANSWER]}, template=dated, date="2026-02-30"), vocab=400)
    assert line == "data.date=2026-02-30: is no day of the calendar"


def test_marks_of_a_template_decide(source):
    """W3: whatever follows from prefixes."""
    marked = CALLING.replace("{{ m.content }}", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
                             "{% endgeneration %}{% else %}{{ m.content }}{% endif %}")  # fmt: skip
    assert {*learned(open_corpus(source({"messages": [ASK, ANSWER]}, template=marked), **SHAPE))} == {"four"}


def test_a_template_that_writes_an_answer_twice_is_refused(source):
    twice = CALLING.replace("{{ m.content }}", "{{ m.content }} {{ m.content }}")
    line = refusal(source({"messages": [ASK, ANSWER]}, template=twice))
    assert line.endswith("message 1 as it is, and once; nearest legal: chatml, or a template with {% generation %}")


def test_entries_of_an_earlier_version_are_read_and_told(source, caplog, monkeypatch):
    """An existing run goes on with the tokens that it began with."""
    data = source({"messages": TALKS[0]})
    monkeypatch.setattr("platform.data.text_sources.KINDS", {})
    from platform.data.source_kind import KINDS

    new = KINDS["instructions"]
    monkeypatch.setitem(KINDS, "instructions", replace(new, rules=0))
    before = open_corpus(data, **SHAPE)
    monkeypatch.setitem(KINDS, "instructions", new)
    with caplog.at_level(logging.INFO):
        assert open_corpus(data, **SHAPE).digest == before.digest
    assert any("an earlier version made these tokens" in record.getMessage() for record in caplog.records)
