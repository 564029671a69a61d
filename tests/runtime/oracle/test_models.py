"""Every kind of model under every tensor scheme and branch choice, against one process in fp64."""

from __future__ import annotations

from math import prod

from tests.harness.oracle import MODELS, configure, prove
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite

SCHEMES = {
    "serial": ("serial", {}),
    "1d": ("1d", {"t": 2}),
    "1d_sp": ("1d_sp", {"t": 2}),
    "2d": ("2d", {"r": 2, "c": 2}),
    "2d_gather": ("2d_gather", {"r": 2, "c": 2}),
    "3d": ("3d", {"x": 1, "y": 2, "z": 2}),
    "3d_literal": ("3d_literal", {"x": 1, "y": 2, "z": 2}),
}
FACTORS = {
    "model": ["gpt", "bert", "original", "t5", "modern", "latent", "packed_gpt", "whole_bert", "whole_t5"],
    "scheme": list(SCHEMES),
    "branch": ["none", "dsp", "dsp_slice"],
    "data": [1, 2],
    "dropout": [0.0, 0.2],  # 0.2: attention by einsums
}


def legal(case) -> bool:
    g = 1 if case["branch"] == "none" else 2
    return prod(SCHEMES[case["scheme"]][1].values()) * g * case["data"] <= 8


CASES = product(FACTORS, legal)
PLAIN = {  # whose words are those of the others, too; and the schemes whose attention they may split
    "model": ["original", "modern", "packed_gpt", "whole_bert", "whole_t5"],
    "scheme": ["1d_sp", "2d_gather", "3d"],
}


@suite("oracle of the models (threads)", CASES, cover(CASES, plain=PLAIN))
def test_equals_one_process(case):
    c = configure(
        *SCHEMES[case["scheme"]],
        branch=case["branch"],
        branch_axes={} if case["branch"] == "none" else {"g": 2},
        data=case["data"],
        dropout=case["dropout"],
        **MODELS[case["model"]],
    )
    prove(c)
