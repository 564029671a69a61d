"""Every chat template that trl ships writes as transformers does; its marks are what is learned."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data.chat_templates import ChatTemplate
from platform.data.tokenizer import build_vocabulary, read_chat_template
from platform.data.tokenizer_files import CONFIG, JSON
from tests.data.chat_oracle.talks import DAY, NAMED, TALKS, in_parts, read_kept

TEMPLATES, TOKENIZER, ANSWERS = read_kept()
UNSEEING = "does not write tools; nearest legal: another data.chat_template or, to leave it out, data.unread=[tools]"
UNCALLING = UNSEEING.replace("write tools", "write all tool_calls").replace("=[tools]", "=[tool_calls]")
NO_TOOLS = "deepseek_r1_distill deepseekv3 idefics3 llama3 phi3 phi3_5 qwen2_5_vl smolvlm".split()
REFUSED = {  # which lack what the conversation with tools has; the others are written
    **dict.fromkeys([f"{name}{end}" for name in NO_TOOLS for end in ("", "_training")], UNSEEING),
    **dict.fromkeys(["lfm2", "lfm2_training"], UNCALLING),
}
del REFUSED["deepseekv3"]  # transformers does not render it


def fingerprint(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:12]


@pytest.fixture(scope="module")
def vocabulary():
    named = {f"{role}_token": token for role, token in NAMED.items()}
    return build_vocabulary({JSON: TOKENIZER, CONFIG: json.dumps(named).encode()})


@pytest.fixture(scope="module")
def rendered(vocabulary, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Of each template and conversation that transformers renders: hashes of text and (ids, mask), or the refusal."""
    folder, written = tmp_path_factory.mktemp("templates"), {}
    for name, text in TEMPLATES.items():
        (folder / "t.jinja").write_text(text)
        dated = read_chat_template(Data(chat_template=str(folder / "t.jinja"), date=DAY))
        template, written[name] = ChatTemplate(dated, NAMED, vocabulary.special_tokens), {}
        for talk, answer in ANSWERS[name].items():
            messages, tools = TALKS[talk]
            messages = in_parts(messages) if answer and answer[2] else messages
            if answer:
                try:
                    [(ids, mask)] = vocabulary.encode_parts([template.render_parts(messages, tools)])
                    learned: Any = [[*map(int, ids)], [*map(int, mask)]]
                except ConfigError as error:
                    learned = str(error)
                written[name][talk] = template.render_text(messages, tools), learned
    return written


def test_every_text_is_that_of_transformers(rendered, record_count):
    differing = [
        (name, talk)
        for name, talks in rendered.items()
        for talk, (text, _) in talks.items()
        if fingerprint(text) != ANSWERS[name][talk][0]
    ]
    counts = sum(map(len, rendered.values())), sum(map(len, ANSWERS.values()))
    record_count("texts of trl's chat templates equal to transformers'", *counts)
    assert not differing and counts == (347, 360) and len(rendered) == 72


def test_every_mask_is_that_of_transformers_where_there_are_marks(rendered):
    marked = {name for name, text in TEMPLATES.items() if "endgeneration" in text}
    compared = [
        (learned if isinstance(learned, str) else fingerprint(learned)) == ANSWERS[name][talk][1]
        for name in marked
        for talk, (_, learned) in rendered[name].items()
        if name not in REFUSED or talk != "tools"
    ]
    assert len(marked) == 34 and all(compared) and len(compared) == 155


def test_which_are_refused_and_why(rendered):
    refusals = {
        (name, talk): learned
        for name, talks in rendered.items()
        for talk, (_, learned) in talks.items()
        if isinstance(learned, str)
    }
    assert refusals == {(name, "tools"): f"data.chat_template: {reason}" for name, reason in REFUSED.items()}


def list_learned(parts) -> list[str]:
    """The stretches of a text that are learned."""
    joined = "".join(part if learned else "\0" for part, _, learned in parts)
    return [stretch for stretch in joined.split("\0") if stretch]


LEARNED = {  # without marks, by hand: what follows the prompt, up to the end of the turn
    ("qwen3", "two turns"): ["They are four.<|im_end|>\n", "<think>\n\n</think>\n\nSeven, then.<|im_end|>\n"],
    ("qwen3", "tools"): [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n',
        "<think>\n\n</think>\n\nIt is sunny.<|im_end|>\n",
    ],
    ("qwen3_5_think", "thinking"): [
        "They are four.<|im_end|>\n",
        "Four and three.\n</think>\n\nSeven, then.<|im_end|>\n",
    ],
    ("deepseekv3", "two turns"): ["They are four.<｜end▁of▁sentence｜>", "Seven, then.<｜end▁of▁sentence｜>"],
    ("gptoss", "two turns"): [
        "<|channel|>final<|message|>They are four.<|end|>",
        "<|channel|>final<|message|>Seven, then.<|return|>",
    ],
    ("llama3_2", "system"): ["They are four.<|eot_id|>"],
    ("gemma4", "two turns"): ["They are four.<turn|>\n", "Seven, then.<turn|>\n"],
}


@pytest.mark.parametrize(("name", "talk"), LEARNED)
def test_what_is_learned_by_a_template_without_marks(vocabulary, tmp_path, name, talk):
    (tmp_path / "t.jinja").write_text(TEMPLATES[name])
    dated = read_chat_template(Data(chat_template=str(tmp_path / "t.jinja"), date=DAY))
    parts = ChatTemplate(dated, NAMED, vocabulary.special_tokens).render_parts(*TALKS[talk])
    assert list_learned(parts) == LEARNED[name, talk]


def test_a_mask_without_marks_is_that_of_the_training_template(vocabulary):
    """Where both write one text, but for words that prompt for an answer, which the marks of some include."""
    equal = 0
    for name in ("cohere", "gemma3", "idefics3", "llama3", "phi3", "phi3_5", "qwen2_5_vl", "qwen3_vl", "smolvlm"):
        for talk in ("one turn", "two turns", "system"):
            messages = in_parts(TALKS[talk][0]) if ANSWERS[name][talk][2] else TALKS[talk][0]
            texts = (TEMPLATES[name], TEMPLATES[f"{name}_training"])
            both = [ChatTemplate(text, NAMED, vocabulary.special_tokens).render_parts(messages) for text in texts]
            if "".join(part for part, *_ in both[0]) == "".join(part for part, *_ in both[1]):
                assert list_learned(both[0]) == list_learned(both[1]), (name, talk)
                equal += 1
    assert equal > 20
