"""Tokenizers of others in each of their forms: ids and special tokens as transformers has them, or a refusal in one
line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data.tokenizer import build_vocabulary, load_named_vocabulary, open_vocabulary, train_tokenizer
from platform.data.tokenizer_files import read_tokenizer_files
from tests.data.tokenizers.texts import sources, texts
from tests.harness.peers import peer

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"__type": "AddedToken", "content": "</s>"},
          "bos_token": "<s>", "pad_token": None}  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(sources(0, 6), 400)


@pytest.fixture
def folder(tmp_path, trained):
    """A byte-level BPE with a token that begins documents, and one that ends them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding()
    root = tmp_path / "theirs"
    root.mkdir()
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return root


def test_a_folder_of_transformers(folder):
    theirs = peer("transformers").AutoTokenizer.from_pretrained(folder)
    theirs.save_pretrained(folder)
    ours = build_vocabulary(read_tokenizer_files(str(folder)))
    assert len(theirs) == ours.size == 402
    assert (ours.special.begin, ours.special.end) == (theirs.bos_token_id, theirs.eos_token_id) == (400, 401)
    assert ours.special.front == (401, 400) and ours.special.start == 400
    for text in texts():  # what is truncated and padded there is not
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False, truncation=False, padding=False).input_ids or "<" in text
        assert ours.decode(ids) == text and not {*ids} & {0, 400, 401}


def test_files_of_merges(tmp_path, trained):
    """As GPT-2's first ones, without tokenizer.json."""
    trained.model.save(str(tmp_path))
    files = read_tokenizer_files(str(tmp_path))
    assert {*files} == {"vocab.json", "merges.txt", "tokenizer.json"}
    ours = build_vocabulary(files)
    assert [ours.encode(text) for text in texts()] == [trained.encode(text).ids for text in texts()]
    assert ours.special.front == (0,)


@pytest.mark.parametrize("lower", [True, False])
def test_word_pieces(tmp_path, lower):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(sources(0, 3), trainer)
    tokenizer.model.save(str(tmp_path))
    config = {"do_lower_case": lower, "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = build_vocabulary(read_tokenizer_files(str(tmp_path)))
    theirs = peer("transformers").BertTokenizer.from_pretrained(str(tmp_path), do_lower_case=lower)
    for text in texts():
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids, text
    assert (ours.special.front, ours.special.mask) == ((3, 2), 4)


def test_added_tokens_have_their_ids(tmp_path, trained):
    trained.model.save(str(tmp_path))
    added = {str(400 + i): {"content": f"<extra_id_{4 - i}>", "special": True} for i in range(5)}
    config = {"eos_token": "<|endoftext|>", "pad_token": "<extra_id_4>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    special = build_vocabulary(read_tokenizer_files(str(tmp_path))).special
    assert (special.sentinel, special.sentinels, special.start, special.end) == (404, 5, 400, 0)
    config["added_tokens_decoder"]["500"] = {"content": "<far>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'<far>' has the id 500, which leaves a gap"):
        read_tokenizer_files(str(tmp_path))


def test_what_the_keys_add(folder, tmp_path):
    """Special tokens, which ends documents, a chat template: all of it is in the files then."""
    data = Data(tokenizer=str(folder), special_tokens=["<tool>", "<s>"], end_token="<tool>", chat_template="chatml")
    files = load_named_vocabulary(data).files
    assert files and json.loads(files["tokenizer_config.json"]) == {**CONFIG, "eos_token": "<tool>"}
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    ours = open_vocabulary(tmp_path)
    assert ours.special_tokens == ["<|endoftext|>", "<s>", "</s>", "<tool>", "<|im_start|>", "<|im_end|>"]
    assert ours.special.front == (402, 400) and ours.pretrained
    assert ours.chat.render_text([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n"
    plain = load_named_vocabulary(Data(tokenizer=str(folder))).files
    assert plain == {path.name: path.read_bytes() for path in folder.iterdir()}  # as they are, byte by byte


def test_a_tokenizer_that_says_nothing_of_special_tokens(folder):
    (folder / "tokenizer_config.json").unlink()
    files = load_named_vocabulary(Data(tokenizer=str(folder / "tokenizer.json"))).files
    assert files and json.loads(files["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"
    assert build_vocabulary(files).special.front == (0, 400)


BAD = {
    "no file": (lambda root: root / "nowhere", "no such file or folder"),
    "an empty folder": (lambda root: _made(root / "empty"), "holds no tokenizer: none of tokenizer.json"),
    "a file of several": (lambda root: _made(root / "one", "vocab.txt", b"a\nb\n") / "vocab.txt", "name their folder"),
    "no JSON": (lambda root: _made(root / "bad", "tokenizer.json", b"{"), "EOF"),
    "another JSON": (lambda root: _made(root / "bad", "tokenizer.json", b'{"model": 1}'), ""),
    "no UTF-8": (lambda root: _made(root / "bad", "tokenizer.json", b"{\xff"), "tokenizer.json is no UTF-8"),
    "a model that is none": (lambda root: _made(root / "bad", "tokenizer.model", b"hello"), "sentencepiece"),
    "a storage that is none": (lambda root: "nowhere://bucket/tokenizer", "no storage is known by nowhere"),
    "merges that are none": (lambda root: _merges(root, b'{"a": 0}', b"a b c\n"), "a line is no pair of tokens"),
    "merges of nothing": (lambda root: _merges(root, b'{"a": 0}', b"a b\n"), ""),
    "ids that are none": (lambda root: _merges(root, b'{"a": -1}', b""), "holds more than tokens and their ids"),
}  # fmt: skip


def _made(root: Path, name: str = "", raw: bytes = b"") -> Path:
    root.mkdir(exist_ok=True)
    if name:
        (root / name).write_bytes(raw)
    return root


def _merges(root: Path, vocab: bytes, merges: bytes) -> Path:
    return _made(_made(root / "bad", "vocab.json", vocab), "merges.txt", merges)


@pytest.mark.parametrize("case", BAD)
def test_what_is_none_is_refused(tmp_path, case):
    where, reason = BAD[case]
    source = str(where(tmp_path))
    with pytest.raises(ConfigError) as error:
        load_named_vocabulary(Data(tokenizer=source))
    (line,) = error.value.violations
    assert line.startswith(f"data.tokenizer={source}: ") and reason in line and "train" in line and "\n" not in line


def test_keys_that_name_no_token(folder):
    data = Data(tokenizer=str(folder), end_token="<nowhere>")
    with pytest.raises(ConfigError, match="has no token '<nowhere>'"):
        load_named_vocabulary(data)
    (folder / "tokenizer_config.json").unlink()
    text = (folder / "tokenizer.json").read_text()
    for name in ("endoftext", "<s>", "</s>"):
        text = text.replace(name, name.replace("s", "z").replace("end", "zzz"))
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="names no token that ends documents; data.end_token=TOKEN does"):
        load_named_vocabulary(replace(data, end_token=""))
    assert load_named_vocabulary(replace(data, end_token="<z>"))
