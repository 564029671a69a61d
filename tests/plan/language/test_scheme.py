"""The YAML files of conf/tensor and conf/branch are the rows of the tables in docs/numerics.md."""

from __future__ import annotations

import pytest
import yaml

from platform.config.fields import Branch, Config, Tensor
from platform.plan.layout import DIMS, Layout
from platform.plan.scheme import REGIONS, ROLES, Scheme, compose_scheme
from tests.conftest import ROOT


def read(group: str, option: str) -> dict:
    return yaml.safe_load((ROOT / "conf" / group / f"{option}.yaml").read_text())


def scheme(tensor: str, axes: dict[str, int], branch: str = "none", data: int = 1, **branch_axes: int) -> Scheme:
    config = Config()
    config.tensor = Tensor(**{**read("tensor", tensor), "axes": axes})
    config.branch = Branch(**{**read("branch", branch), "axes": branch_axes})
    values = config.to_dict()
    return compose_scheme(values["tensor"], values["branch"], data)


def table(composed: Scheme) -> dict[str, str]:
    """region or role -> layout, as text; parameters as one row where their roles agree, the core where it differs.

    Without the dim `branch`, which is split by branch axes alone: `test_branches_are_shared_over_the_branch_axes`, and
    without the region of experts: `test_the_row_of_experts`."""
    dims = [d for d in DIMS if d != "branch"]
    regions = {r: str(composed.regions[r].restrict_dims(dims)) for r in REGIONS if r != "experts"}
    if regions["core"] == regions["attention"]:
        del regions["core"]
    roles = {r: str(composed.parameters[r].restrict_dims(dims)) for r in ROLES}
    return regions | ({"parameters": roles["in"]} if len(set(roles.values())) == 1 else roles)


