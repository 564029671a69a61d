"""Compiled regions on GPUs, without one: at the shapes of every shipped experiment, each becomes code for sm_90 and
sm_100, whose kernels, bytes and registers are as budgeted."""

from __future__ import annotations

import ast
from random import Random

import pytest
import torch

from tests.harness.ahead import TARGETS, Block, Call, Compiled, compilers, lacking
from tests.harness.regions import RUNS, calls_of
from tests.harness.suite import suite
from tests.house.rooms import ROOT

needs_compiler = pytest.mark.skipif(bool(lacking()), reason=lacking())

GATED = "swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu"
TUNED = "fine_tune", "fine_tune_offload", "distill", "preferences", "preferences_offload"
ADAPTED = "lora", "preferences_lora", "preferences_qlora", "qlora"
ELSEWHERE = {
    "in_turns": "any traced function, whose neighbouring collectives are one call",
    "scale_values": "compiled where parts of weights in 8 bits are gathered, beside passes",
}
COMPILING = {"region", "compile_function"}  # what the platform's code calls to have a function compiled

# Region (of a run) -> the most kernels that it may launch, and how often these may read or write a tensor of the size
# of its largest. A row of more than 1024 elements does not stay in registers: it is read again after its sums. Where
# torch does not fuse sums over rows with those within them, two tensors are read twice by `sum_and_norm_gradients`.
BUDGETS = {
    "drop_elements": (1, 2.02),
    "add_residual": (1, 3.02),
    "sum_and_norm": (1, 4.1),
    "gpt175b sum_and_norm": (1, 5.1),
    "llama_8b sum_and_norm": (1, 5.1),
    **{
        f"{run} sum_and_norm": (1, 5.1)
        for run in (
            "llama_8b_usual",
            "llama_8b_fp8",
            "llama_8b_in_mx",
            "llama_8b_in_rows",
            "llama_8b_split",
            "deepseek_v3",
            "gpt_oss_120b",
            "gpt_oss_20b",
            "mixtral_8x7b",
            "olmoe_7b",
            "qwen3_235b_a22b",
        )
    },
    "sum_and_norm_gradients": (4, 6.1),
    "llama_8b_split sum_and_norm_gradients": (3, 4.3),
    "t5_large_mod sum_and_norm_gradients": (3, 7.1),  # which drops too: one tensor more is written
    "row_statistics": (1, 1.01),
    "differentiate_compiled": (1, 2.01),
    "apply_rms_norm": (1, 2.01),
    "make_numbers": (1, 1.32),  # of 4 bits, and of no more beside them than their scales
    "apply_rms_norm with gradients": (4, 7.1),
    "turn_pairs": (1, 3.01),
    "deepseek_v3 turn_pairs": (2, 13.01),  # pairs of neighbours, of one key beside its tables
    "qwen3_235b_a22b turn_pairs": (1, 4.01),  # keys of two heads, beside tables in fp32 as large as they
    **{f"apply_{function}": (1, 3.01) for function in GATED},
    # 5 and 9 of them products and attention, which read all that others write
    "block_forward": (9, 40.1),
    "block_backward": (26, 21.6),
    "block_input_gradients": (22, 16.5),
    "block_weight_gradients": (4, 4.3),  # of them products alone
    **{f"{run} block_backward": (16, 24.4) for run in TUNED},
    # 18 and 19 of them for six adapters, whose narrow products are three kernels each
    **{f"{run} block_forward": (28, 24.6) for run in ADAPTED},
    **{f"{run} block_backward": (34, 28.1) for run in ADAPTED},
    "llama_8b block_forward": (11, 14.3),
    "llama_8b block_backward": (23, 27.5),
    "llama_8b_usual block_forward": (12, 14.8),
    "llama_8b_usual block_backward": (15, 24.1),
    # Products in 8 bits, each operand of which is quantised: Q, K and V, gate and up are products apart, 7 in place of
    # 4, and 14 of 8. Along rows its maxima and what rounds by them are one kernel, which reads it once; of a weight's
    # tiles of 128 x 128 two, as no block of threads holds one; along columns two, as torch fuses none of these. A
    # maximum of all of a column takes one more, over its parts. MX is emulated on sm_90, and rounded to 16 bits.
    # On sm_100 scales take a kernel more, which arranges them: 9 and 18 of fp8.
    "llama_8b_fp8 block_forward": (44, 40.9),
    "llama_8b_fp8 block_backward": (83, 41.6),
    "llama_8b_in_mx block_forward": (26, 42.5),
    "llama_8b_in_mx block_backward": (76, 48.7),
    "llama_8b_in_rows block_forward": (23, 37.1),
    "llama_8b_in_rows block_backward": (68, 36.9),
    **{f"apply_{function} with gradients": (2, 8.01) for function in GATED},
}
# Bytes that a thread may spill in every configuration of a kernel, and in one that has another: inductor measures which
# is faster. A register of one kernel that reads 1 MB: in blocks of 4 sequences of 64 tokens.
SPILLS = {
    "mixtral_8x7b row_statistics": (0, 156),
    "transformer_base row_statistics": (0, 24),
    "cluster_check block_backward": (4, 4),
    "fine_tune block_backward": (4, 4),
    **{f"{run} block_backward": (0, 8) for run in ("fine_tune_offload", "preferences_offload")},
    **{f"{run} block_backward": (0, 32) for run in ADAPTED},
    "llama_8b_in_rows block_backward": (0, 8),
    "llama_8b_in_mx block_backward": (0, 80),
    "one_gpu_apart block_input_gradients": (8, 8),
    "one_gpu block_backward": (8, 8),
}

