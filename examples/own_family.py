"""A family of models that transformers saves, as a table: GPT-NeoX, of which Pythia is.

    python examples/own_family.py

`docs/own-families.md` explains it. A run has it by `extend=[own_family] model=from_hf model.source=FOLDER`, an import
by `python -m platform.weights --extend own_family import FOLDER URL`.
"""

from math import prod

from platform.api import (
    PLAIN,
    DropoutRule,
    Family,
    Free,
    FunctionRule,
    Model,
    Renamed,
    RotaryRule,
    TensorRow,
    Words,
    list_stored_tensors,
    module_rows,
    register_family,
    translate_config_json,
)

LAYER, OURS = "gpt_neox.layers.{i}", "layers.{i}"
ROTARY = RotaryRule(share=0.25)  # a quarter of each head rotates, unless a config.json says otherwise


def read_rotations(config):
    """Read rotary positions, by the names of version 5 of transformers or by the older ones of this family."""
    older = {
        "rope_theta": config.get("rotary_emb_base", 10000),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    return ROTARY.read_model_keys({**older, **config})


GPT_NEOX = Family(
    name="gpt_neox",  # its model_type
    architecture="GPTNeoXForCausalLM",
    fixed={"kind": "decoder", "norm": "layernorm", "positions": "rope", "bias": True},
    rules=[
        Renamed("vocab_size", "vocab", 50432),
        Renamed("hidden_size", "d_model", 6144),
        Renamed("intermediate_size", "d_ff", 24576),
        Renamed("num_hidden_layers", "layers", 44),
        Renamed("num_attention_heads", "heads", 64),
        Renamed("max_position_embeddings", "length", 2048),
        Renamed("layer_norm_eps", "norm_eps", 1e-5),
        Renamed("tie_word_embeddings", "tied", False),
        Renamed("use_parallel_residual", "parallel_residual", True),
        Words("hidden_act", "activation", PLAIN, "gelu"),
        Words("attention_bias", "attention_bias", {True: "all", False: "none"}, True),
        DropoutRule("attention_dropout hidden_dropout", 0.0),
        FunctionRule(
            " ".join((*ROTARY.key_names, "rotary_pct", "rotary_emb_base")), read_rotations, ROTARY.write_config_keys
        ),
        Free("", {"initializer_range": 0.02, "classifier_dropout": 0.1, "is_decoder": False, "use_cache": True}),
    ],
    rows=[  # each layer's query, key and value lie side by side, head by head
        *module_rows({"gpt_neox.embed_in": "embedding"}),
        *(
            TensorRow(f"{LAYER}.attention.query_key_value.{kind}", tuple(names), by_head=True)
            for kind, end in (("weight", ""), ("bias", "_bias"))
            for names in [[f"{OURS}.attention.{name}{end}" for name in ("query", "key", "value")]]
        ),
        *module_rows(
            {
                f"{LAYER}.attention.dense": f"{OURS}.attention.output",
                f"{LAYER}.mlp.dense_h_to_4h": f"{OURS}.mlp.up",
                f"{LAYER}.mlp.dense_4h_to_h": f"{OURS}.mlp.down",
                f"{LAYER}.input_layernorm": f"{OURS}.attention.norm",
                f"{LAYER}.post_attention_layernorm": f"{OURS}.mlp.norm",
            }
        ),
        *module_rows({"gpt_neox.final_layer_norm": "norm", "embed_out": "head"}),
    ],
    prefix="gpt_neox.",
    same={"embed_out.weight": "gpt_neox.embed_in.weight"},
    buffers=tuple(f"{LAYER}.attention.{n}" for n in ("bias", "masked_bias", "rotary_emb.inv_freq")),
)
register_family(GPT_NEOX)

if __name__ == "__main__":
    pythia = {"model_type": "gpt_neox", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
              "intermediate_size": 3072, "vocab_size": 50304, "rotary_pct": 0.25}  # fmt: skip
    model = Model(**translate_config_json(pythia, ["lm_head.weight"]))
    tensors = list_stored_tensors(model, GPT_NEOX)
    print(f"pythia-160m: {len(tensors)} tensors, {sum(prod(t.shape) for t in tensors):,} parameters")
    for tensor in tensors[1:3]:
        print(f"  {tensor.name} {list(tensor.shape)} is {', '.join(part.name for part in tensor.parts[:3])}, ...")