T, RC, XYZ = {"t": 2}, {"r": 2, "c": 3}, {"x": 2, "y": 2, "z": 2}
INSIDE_1D = {
    "attention": "heads: t",
    "mlp": "d_ff: t",
    "logits": "vocab: t",
    "parameters": "d_ff: t, heads: t, vocab: t",
}
WEIGHTS_2D = {
    "in": "d_ff: c, d_model: r, heads: c, vocab: c",
    "out": "d_ff: r, d_model: c, heads: r",
    "vector": "d_model: c",
}
WHOLE = {row: "whole" for row in ("stream", "attention", "mlp", "logits", "parameters")}
ROWS = {
    "serial": (scheme("serial", {}), WHOLE),
    "1d": (scheme("1d", T), {"stream": "whole", **INSIDE_1D}),
    "1d_sp": (scheme("1d_sp", T), {"stream": "length: t", **INSIDE_1D}),
    "3d": (
        scheme("3d", XYZ),
        {
            "stream": "batch: x, d_model: z, length: y",
            "attention": "batch: x, heads: y+z",
            "mlp": "batch: x, d_ff: y, length: z",
            "logits": "batch: x, length: z, vocab: y",
            "parameters": "d_ff: y, d_model: z+x, heads: y, vocab: y",
        },
    ),
    **{
        name: (
            scheme(name, RC),
            {"stream": "batch: r, d_model: c", "attention": "batch: r, heads: c", "mlp": "batch: r, d_ff: c"}
            | {"logits": "batch: r, vocab: c", **WEIGHTS_2D},
        )
        for name in ("2d", "2d_gather")
    },
    "2p5d": (
        scheme("2p5d", {"d": 2, **RC}),
        {"stream": "batch: d+r, d_model: c", "attention": "batch: d+r, heads: c", "mlp": "batch: d+r, d_ff: c"}
        | {"logits": "batch: d+r, vocab: c", **WEIGHTS_2D},
    ),
    "3d_literal": (
        scheme("3d_literal", XYZ),
        {
            "stream": "batch: x+y, d_model: z",
            "attention": "batch: x+z, heads: y",
            "mlp": "batch: x+z, d_ff: y",
            "logits": "batch: x+z, vocab: y",
            "in": "d_ff: y+x, d_model: z, heads: y+x, vocab: y+x",
            "out": "d_ff: y, d_model: z+x, heads: y",
            "vector": "d_model: z+x",
        },
    ),
    "layout without a map": (scheme("layout", {"rows": 2}), WHOLE),
    "serial + dsp": (
        scheme("serial", {}, "dsp", g=2),
        {
            "stream": "batch: g",
            "attention": "heads: g",
            "mlp": "d_ff: g",
            "logits": "vocab: g",
            "parameters": "d_ff: g, heads: g, vocab: g",
        },
    ),
    "1d_sp + dsp": (
        scheme("1d_sp", T, "dsp", data=2, g=2),
        {
            "stream": "batch: data+g, length: t",
            "attention": "batch: data, heads: g+t",
            "mlp": "batch: data, d_ff: g+t",
            "logits": "batch: data, vocab: g+t",
            "parameters": "d_ff: g+t, heads: g+t, vocab: g+t",
        },
    ),
    "3d + nested dsp": (
        scheme("3d", XYZ, "dsp", data=3, outer=2, inner=2),
        {
            "stream": "batch: data+x+outer+inner, d_model: z, length: y",
            "attention": "batch: data+x, heads: outer+inner+y+z",
            "mlp": "batch: data+x, d_ff: outer+inner+y, length: z",
            "logits": "batch: data+x, length: z, vocab: outer+inner+y",
            "parameters": "d_ff: outer+inner+y, d_model: z+x, heads: outer+inner+y, vocab: outer+inner+y",
        },
    ),
    "1d + dsp_slice": (
        scheme("1d", T, "dsp_slice", g=2),
        {
            "stream": "batch: g",
            "attention": "batch: g, heads: t",
            "core": "heads: t+g",
            "mlp": "d_ff: g+t",
            "logits": "vocab: g+t",
            "parameters": "d_ff: g+t, heads: t, vocab: g+t",
        },
    ),
    "serial + dsp_csub": (
        scheme("serial", {}, "dsp_csub", g=2),
        {
            "stream": "whole; only at g=0",
            "attention": "whole; only at g=0",
            "core": "heads: g",
            "mlp": "d_ff: g, hidden: g",
            "logits": "vocab: g",
            "parameters": "d_ff: g, hidden: g, vocab: g",
        },
    ),
    "3d + nested dsp_csub": (
        scheme("3d", XYZ, "dsp_csub", data=2, outer=2, inner=2),
        {
            "stream": "batch: data+x, d_model: z, length: y; only at outer+inner=0",
            "attention": "batch: data+x, heads: y+z; only at outer+inner=0",
            "core": "batch: data+x, heads: y+z+outer+inner",
            "mlp": "batch: data+x, d_ff: outer+inner+y, hidden: outer+inner, length: z",
            "logits": "batch: data+x, length: z, vocab: outer+inner+y",
            "parameters": "d_ff: outer+inner+y, d_model: z+x, heads: y, hidden: outer+inner, vocab: outer+inner+y",
        },
    ),
    # size-1 axes vanish: (1, t, 1) is Megatron with sequence parallelism, (n, 1, 1) is FSDP
    "3d as 1d_sp": (
        scheme("3d", {"y": 4}),
        {
            "stream": "length: y",
            "attention": "heads: y",
            "mlp": "d_ff: y",
            "logits": "vocab: y",
            "parameters": "d_ff: y, heads: y, vocab: y",
        },
    ),
    "3d as fsdp": (
        scheme("3d", {"x": 4, "y": 1}),
        {r: "batch: x" for r in ("stream", "attention", "mlp", "logits")} | {"parameters": "d_model: x"},
    ),
    "1d of one, dsp of one": (scheme("1d", {"t": 1}, "dsp", g=1), WHOLE),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_table(row):
    composed, wanted = ROWS[row]
    assert table(composed) == wanted


EXPERTS = {
    "serial": "whole",
    "1d": "d_ff: t",
    "1d_sp": "d_ff: t",
    "3d": "batch: x, d_ff: y, d_model: z",
    "2d": "batch: r, d_ff: c, d_model: c",
    "3d_literal": "batch: x+z, d_ff: y",  # z is taken
    "1d_sp + dsp": "batch: data, d_ff: g+t",
    "3d + nested dsp": "batch: data+x, d_ff: outer+inner+y, d_model: z",
}


@pytest.mark.parametrize("row", EXPERTS)
def test_the_row_of_experts(row):
    """As mlp, and d_model as the stream where it may; without length, which experts' slots take the place of."""
    assert str(ROWS[row][0].regions["experts"].restrict_dims([d for d in DIMS if d != "branch"])) == EXPERTS[row]


def test_replicas_share_experts():
    """The axis expert is the innermost of the replicas'; where experts compute, it splits them instead of the batch."""
    values = Config().to_dict()
    values["tensor"] |= read("tensor", "1d") | {"axes": T}
    composed = compose_scheme(values["tensor"], values["branch"], data=12, zero=2, experts=3)
    assert composed.mesh_axes(12) == {"data": 2, "zero": 2, "expert": 3, "t": 2}
    assert composed.activation_layout("stream", ["batch"]) == Layout.build_canonical(
        {"batch": ["data", "zero", "expert"]}
    )
    slots = ["experts", "batch", "slots", "d_ff"]
    split = {"experts": ["expert"], "batch": ["data", "zero"], "d_ff": ["t"]}
    assert composed.activation_layout("experts", slots) == Layout.build_canonical(split)
    assert composed.parameter_layout("in", ["experts", "d_ff", "d_model"]) == Layout.build_canonical(
        {"experts": ["expert"], "d_ff": ["t"]}
    )
    assert composed.parameter_layout("vector", ["experts", "d_model"]) == Layout()  # the router's
    assert composed.key_of_axis("expert") == "parallel.experts"


WHOLE = {  # an expert's up and down [experts, d_ff, d_model], and its rows [experts, batch, slots, d_model]
    "1d": ("experts: t", "experts: t", "experts: t"),
    "1d_sp": ("experts: t", "experts: t", "experts: t"),
    "2d": ("d_model: r, experts: c", "d_ff: r, experts: c", "batch: r, experts: c"),
    "2d_gather": ("d_model: r, experts: c", "d_ff: r, experts: c", "batch: r, experts: c"),
    "3d": ("d_model: z+x, experts: y", "d_model: z+x, experts: y", "batch: x, d_model: z, experts: y"),
    "serial": ("whole", "whole", "whole"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_tensor_ranks_divide_whole_experts(name):
    """What splits an expert's d_ff divides the experts instead, behind the replicas that share them; of other
    feed-forward layers it splits d_ff."""
    values = Config().to_dict()
    table = read("tensor", name)
    values["tensor"] |= table | {"axes": dict.fromkeys(table.get("order", ()), 2)}
    groups = values["tensor"], values["branch"]
    whole, split = compose_scheme(*groups, 1, tensor_experts="whole"), compose_scheme(*groups, 1)
    weight = ("experts", "d_ff", "d_model")
    layouts = [whole.parameter_layout(role, weight) for role in ("in", "out")]
    assert [
        str(x) for x in (*layouts, whole.activation_layout("experts", ["experts", "batch", "slots", "d_model"]))
    ] == [*WHOLE[name]]
    for role in ("in", "out", "vector"):
        assert whole.parameter_layout(role, weight[1:]) == split.parameter_layout(role, weight[1:])
    shared = compose_scheme(*groups, 4, experts=4, tensor_experts="whole").parameter_layout("in", weight)
    assert shared["experts"] == ("expert", *whole.parameter_layout("in", weight)["experts"])


def test_every_scheme_of_conf_has_its_row():
    """But Mesh-TensorFlow's, whose tables are in tests/runtime/oracle/test_two_layer.py."""
    shipped = {path.stem for group in ("tensor", "branch") for path in (ROOT / "conf" / group).glob("*.yaml")}
    shipped = {name for name in shipped if not name.startswith("mesh_tf_")}
    assert shipped - {"none", "auto"} <= {word for row in ROWS for word in row.split()}


def test_the_mesh_order():
    """The scheme's axes in its own order, however they were typed, then the branch's; both with their sizes."""
    assert scheme("3d", {"z": 2, "x": 3}, "dsp", g=2).axes == (("x", 3), ("y", 1), ("z", 2), ("g", 2))
    assert scheme("layout", {"rows": 2, "cols": 3}).axes == (("rows", 2), ("cols", 3))


def test_a_name_says_the_choice():
    assert scheme("3d", XYZ).name == "3d" and scheme("1d", T, "dsp", g=2).name == "1d + dsp"


def test_a_parameter_that_no_branch_splits_is_on_sub_grid_zero():
    branched = scheme("1d", T, "dsp_csub", g=2)
    assert branched.parameter_layout("in", ["d_model", "d_ff"]) == Layout.build_canonical({"d_ff": ["g", "t"]})
    assert branched.parameter_layout("in", ["d_model", "heads", "d_kv"]) == Layout.build_canonical(
        {"heads": ["t"]}, ["g"]
    )
    assert branched.parameter_layout("vector", ["d_model"]) == Layout(only=("g",))
    assert branched.sub_grid_zero_axes == ("g",) and scheme("1d", T, "dsp", g=2).sub_grid_zero_axes == ()
    assert scheme("1d", T, "dsp_csub", g=1).parameter_layout("vector", ["d_model"]) == Layout()


def test_a_regions_map_replaces_the_streams():
    """Unnamed regions are as the stream, the core as attention; a named one inherits nothing; roles have own tables."""
    values = Config().to_dict()
    values["tensor"] |= {
        "axes": {"r": 2, "c": 2},
        "regions": {"stream": {"batch": ["r"], "length": ["c"]}, "attention": {"heads": ["c"]}},
        "parameters": {"in": {"d_ff": ["c"]}, "all": {"d_model": ["r"]}},
    }
    composed = compose_scheme(values["tensor"], values["branch"], 1)
    assert table(composed) == {
        "stream": "batch: r, length: c",
        "attention": "heads: c",
        "mlp": "batch: r, length: c",
        "logits": "batch: r, length: c",
        "in": "d_ff: c",
        "out": "d_model: r",
        "vector": "d_model: r",
    }
    assert composed.activation_layout("stream", ["batch", "d_model"]) == Layout.build_canonical({"batch": ["r"]})
    assert composed.parameter_layout("out", ["heads"]) == Layout()
    assert composed.fuses_attention("core")
    values["tensor"]["regions"]["core"] = {"length": ["r"], "memory_length": ["c"]}
    apart = compose_scheme(values["tensor"], values["branch"], 1)
    assert table(apart)["core"] == "length: r, memory_length: c" and not apart.fuses_attention("core")


def test_contexts_split_length_but_where_heads_are_exchanged():
    values = Config().to_dict()
    values["tensor"] |= {"axes": {"t": 2}, "regions": {"attention": {"heads": ["t"]}, "mlp": {"length": ["t"]}}}
    composed = compose_scheme(values["tensor"], values["branch"], 3, context={"context": 2, "exchange": 4})
    assert composed.mesh_axes(3) == {"data": 3, "context": 2, "exchange": 4, "t": 2}
    assert {region: str(layout) for region, layout in composed.regions.items()} == {
        "stream": "batch: data, length: context+exchange",
        "attention": "batch: data, heads: t, length: context+exchange",
        "core": "batch: data, heads: t+exchange, length: context",
        "mlp": "batch: data, length: context+exchange+t",
        "experts": "batch: data, length: context+exchange",
        "logits": "batch: data, length: context+exchange",
    }
    assert {composed.key_of_axis(axis) for axis in ("context", "exchange")} == {"parallel.context"}


@pytest.mark.parametrize("branch", ["dsp", "dsp_slice"])
def test_branches_are_shared_over_the_branch_axes(branch):
    """And by nothing else: a tensor scheme splits what is inside a branch, or nothing."""
    branched = scheme("1d", T, branch, outer=2, inner=2)
    layouts = {**branched.regions, **branched.parameters}
    assert {name for name, layout in layouts.items() if layout["branch"]} == {
        *("mlp", "experts", "experts in", "experts out"),
        *ROLES,
    }
    assert {layout["branch"] for layout in layouts.values()} == {(), ("outer", "inner")}
