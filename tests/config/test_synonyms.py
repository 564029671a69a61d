"""Words of other systems name our key, and nothing that is merely spelt alike; lists of names are short."""

from __future__ import annotations

import pytest

from platform.boundary.refusals import NAMED, ConfigError, closest_values
from platform.config.fields import KEYS, Config, _read_synonyms, flatten_config, violations_of_types
from platform.launch import compose_config, main
from tests.harness.suite import suite

WORDS = _read_synonyms()
CASES = [{"word": word} for word in WORDS]


def refusal(*typed: str) -> str:
    with pytest.raises(ConfigError) as refused:
        compose_config(["+experiment=gpt_quick", *typed])
    [line] = refused.value.violations
    return line


@suite("synonyms typed (words)", CASES, CASES[::12])
def test_a_word_of_another_system_names_the_key(case):
    key = WORDS[case["word"]]
    assert key in KEYS or key.startswith("tensor.axes.")
    for group in dict.fromkeys(["", "train.", f"{key.partition('.')[0]}."]):
        line = refusal(f"{group}{case['word'].replace('_', '-' if group else '_')}=3")
        assert "unknown key" in line and line.endswith(f"; nearest legal: {key}"), line


def test_no_word_is_a_key_of_ours():
    ours = {name.rpartition(".")[2] for name in [*flatten_config(Config()), *vars(Config())]}
    assert not ours & WORDS.keys()


def test_an_attribute_of_python_is_told_alike():
    config = Config()
    config.optimizer.learning_rate = 1e-3
    [lines] = violations_of_types(config).values()
    assert lines == ["optimizer.learning_rate=0.001: unknown key; nearest legal: optimizer.lr"]


def test_what_begins_alike_comes_first_and_a_list_is_short():
    assert refusal("model=gpt2").startswith(
        "model=gpt2: unknown; nearest legal: gpt2_124m, gpt_162b, gpt3_2_7b, gpt3_125m, "
    )
    assert len(closest_values("x", [f"name{i}" for i in range(50)])) == NAMED == 5
    assert closest_values("", ["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize("typed", [["--workers", "2", "train.steps=20"], ["cluster.workers=2"], ["workers=2"]])
def test_how_workers_come_about_is_said(typed, capsys):
    assert main(["+experiment=gpt_quick", *typed]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "a run has as many workers as all its sizes multiply to: parallel.data x tensor.axes" in line
    assert "train.steps" not in line, "a good key is not blamed"
