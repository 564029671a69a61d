"""Any number of replicas is legal: 16 sequences over 1 to 7 of them, equal to one process in fp64."""

from __future__ import annotations

from math import prod

import pytest

from tests.oracle import MODELS, configure, prove
from tests.pairwise import cover, product

BATCH = 16
SCHEMES = {
    "serial": ("serial", {}, {}),
    "1d": ("1d", {"t": 2}, {}),
    "3d": ("3d", {"x": 2, "y": 1, "z": 1}, {}),
    "dsp": ("serial", {}, {"branch": "dsp", "branch_axes": {"g": 2}}),
    "dsp_csub": ("serial", {}, {"branch": "dsp_csub", "branch_axes": {"g": 2}}),
}
FACTORS = {
    "data": [1, 2, 3, 4, 5, 6, 7],
    "zero": [0, 1, 3],
    "pipeline": [("none", 1, 1), ("gpipe", 2, 1), ("1f1b", 3, 1), ("interleaved", 3, 2), ("zb_h1", 2, 2)],
    "scheme": list(SCHEMES),
    "microbatch": [2, 4],
    "model": ["gpt", "bert", "original", "t5"],
    "dropout": [0.0, 0.2],
}


def legal(case) -> bool:
    if case["zero"] and (case["data"] == 1 or case["scheme"] == "dsp_csub"):
        return False
    return case["data"] * case["pipeline"][1] * prod(SCHEMES[case["scheme"]][1].values()) <= 14


CASES = product(FACTORS, legal)
COVER = cover(CASES)


def configured(case, **more):
    tensor, axes, branch = SCHEMES[case["scheme"]]
    kind, stages, chunks = case["pipeline"]
    sizes = {"d_model": 16, "heads": 4, "d_ff": 32, "length": 8, "layers": 3 if chunks > 1 else 2}
    model = {
        **MODELS[case["model"]],
        **sizes,
        "dropout": case["dropout"],
        **({"source_length": 8} if case["model"] == "t5" else {}),
    }
    shape = {"pipeline": kind, "stages": stages, "chunks": chunks, "data": case["data"], "zero": case["zero"]}
    if stages * chunks > 5:
        model["layers"] = 4
    return configure(
        tensor, axes, microbatch=case["microbatch"], global_batch=BATCH, **shape, **branch, **model, **more
    )


def name(case) -> str:
    return " ".join(f"{v}" for v in case.values())


@pytest.mark.parametrize("case", COVER, ids=name)
def test_pairwise_cover(case, record_count):
    record_count("oracle of any number of replicas (threads)", len(COVER), len(CASES))
    prove(configured(case))


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in CASES if c not in COVER], ids=name)
def test_rest_of_the_product(case):
    prove(configured(case))