CASES = [{"run": run, "target": target} for run in RUNS for target in TARGETS]
CHOSEN = Random(6).sample(CASES, 2)


def exceeded(run: str, region: Compiled) -> list[str]:
    """In words, how a compiled region exceeds its budget."""
    name = region.call.title
    kernels, passes = BUDGETS.get(f"{run} {name}", BUDGETS[name])
    always, sometimes = SPILLS.get(f"{run} {name}", (0, 0))
    wrong = {
        f"{len(region.kernels)} kernels instead of {kernels}": len(region.kernels) > kernels,
        f"{region.passes:.2f} passes instead of {passes}": region.passes > passes,
        f"every configuration spills {region.spilled} bytes instead of {always}": region.spilled > always,
        f"a configuration spills {region.most('spilled')} bytes instead of {sometimes}": region.most("spilled")
        > sometimes,
    }
    return [f"{region.call}: {line}" for line, is_so in wrong.items() if is_so]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles a call for a target, once."""
    known: dict[tuple[Call, int], Compiled] = {}
    with compilers(tmp_path_factory.mktemp("ahead")) as compile_for:

        def once(call: Call, target: int) -> Compiled:
            if (call, target) not in known:
                known[call, target] = compile_for(call, target)
            return known[call, target]

        yield once


@needs_compiler
@pytest.mark.timeout(1500)  # of products in 8 bits
@suite("runs whose regions are compiled ahead of time, on sm_90 and sm_100", CASES, CHOSEN)
def test_the_regions_of_a_run(case, compiled):
    run, target = case.values()
    assert [line for call in calls_of(run, target) for line in exceeded(run, compiled(call, target))] == []


# run -> the most kernels of a layer, forward and backward, beside torch's addition to the sums of gradients
OF_A_LAYER = {"one_gpu": 36, "llama_8b_usual": 28}


@needs_compiler
@pytest.mark.parametrize("run", OF_A_LAYER)
def test_the_kernels_of_a_layer(run, compiled):
    blocks = [call for call in calls_of(run) if call.title.startswith("block")]
    assert len(blocks) == 2 and sum(len(compiled(call, 90).kernels) for call in blocks) <= OF_A_LAYER[run]


@pytest.mark.full
def test_every_region_occurs_and_has_a_budget():
    """What the platform compiles by its name is called by some run, and no budget is of nothing."""
    every = {(run, call.title) for run in RUNS for call in calls_of(run)}
    titles = {title for _, title in every}
    assert titles <= set(BUDGETS) <= titles | set(map(" ".join, every))
    assert named_regions() - ELSEWHERE.keys() <= {title.removesuffix(" with gradients") for title in titles}


def named_regions() -> set[str]:
    """The functions that the platform's code names where it has one compiled, but for those in variables."""
    names = set()
    for path in (ROOT / "platform").rglob("*.py"):
        code = ast.parse(path.read_text())
        defined = {node.name for node in code.body if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(code):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).split(".")[-1] in COMPILING:
                name, of_another = ast.unparse(node.args[0]).split(".")[-1], isinstance(node.args[0], ast.Attribute)
                name = f"block_{name}" if of_a_block(ast.unparse(node.args[0])) else name
                names |= {name.lstrip("_")} if of_another or name in defined else set()
    return names


def of_a_block(text: str) -> bool:
    """Whether code names a function of a compiled block."""
    return ".functions." in text or text.startswith("apart.")


def test_negative_control_regions_in_the_code():
    assert {"drop_elements", "sum_and_norm", "turn_pairs", "row_statistics"} <= named_regions()


def waiting(*rows):
    """Rows that all stay in registers until their mean is known."""
    mean = sum(rows).mean(-1, keepdim=True)
    return tuple(row - mean for row in rows)


def over_everything(x):
    return x / x.sum()


def asking(x):
    return x * x.sum().item()


ROWS = Block((4096, 1024), (1024, 1), torch.float32, False)


@needs_compiler
def test_negative_controls_too_many_registers_and_kernels(compiled, monkeypatch):
    monkeypatch.setitem(BUDGETS, "waiting", (1, 24.1))
    assert ["spills" in line for line in exceeded("", compiled(Call(waiting, (ROWS,) * 12, False), 90))] == [True, True]
    assert exceeded("", compiled(Call(waiting, (ROWS,) * 2, False), 90)) == []
    monkeypatch.setitem(BUDGETS, "over_everything", (1, 2.01))
    kernels, passes = exceeded("", compiled(Call(over_everything, (ROWS,), False), 90))
    assert "kernels instead of 1" in kernels and "3.00 passes instead of 2.01" in passes


@needs_compiler
def test_negative_control_what_cannot_be_compiled(compiled):
    with pytest.raises(AssertionError, match="asking.*sm_90"):
        compiled(Call(asking, (ROWS,), False), 90)
