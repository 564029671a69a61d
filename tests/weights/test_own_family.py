"""A family that a user registers: GPT-NeoX, the worked example of docs/own-families.md, equals that of transformers."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from platform.boundary.refusals import ConfigError
from platform.weights import __main__ as command
from platform.weights import families
from platform.weights.config_keys import Renamed
from tests.docs.pages import ROOT
from tests.weights import peer, test_families

NEOX: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 20,
}  # fmt: skip
KINDS = {
    "side by side": {},
    "in turn": {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new", "rope_parameters": {
                "rope_type": "linear", "rope_theta": 50.0, "factor": 2.0, "partial_rotary_factor": 0.5}},
}  # fmt: skip


@pytest.fixture
def own(monkeypatch):
    """The example's module, by whose import alone the family is known; both are forgotten after."""
    monkeypatch.setattr(families, "FAMILIES", known := families.FAMILIES)
    monkeypatch.syspath_prepend(ROOT / "examples")
    sys.modules.pop("own_family", None)
    module = __import__("own_family")
    yield module
    known.pop("gpt_neox", None)


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    keys = {**NEOX, **KINDS[request.param]}
    monkeypatch.setitem(peer.MODELS, "gpt_neox", ("GPTNeoX", "GPTNeoXForCausalLM", keys))


def test_it_equals_transformers(tmp_path, own, kind, monkeypatch):
    test_families.test_logits_are_equal(tmp_path / "logits", "gpt_neox")
    stored = test_families.list_stored_tensors

    def named_in_memory(*arguments: Any, **more: Any) -> list[Any]:
        return [replace(t, name=t.name.replace("embed_out", "lm_head")) for t in stored(*arguments, **more)]

    with monkeypatch.context() as renamed:
        renamed.setattr(test_families, "list_stored_tensors", named_in_memory)
        test_families.test_gradients_are_equal(tmp_path / "gradients", "gpt_neox")
    test_families.test_a_round_trip_is_equal_in_every_byte(tmp_path, "gpt_neox", False)


def test_the_command_line_knows_it(tmp_path, own, capsys):
    for module, line in (("own_family", "holds no config.json"), ("no_such", "extend=no_such: cannot be imported")):
        assert command.main(["--extend", module, "import", str(tmp_path), str(tmp_path / "new")]) == 2
        assert line in capsys.readouterr().err


def test_what_is_no_family_is_refused(own):
    family = own.GPT_NEOX
    for wrong, line in (
        (replace(family, name="llama"), "model_type=llama: is built in"),
        (replace(family, name="a b"), "model_type=a b: no platform.weights.config_keys.Family"),
        ("gpt_neox", "model_type=gpt_neox: no platform.weights.config_keys.Family"),
        (
            replace(family, fixed={"nrm": 1}, rules=[Renamed("x", "heds")]),
            "gpt_neox: model.nrm: no key of our m",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            families.register_family(wrong)
        assert error.value.violations[0].startswith(line)
    assert len(error.value.violations) == 2
