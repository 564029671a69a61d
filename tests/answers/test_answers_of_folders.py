"""Folders of transformers that answer by command: a T5 as transformers itself, conversations as their template says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from platform.data.chat_templates import CHATML
from platform.data.tokenizer import train_tokenizer
from platform.evaluate import main as evaluate
from platform.generate import main as generate
from tests.data.tokenizers.texts import sources
from tests.weights import peer
from tests.weights.written import written

VOCAB, TOKENS = 320, 8


def save_tokenizer(folder: Path, added: list[str], said: dict[str, str]) -> Tokenizer:
    """A tokenizer of bytes and a few pairs, with special tokens in front, and what tokenizer_config.json says of it."""
    tokenizer = Tokenizer.from_str(train_tokenizer(sources(0, 2), VOCAB - len(added)).to_str())
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **said}))
    return tokenizer


def answers(folder: Path, *arguments: str, prompts: list[dict] | None = None) -> list[dict]:
    """What the command says to prompts."""
    asked, out = folder.parent / "asked.jsonl", folder.parent / "out.jsonl"
    asked.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts or []))
    out.unlink(missing_ok=True)
    asking = ["--prompts", str(asked)] if prompts else []
    assert generate([str(folder), *asking, "--out", str(out), "--tokens", str(TOKENS), *arguments]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("t5", []),
        pytest.param("t5, 1.1", ["tensor=1d", "tensor.axes.t=2", "cluster.device=cpu"], marks=pytest.mark.full),
    ],
)
def test_a_t5_answers_as_transformers_does(tmp_path, name, plan):
    """Sources of several lengths at once, texts and ids; greedy, up to what ends a text."""
    model = peer.build(name, vocab_size=VOCAB)
    model.save_pretrained(folder := tmp_path / "hf")
    tokenizer = save_tokenizer(folder, ["<pad>", "</s>"], {"eos_token": "</s>", "pad_token": "<pad>"})
    start, end = tokenizer.token_to_id("<pad>"), tokenizer.token_to_id("</s>")
    texts = ["the quick brown fox", "a", "and back over the lazy dog, which jumps"]
    prompts = [*({"prompt": text} for text in texts), {"ids": [5, 9, 200, 3, end]}, {"ids": [7]}]
    read = [
        *([*tokenizer.encode(text).ids, end] for text in texts),
        *(line["ids"] for line in prompts if "ids" in line),
    ]
    how = {"max_new_tokens": TOKENS, "do_sample": False, "num_beams": 1, "decoder_start_token_id": start,
           "eos_token_id": end, "pad_token_id": start}  # fmt: skip
    lines = answers(folder, *plan, prompts=prompts)
    assert len({i for line in lines for i in line["answer_ids"]}) > 3, "the weights make the likeliest token change"
    for ids, line in zip(read, lines, strict=True):
        theirs = model.generate(torch.tensor([ids]), **how)[0, 1:].tolist()
        assert line["answer_ids"] == [i for i in theirs if i != end] and line["ended"] == (end in theirs)
        assert line["answer"] == tokenizer.decode(line["answer_ids"], skip_special_tokens=False)


@pytest.fixture
def talker(tmp_path) -> tuple[Path, Tokenizer]:
    """A random Llama whose tokenizer has a template of conversations."""
    folder = written(tmp_path / "hf", "llama", ours={"vocab": VOCAB, "length": 96})
    added = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    return folder, save_tokenizer(folder, added, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML})


def by_hand(words: Tokenizer, turns: list[tuple[str, str]]) -> list[int]:
    """ChatML as ids: special tokens of the template are tokens, those that a message spells are text."""
    start, end = words.token_to_id("<|im_start|>"), words.token_to_id("<|im_end|>")
    words.encode_special_tokens = True  # in what is encoded from here on they are spelled
    text = lambda s: words.encode(s, add_special_tokens=False).ids  # noqa: E731
    ids = [i for role, said in turns for i in (start, *text(f"{role}\n{said}"), end, *text("\n"))]
    return [*ids, start, *text("assistant\n")]


def test_a_message_is_asked_in_the_template(talker):
    folder, tokenizer = talker
    said = "go <|im_end|> on"
    naive = tokenizer.encode(
        f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    ).ids
    [chat] = answers(folder, said, "--chat")
    [ids] = answers(folder, prompts=[{"ids": by_hand(tokenizer, [("user", said)])}])
    [plain] = answers(folder, said)
    assert chat["answer_ids"] == ids["answer_ids"] != plain["answer_ids"] and chat["answer"] == ids["answer"]
    assert len(set(chat["answer_ids"])) > 1 and naive != by_hand(tokenizer, [("user", said)])


def test_a_conversation_from_a_file(talker):
    folder, tokenizer = talker
    turns = [("system", "be brief"), ("user", "who?"), ("assistant", "me"), ("user", "why?")]
    prompts = [{"messages": [{"role": role, "content": said} for role, said in turns]}, {"prompt": "why?"}]
    lines = answers(folder, "--chat", prompts=prompts)
    wanted = answers(folder, prompts=[{"ids": by_hand(tokenizer, turns)}, {"ids": by_hand(tokenizer, turns[-1:])}])
    assert [line["answer_ids"] for line in lines] == [line["answer_ids"] for line in wanted]
    assert lines[0]["answer_ids"] != lines[1]["answer_ids"] and lines[0]["messages"] == prompts[0]["messages"]


def test_a_bert_whose_tokenizer_hides_nothing(tmp_path, capsys):
    """The refusal names the model and the cause, and its hint leads to a number; so does a token for what is hidden."""
    folder = written(tmp_path / "hf", "bert", ours={"vocab": VOCAB})
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    read = ["data=text", f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "--samples", "2"]
    save_tokenizer(folder, ["[SEP]"], {"sep_token": "[SEP]"})
    assert evaluate([str(folder), *read]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"evaluate: data.tokenizer={folder}: has {VOCAB} tokens, and the model has model.vocab={VOCAB};"
    )
    assert "like [MASK]" in line
    assert line.endswith(f"nearest legal: model.vocab={VOCAB + 1}")
    assert evaluate([str(folder), *read, f"model.vocab={VOCAB + 1}"]) == 0
    save_tokenizer(folder, ["[SEP]", "[MASK]"], {"sep_token": "[SEP]", "mask_token": "[MASK]"})
    assert evaluate([str(folder), *read]) == 0


def test_a_folder_without_a_tokenizer_is_measured_on_tokens(tmp_path, capsys):
    """Though it has a file beside it, which is no tokenizer's: text is refused by the right name, random tokens are
    read."""
    folder = written(tmp_path / "hf", "gpt2")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert evaluate([str(folder), "data=stdlib", "--samples", "2"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("evaluate: data.tokenizer=: there is none beside the model")
    assert evaluate([str(folder), "data=synthetic"]) == 2, "it measured on without an end"
    assert capsys.readouterr().err == "evaluate: --samples=0: data=synthetic has no end; nearest legal: 64\n"
    assert evaluate([str(folder), "data=synthetic", "--samples", "2"]) == 0
