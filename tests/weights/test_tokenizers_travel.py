"""A tokenizer goes along with its model: from a folder of transformers into runs and checkpoints, and out again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from platform.boundary.refusals import ConfigError
from platform.cluster.asked_model import find_end_ids
from platform.cluster.session import find_trained_model
from platform.data.tokenizer import open_vocabulary, train_tokenizer
from platform.generate import main as write_answers
from platform.launch import compose_config
from platform.weights.__main__ import main
from platform.weights.model_folder import build_vocabulary_if_readable
from tests.data.tokenizers.texts import sources
from tests.harness.commands import QUICK
from tests.weights.test_start import trained
from tests.weights.written import written

VOCAB = 320
TEXT = "the quick brown fox jumps over the lazy dog </s> and back\n"
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "note": "kept"}
NAMES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture
def model(tmp_path) -> Path:
    """A Llama with the files of its tokenizer."""
    folder = written(tmp_path / "hf", "llama", ours={"vocab": VOCAB})
    tokenizer = Tokenizer.from_str(train_tokenizer(sources(0, 2), VOCAB - 2).to_str())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    return folder


@pytest.fixture
def text(tmp_path) -> list[str]:
    root = tmp_path / "texts"
    root.mkdir()
    for i in range(8):
        (root / f"{i}.txt").write_text(f"document {i}\n" + TEXT * 40)
    return ["data=text", f"data.path={root}", f"data.cache={tmp_path / 'cache'}"]


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NAMES if (folder / name).exists()}


def test_a_run_reads_the_tokens_of_its_model(tmp_path, model, text):
    trained(tmp_path, "model=from_hf", f"model.source={model}", *text, "train.stop_at=2")
    (entry,) = (tmp_path / "cache").iterdir()
    ours, theirs = open_vocabulary(entry), Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens = np.fromfile(entry / "tokens.bin", "<u2")
    begin, end = (theirs.token_to_id(token) for token in ("<s>", "</s>"))
    assert tokens[:2].tolist() == [end, begin] and (tokens == begin).sum() == (tokens == end).sum() == 8
    theirs.encode_special_tokens = True
    first = ours.decode(tokens[2 : np.nonzero(tokens == end)[0][1]])
    assert first in {path.read_text() for path in (tmp_path / "texts").iterdir()}  # with "</s>" as text
    assert main(["export", str(tmp_path / "run" / "checkpoints"), str(tmp_path / "out")]) == 0
    assert files(tmp_path / "out") == files(model)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (begin, end)


def test_in_and_out_again_is_equal_in_every_byte(tmp_path, model, capsys):
    assert main(["import", str(model), str(tmp_path / "storage")]) == 0
    assert main(["export", str(tmp_path / "storage"), str(tmp_path / "out")]) == 0
    assert files(tmp_path / "out") == files(model) and "without a tokenizer" not in capsys.readouterr().out
    (checkpoint,) = (tmp_path / "storage").glob("step-*")
    (checkpoint / "tokenizer.json").write_bytes(b"{}")
    assert main(["export", str(tmp_path / "storage"), str(tmp_path / "again")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("/tokenizer.json is not what was written") and not (tmp_path / "again").exists()


@pytest.mark.full
def test_a_trained_tokenizer_travels_with_what_was_added(tmp_path, text):
    model = "model.layers=1 model.d_model=32 model.length=16 model.vocab=320 model.activation=gelu_tanh".split()
    added = ["data.special_tokens=[<tool>]", "data.chat_template=chatml"]
    trained(tmp_path, *model, *text, *added, "train.stop_at=2")
    assert main(["export", str(tmp_path / "run" / "checkpoints"), str(tmp_path / "out")]) == 0
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 16 and settings["eos_token"] == "<|endoftext|>"
    vocabulary = open_vocabulary(tmp_path / "out")
    assert vocabulary.special_tokens == ["<|endoftext|>", "<tool>", "<|im_start|>", "<|im_end|>"]
    assert vocabulary.chat.render_text([{"role": "user", "content": "hi"}]).startswith("<|im_start|>user")
    again = trained(tmp_path, *model, *text, *added, "train.stop_at=4")
    assert "continues after step 2" in again
    refused = trained(tmp_path, *model, *text, added[1], "resume.allow=[data]", "train.steps=6", status=2)
    assert "data.special_tokens" in refused


def test_what_does_not_fit_is_refused(tmp_path, model, text):
    source = ["model=from_hf", f"model.source={model}"]
    (line,) = _refused(tmp_path, *source, *text, "model.vocab=300", "train.init=random")
    assert f"data.tokenizer={model}: has {VOCAB} tokens, and the model has model.vocab=300" in line
    (line,) = _refused(tmp_path, *source, *text, "data.special_tokens=[<one more>]")
    assert "has 321 tokens" in line and "model.vocab=321" in line
    for name in NAMES[:2]:
        (model / name).unlink()
    (line,) = _refused(tmp_path, *source, *text)
    assert f"data.tokenizer=: there is none beside the model in {model}" in line and "data.tokenizer=train" in line
    (line,) = _refused(tmp_path, *text, "data.end_token=</s>")
    assert line.startswith("data.end_token=</s>: says something of a tokenizer that data.tokenizer names")
    trained(tmp_path, *source, *text, "data.tokenizer=train", "train.stop_at=1")


def _refused(cwd: Path, *arguments: str) -> list[str]:
    printed = trained(cwd, *arguments, status=2)
    assert not (cwd / "run").exists()
    return [line.removeprefix("config: ") for line in printed.splitlines() if "data." in line]


def test_a_tokenizer_that_is_not_the_model_s(tmp_path, model, text):
    """Another one, given or trained, is refused wherever text is read, unless it is meant."""
    other = tmp_path / "other.json"
    tokenizer = Tokenizer.from_str(train_tokenizer(["another language altogether, zyxwv " * 50], 300).to_str())
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(other))
    source = ["model=from_hf", f"model.source={model}", *text]
    for override in (f"data.tokenizer={other}", "data.tokenizer=train"):
        (line,) = _refused(tmp_path, *source, override)
        assert "is not that of the weights in" in line and f"nearest legal: data.tokenizer={model}, " in line
        assert line.endswith("data.foreign_tokenizer=true") and line.startswith(override)
    assert write_answers([str(model), "the", "--tokens", "2", f"data.tokenizer={other}"]) == 2
    trained(tmp_path, *source, f"data.tokenizer={other}", "data.foreign_tokenizer=true", "train.stop_at=2")
    assert "continues after step 2" in trained(tmp_path, *source, f"data.tokenizer={other}", "train.stop_at=3")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert not [*checkpoints.glob("*/generation_config.json")]
    (tmp_path / "run").rename(tmp_path / "first")
    started = [f"train.init={tmp_path / 'first' / 'checkpoints'}", "train.stop_at=1"]
    (line,) = _refused(tmp_path, *source, *started)
    hint = line.rpartition("nearest legal: ")[2].partition(", ")[0]
    trained(tmp_path, *source, *started, hint)


def test_tables_grow_for_more_tokens(tmp_path, model, text, capsys):
    """By command, as the hint says: the tokens of a chat template, in and out again."""
    source = ["model=from_hf", f"model.source={model}", *text, "data.chat_template=chatml"]
    (line,) = _refused(tmp_path, *source)
    hint = line.rpartition("nearest legal: ")[2]
    assert hint == f"model.vocab={VOCAB + 2}"
    printed = trained(tmp_path, *source, hint, "train.stop_at=2")
    assert f"2 new rows of embedding, head: each the mean of the {VOCAB} that are there" in printed
    assert main(["export", str(tmp_path / "run" / "checkpoints"), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == VOCAB + 2
    capsys.readouterr()
    assert write_answers([str(tmp_path / "out"), "the", "--tokens", "2"]) == 0


def test_all_ends_of_a_text_travel(tmp_path, model, text):
    """A list of end tokens, as generation_config.json has it, is kept by a run that starts from the model, also when it
    goes on without the folder; without that file config.json says it."""
    (model / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    source = ["model=from_hf", f"model.source={model}", *text]
    trained(tmp_path, *source, "train.stop_at=2")
    (model / "generation_config.json").unlink()
    trained(tmp_path, *source, "train.stop_at=4")
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 2
    for place in checkpoints:
        origin = find_trained_model(str(place))
        assert set(find_end_ids(build_vocabulary_if_readable(origin.files), origin.generation_config)) == {
            5,
            9,
            VOCAB - 1,
        }
    config = json.loads((model / "config.json").read_text()) | {"eos_token_id": [6, 7]}
    (model / "config.json").write_text(json.dumps(config))
    assert set(find_end_ids(None, find_trained_model(str(model)).generation_config)) == {6, 7}


@pytest.mark.parametrize("more", [["data=tokens"], ["data=text", "data.foreign_tokenizer=true"]])
def test_a_model_without_a_tokenizer_reads_what_needs_none_of_its_own(tmp_path, more):
    folder = written(tmp_path / "hf", "llama", ours={"vocab": VOCAB})
    np.arange(4000, dtype="<u2").__mod__(VOCAB).tofile(tmp_path / "t.bin")
    path = tmp_path / ("t.bin" if more == ["data=tokens"] else "t.txt")
    (tmp_path / "t.txt").write_text(TEXT * 100)
    config = compose_config([QUICK, "model=from_hf", f"model.source={folder}", *more, f"data.path={path}"])
    assert config.data.tokenizer == "train" and config.train.init == str(folder)
    with pytest.raises(ConfigError, match="data.tokenizer=: there is none beside the model"):
        compose_config([QUICK, "model=from_hf", f"model.source={folder}", "data=text", f"data.path={tmp_path}/t.txt"])
