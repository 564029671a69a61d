"""What our words do not express is refused by name, in a line, with status 2, and nothing is written."""

from __future__ import annotations

import json
import struct
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.config.fields import Model
from platform.weights.__main__ import main
from platform.weights.config_keys import Free
from platform.weights.families import COMMON, FAMILIES
from platform.weights.importing import open_importable, open_initial_weights
from platform.weights.tensor_names import build_config_json, functional_keys, translate_config_json
from tests.harness.commands import refused
from tests.harness.oracle import configure
from tests.weights import peer
from tests.weights.written import OURS, tensors_of, written


def imported(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, list[str]]:
    """Status and lines of an import; what is refused writes nothing."""
    status = main(["import", str(folder), str(folder.parent / "storage"), *more])
    lines = capsys.readouterr().err.splitlines()
    assert (status == 0) == (folder.parent / "storage").exists()
    return status, [line.removeprefix(f"weights: {folder}: ") for line in lines]


@pytest.mark.parametrize("name", OURS)
def test_what_is_whole_is_taken(tmp_path, capsys, name):
    assert imported(written(tmp_path / "hf", name), capsys) == (0, [])


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown": ("llama", {"rope_fancy": 1}, "rope_fancy=1: our words do not express this key"),
    "another family": ("llama", {"model_type": "gemma"}, 'model_type="gemma": no family that is known'),
    "another class": ("llama", {"architectures": ["LlamaForSequenceClassification"]},
                      'architectures=["LlamaForSequenceClassification"]: model_type=llama is known as'),
    "quantised": ("llama", {"quantization_config": {"bits": 4}}, 'quantization_config={"bits": 4}: our words read mxf'),
    "own code": ("llama", {"auto_map": {"AutoModel": "x.Y"}}, 'auto_map={"AutoModel": "x.Y"}: our words do not'),
    "activation": ("gpt2", {"activation_function": "mish"}, 'activation_function="mish": our words express gelu, '),
    "dropouts": ("gpt2", {"embd_pdrop": 0.5}, "embd_pdrop=0.5: resid_pdrop is 0, and our model.dropout is one"),
    "upcast": ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=true: our words express false"),
    "layers by number": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true"),
    "rotary kind": ("llama", {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4, "factor": 2.0}},
                    'rope_parameters.rope_type="axial": our words express default, linear, dynamic, llama3, '),
    "rotary part": ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.3}},
                    "model.rope_share=0.3: rotates 1 of 4 elements: needs pairs"),
    "rotary pairs": ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 2],
                     "long_factor": [1.0]}}, "model.rope_long=[1.0]: has 1 numbers; model.rope_scaling=longrope"),
    "rotary factor": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
                      'rope_parameters.factor="": is missing'),
    "rotary text": ("llama", {"rope_parameters": {"rope_theta": "big"}},
                    'rope_parameters.rope_theta="big": is no number'),
    "yarn's scales": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0,
                      "original_max_position_embeddings": 8, "mscale": 0.7}}, "rope_parameters.mscale=0.7: our"),
    "dropout of attention": ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1: our words express 0.0 alone"),
    "type": ("llama", {"hidden_size": "16"}, 'hidden_size="16": is no int'),
    "truth": ("llama", {"num_hidden_layers": True}, "num_hidden_layers=true: is no int"),
    "heads": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None},
              "model.heads=3: must divide model.d_model=16"),
    "bound": ("llama", {"num_hidden_layers": 10**9}, "model.layers=1000000000: must be <= 1000"),
    "layer types": ("qwen2", {"layer_types": ["sliding_attention"]}, 'layer_types=["sliding_attention"]: our words'),
    "chunks": ("qwen2", {"layer_types": ["chunked_attention"] * 2}, 'layer_types=["chunked_attention", "chunked_'),
    "no window": ("qwen2", {"use_sliding_window": False},
                  'layer_types=["full_attention", "sliding_attention"]: use_'),
    "positions": ("bert", {"position_embedding_type": "relative_key"}, 'position_embedding_type="relative_key": our'),
    "decoder": ("bert", {"is_decoder": True}, "is_decoder=true: our words express false alone"),
    "heads cut away": ("bert", {"pruned_heads": {"0": [1]}}, 'pruned_heads={"0": [1]}: our words express {} alone'),
    "jitter": ("mixtral", {"router_jitter_noise": 1.5}, "model.router_jitter=1.5: must be >= 0 and < 1"),
    "some windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
                     "max_window_layers=1: use_sliding_window=true means all layers in transformers 5"),
    "layers without experts": ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "model.dense_layers=[0, 1]: leaves no layer"),
    "layers by name": ("qwen3_moe", {"mlp_only_layers": ["1"]}, 'mlp_only_layers=["1"]: are no numbers of layers'),
    "a gate of shared experts": ("qwen3_moe", {"shared_expert_intermediate_size": 8},
                                 "shared_expert_intermediate_size=8: our words do not express this key"),
    "more than there are": ("mixtral", {"num_experts_per_tok": 5}, "model.experts_per_token=5: must be <= model.exp"),
    "too many to name": ("mixtral", {"num_local_experts": 1 << 16, "num_hidden_layers": 1000},
                         "names: 196608000 matrices of experts are more than 1048576"),
    "another fp8": ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={"
                    '"quant_method": "fp8"}: our words read mxfp4, and fp8 (e4m3) with a weight_block_size'),
    "another limit": ("gpt_oss", {"swiglu_limit": 9.0}, "swiglu_limit=9.0: our words express 7.0 alone"),
    "a window of none": ("gpt_oss", {"sliding_window": None}, 'layer_types=["full_attention", "sliding_attention"]: '
                         "sliding_window: there is none"),
    "clipped queries": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0: our words express null alone"),
    "a cap of logits": ("gemma2", {"final_logit_softcapping": "30"}, 'final_logit_softcapping="30": is no int or'),
    "a cap of scores": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: transformers"),
    "scaled windows": ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
                       'rope_parameters.sliding_attention={"rope_type": "linear", "factor": 2.0}: our words express a'),
    "a second table": ("gemma4_text", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input=8: our words"),
    "shared keys": ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers=1: our words express 0 alone"),
    "heads unlike": ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 4}, "2": {"head_dim": 8}}},
                     'per_layer_config={"0": {"head_dim": 4}, "2": {"head_dim": 8}}: our words express head_dim and'),
    "another key of a layer": ("gemma4_text", {"per_layer_config": {"2": {"sliding_window": 4}}},
                               'per_layer_config={"2": {"sliding_window": 4}}: our words express head_dim and'),
    "no width": ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0: must be > 0"),
    "unrotated layers": ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers=[1]: must be 0 or 1 for each layer"),
    "no divisor": ("granite", {"logits_scaling": 0.0}, "logits_scaling=0.0: must be > 0"),
    "stacks": ("t5", {"num_decoder_layers": 3}, "num_decoder_layers=3: num_layers is 2, and our model.layers is one"),
    "contradiction": ("t5", {"is_gated_act": True}, "is_gated_act=true: feed_forward_proj=relu says False"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_key_that_we_do_not_express(tmp_path, capsys, case):
    name, config, wanted = CONFIGS[case]
    status, lines = imported(written(tmp_path / "hf", name, **config), capsys)
    assert status == 2 and len(lines) == 1 and lines[0].startswith(wanted), lines


def test_every_mistake_is_said_at_once(tmp_path, capsys):
    config = {"rope_fancy": 1, "attention_dropout": 0.1, "hidden_act": "mish"}
    status, lines = imported(written(tmp_path / "hf", "llama", **config), capsys)
    assert status == 2 and [line.partition("=")[0] for line in lines] == [
        "hidden_act",
        "attention_dropout",
        "rope_fancy",
    ]


def altered(kind: str) -> dict[str, torch.Tensor]:
    tensors = tensors_of(ALTERED.get(kind, "llama"))
    if kind == "missing":
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    elif kind == "foreign":
        tensors |= {"model.layers.2.mlp.up_proj.weight": torch.ones(2), "score.weight": torch.ones(2)}
    elif kind == "shape":
        tensors["lm_head.weight"] = torch.ones(60, 16)
        tensors["model.embed_tokens.weight"] = torch.ones(60, 16)
    elif kind == "expert":
        del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    elif kind == "both forms":
        tensors |= {
            name: t for name, t in tensors_of("mixtral", fused=True).items() if name.endswith("0.mlp.experts.down_proj")
        }
    elif kind == "stack":
        tensors = tensors_of("mixtral", fused=True)
        tensors["model.layers.0.mlp.experts.down_proj"] = torch.ones(4, 24, 16)
    elif kind == "type":
        tensors["model.norm.weight"] = torch.ones(16, dtype=torch.int64)
    return tensors


ALTERED = dict.fromkeys(("expert", "both forms", "stack"), "mixtral")
NAMES = {
    "expert": "names: model.layers.1.block_sparse_moe.experts.3.w2.weight: missing",
    "both forms": "names: model.layers.0.mlp.experts.down_proj: no part of MixtralForCausalLM with this config.json",
    "stack": "shapes: model.layers.0.mlp.experts.down_proj is [4, 24, 16], not [4, 16, 24]",
    "missing": "names: model.layers.1.mlp.up_proj.weight, model.norm.weight: missing",
    "foreign": "names: model.layers.2.mlp.up_proj.weight, score.weight: no part of LlamaForCausalLM with this"
    " config.json",
    "shape": "shapes: model.embed_tokens.weight is [60, 16], not [61, 16], lm_head.weight is [60, 16], not [61, 16]",
    "type": "types: model.norm.weight is I64; a parameter is of floating-point numbers",
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_that_are_not_those_of_the_model(tmp_path, capsys, kind):
    folder = written(tmp_path / "hf", ALTERED.get(kind, "llama"), altered(kind))
    assert imported(folder, capsys) == (2, [NAMES[kind]])


def test_what_is_foreign_may_be_dropped(tmp_path, capsys):
    folder = written(tmp_path / "hf", "llama", altered("foreign"))
    assert imported(folder, capsys, "--drop", "score.*", "--drop", "model.layers.2.*") == (0, [])


def test_what_is_tied_and_differs(tmp_path, capsys):
    tensors = tensors_of("gpt2")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    assert imported(written(tmp_path / "a" / "hf", "gpt2", tensors), capsys) == (0, [])
    tensors["lm_head.weight"][3, 4] += 1
    line = "names: lm_head.weight differs from transformer.wte.weight, to which this config.json ties it"
    assert imported(written(tmp_path / "b" / "hf", "gpt2", tensors), capsys) == (2, [line])


def header(entries: Any, length: int | None = None) -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
FILES: dict[str, tuple[str, bytes, str]] = {
    "no header": ("model.safetensors", b"", "its 0 bytes are too few for a header"),
    "a long header": ("model.safetensors", header(b"{}", 1 << 62), "is longer than the file"),
    "no JSON": ("model.safetensors", header(b"[" * 100_000), "too many maps and lists"),
    "a list": ("model.safetensors", header([1]), "its header is no map"),
    "a name twice": ("model.safetensors", header(b'{"a": 1, "a": 2}'), "the key 'a' twice"),
    "bytes of others": ("model.safetensors", header({"a": ONE | {"data_offsets": [0, 4]}}),
                        "8 bytes do not lie from 0 to 4"),
    "beyond the end": ("model.safetensors", header({"a": ONE}), "8 bytes do not lie from 0 to 8 of 0"),
    "huge": ("model.safetensors", header({"a": ONE | {"shape": [1 << 47] * 16}}), "do not lie from 0 to 8"),
    "negative": ("model.safetensors", header({"a": ONE | {"shape": [-2]}}), "a.shape[0]: -2 is not in 0 to"),
    "two at one place": ("model.safetensors", header({"a": ONE, "b": ONE}) + bytes(8), "b: overlaps a: it begins at 0"),
    "a hole": ("model.safetensors", header({"a": ONE | {"data_offsets": [4, 12]}}) + bytes(12), "a: leaves 4 bytes"),
    "more behind": ("model.safetensors", header({"a": ONE}) + bytes(9), "1 bytes behind its last tensor"),
    "no text": ("model.safetensors", header({"__metadata__": {"a": 1}}), "__metadata__.'a': is no text"),
    "a type": ("model.safetensors", header({"a": ONE | {"dtype": "F8_E4M3"}}), "a: type 'F8_E4M3' is not one of"),
    "a path": ("model.safetensors.index.json", b'{"weight_map": {"a": "../../other.safetensors"}}', "safetensors file"),
    "a file that is not there": ("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}',
                                 "no such file"),
    "an index": ("model.safetensors.index.json", b'{"weight_map": []}', "weight_map"),
    "no config": ("config.json", b"{", "config.json: not JSON"),
    "a config of NaN": ("config.json", b'{"model_type": NaN}', "config.json: NaN is no number of JSON"),
    "a large config": ("config.json", b" " * (2 << 20), "config.json: more than"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_hostile_files(tmp_path, capsys, case):
    folder = written(tmp_path / "hf", "llama")
    name, raw, wanted = FILES[case]
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(raw)
    status = main(["import", str(folder), str(tmp_path / "storage")])
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and line.startswith(f"weights: source={folder}: ") and wanted in line, line
    assert not (tmp_path / "storage").exists()


def test_a_file_that_ends_early_leaves_nothing(tmp_path, capsys, monkeypatch):
    """As one that is cut while it is read: the checkpoint that had begun is deleted."""
    folder = written(tmp_path / "hf", "llama")
    importable = open_importable(str(folder), "source")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    monkeypatch.setattr("platform.weights.__main__.open_importable", lambda *_, **__: importable)
    assert main(["import", str(folder), str(tmp_path / "storage")]) == 1
    assert "is shorter than its header says" in capsys.readouterr().err
    assert not [*(tmp_path / "storage").glob("*")]


def test_two_forms_of_weights_in_a_folder(tmp_path, capsys):
    """transformers takes model.safetensors, and so nobody knows which of two models is meant."""
    folder = written(tmp_path / "hf", "llama")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-00001-of-00001.safetensors"}}')
    status, lines = imported(folder, capsys)
    reason = "holds both model.safetensors and model.safetensors.index.json, which may be two models"
    assert (status, lines) == (2, [f"weights: source={folder}: {reason}; name a folder with one of them"])


def test_nothing_there(tmp_path, capsys):
    for path, why in ((tmp_path, "holds no config.json"), (tmp_path / "no", "holds no config.json")):
        assert main(["import", str(path), str(tmp_path / "storage")]) == 2
        assert capsys.readouterr().err == f"weights: source={path}: {why}\n"


def test_what_no_family_expresses_is_not_exported(tmp_path):
    for name, change, wanted in (
        ("gpt2", {"positions": "sinusoidal"}, "model.positions=sinusoidal"),
        ("gpt2", {"norm": "rmsnorm"}, "model.norm=rmsnorm"),
        ("llama", {"query_key_norm": True, "attention_bias": "qkv"}, "model.attention_bias=qkv"),
        ("bert", {"embedding_norm": False}, "model.embedding_norm=false"),
        ("t5", {"attention_scale": 0.0}, "model.attention_scale=0.5"),
        ("mixtral", {"router": "sigmoid"}, "model.router=sigmoid"),
        ("mixtral", {"experts_every": 2}, "model.experts_every=2"),
        ("qwen3_moe", {"shared_experts": 1}, "model.shared_experts=1"),
        ("olmoe", {"d_kv": 6}, "model.d_kv=6"),
        ("gemma4_text", {"window_layers": [1, 2]}, r"model.global_d_kv=8"),
        ("gemma4_text", {"stored_scale": False}, "model.stored_scale=false"),
        ("gemma3_text", {"embedding_scale": 3.0}, "model.embedding_scale=3"),
        ("granite", {"rope_share": 0.5, "norm": "rmsnorm_centred"}, "model.norm=rmsnorm_centred"),
        ("gpt_oss", {"attention_sinks": False}, "model.attention_sinks=false"),
    ):
        model = Model(**OURS[name] | change)
        assert all(_refuses(model, family) for family in FAMILIES.values())
        family = {"llama": "qwen3"}.get(name, name)
        with pytest.raises(ConfigError, match=wanted):
            build_config_json(model, FAMILIES[family])


def _refuses(model: Model, family: Any) -> bool:
    try:
        build_config_json(model, family)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("name", OURS)
def test_every_key_of_ours_is_written_or_refused(name):
    """A key that another value changes in the model: config.json says so, or the family refuses it."""
    model, family = Model(**OURS[name]), FAMILIES[name]
    plain = build_config_json(model, family)
    others = {str: ["layernorm", "rmsnorm", "gelu", "silu", "all", "rope", "learned"], bool: [True, False],
              float: [0.5, 3.0], int: [2, 3, 7]}  # fmt: skip
    for f in fields(Model):
        for value in others.get(type(getattr(model, f.name)), [[0]]):
            changed = Model(**OURS[name] | {f.name: value})
            if functional_keys(changed) != functional_keys(model) and (name, f.name) != (
                "t5",
                "tied",
            ):  # which their names say
                try:
                    assert build_config_json(changed, family) != plain, f.name
                except ConfigError:
                    continue


@pytest.mark.parametrize("name", OURS)
def test_every_key_of_transformers_is_read_or_refused(name):
    """Another value of a key, but of those that say nothing about the numbers, is another model, or refused."""
    theirs = getattr(peer.transformers(), f"{peer.MODELS[name][0]}Config")().to_dict()
    family = FAMILIES[name]
    free = {key for rule in (*family.rules, *COMMON) if isinstance(rule, Free) for key in rule.key_names}
    keys = build_config_json(Model(**OURS[name]), family)
    ours = functional_keys(Model(**translate_config_json(keys)))
    assert theirs.keys() - free - {key for rule in (*family.rules, *COMMON) for key in rule.key_names} == set()
    for key, value in keys.items():
        if key in free:
            continue
        other = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 1.0}.get(type(value), lambda v: "x")
        try:
            again = translate_config_json(keys | {key: other(value)})
        except ConfigError:
            continue
        elsewhere = {"max_window_layers", "no_rope_layer_interval", "original_max_position_embeddings"}
        said_elsewhere = key in {*elsewhere, "tie_word_embeddings"}  # by layers, by rope_parameters, by names
        assert functional_keys(Model(**again)) != ours or "dropout" in again or said_elsewhere, key


def test_a_run_does_not_start_from_weights_of_another_model(tmp_path):
    folder = written(tmp_path / "hf", "llama")
    c = configure(**OURS["llama"] | {"vocab": 50, "layers": 1})
    c.train.init = str(folder)
    with pytest.raises(ConfigError) as error:
        open_initial_weights(c)
    assert len(error.value.violations) == 2
    assert "no part of LlamaForCausalLM" in error.value.violations[0]
    assert "lm_head.weight is [61, 16], not [50, 16]" in error.value.violations[1]


@pytest.mark.parametrize("typed", [["train.init=nowhere"], ["train.init=."], ["model=from_hf"],
                                   ["model=from_hf", "model.source=nowhere"]])  # fmt: skip
def test_a_command_is_refused(tmp_path, typed):
    (tmp_path / "file").write_text("")
    assert [line.partition("=")[0] for line in refused(*typed, cwd=tmp_path)] == [
        f"config: {'train.init' if typed[0].startswith('train') else 'model.source'}"
    ]
