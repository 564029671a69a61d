"""A scheme's file is judged as what is typed: every name in it, with the nearest legal ones."""

from __future__ import annotations

import pytest

from platform.boundary.refusals import ConfigError
from platform.launch import CONF, compose_config

TENSOR = {  # file -> what its refusal says: key, value, constraint and nearest legal
    "regions: {attention: {headz: [b]}}": ["tensor.regions.attention=headz: no such dim; nearest legal: heads"],
    "regions: {atention: {heads: [b]}}": ["tensor.regions=atention: no such region; nearest legal: attention"],
    "parameters: {inn: {heads: [b]}}": ["tensor.parameters=inn: no such role; nearest legal: in"],
    "parameters: {all: {heds: [b]}}": ["tensor.parameters.all=heds: no such dim; nearest legal: heads"],
    "regions: {mlp: {d_ff: [b, b]}}": ["tensor.regions.mlp.d_ff=b: named twice", "nearest legal: b"],
    "order: [b, b]\nregions: {mlp: {d_ff: [b]}}": ["tensor.order=b: named twice"],
    "order: [b]\nregions: {mlp: {d_ff: [c]}}": ["tensor.order=[b]: lacks c", "tensor.regions.mlp.d_ff=[b]"],
    "regions: {mlp: {d_ff: [b]}}\nregions: {mlp: {d_ff: [b]}}": ["duplicate key regions"],
    "regions: {mlp: {d_ff: [b], d_ff: [c]}}": ["duplicate key d_ff"],
    "regions: {mlp: {d_ff: b}}": ["regions"],
    "regionz: {mlp: {d_ff: [b]}}": ["tensor.regionz: unknown key; nearest legal: tensor.regions"],
    "regions: {stream: {length: [b], batch: [b]}}": ["axis b would split both"],
    # not stage: that name is reserved
    "regions: {stream: {length: [stage]}}\norder: [stage]": ["tensor=own has no such axis; nearest legal: 1"],
}
NAMELESS = ["regions: {mlp: {d_ff: [b]}}", "parameters: {all: {d_ff: [b]}}", "order: [b]"]
BRANCH = {
    "append: {atention: [heads]}": ["branch.append=atention: no such region; nearest legal: attention"],
    "prepend: {mlp: [dff]}": ["branch.prepend.mlp=dff: no such dim; nearest legal: d_ff"],
    "prepend: {mlp: [d_ff, d_ff]}": ["branch.prepend.mlp=d_ff: named twice"],
    "prepend: {mlp: [d_ff]}\nonly: [straem]": ["branch.only=straem: no such region; nearest legal: stream"],
    "prepend: {mlp: [d_ff]}\nonly: [stream, stream]": ["branch.only=stream: named twice"],
}
TYPED = {
    "d_ff:b;d_ff:b": ["tensor.layout=d_ff: is given twice; nearest legal: d_ff:b"],
    "d_ff:b+b": ["tensor.layout=d_ff:b+b: an axis splits a dim once; nearest legal: d_ff:b"],
    "{d_ff: b, d_ff: b}": ["d_ff is given twice"],
    "{mlp: {d_ff: b}, mlp: {}}": ["mlp is given twice"],
}


def refusal(tmp_path, group: str, text: str, *typed: str) -> str:
    from platform.predict.make_plan import make_plan

    (tmp_path / group).mkdir()
    (tmp_path / group / "own.yaml").write_text(text + "\n")
    with pytest.raises(ConfigError) as refused:
        make_plan(compose_config(["+experiment=gpt_quick", f"{group}=own", *typed], str(tmp_path)))
    assert all("\n" not in line for line in refused.value.violations)
    return "\n".join(refused.value.violations)


@pytest.mark.parametrize(("text", "said"), TENSOR.items(), ids=TENSOR)
def test_an_own_tensor_scheme(tmp_path, text, said):
    line = refusal(tmp_path, "tensor", f"scheme: own\n{text}", "tensor.axes.b=2", "parallel.data=1")
    assert all(part in line for part in said), line


@pytest.mark.parametrize("text", NAMELESS)
def test_a_tensor_scheme_without_a_name(tmp_path, text):
    line = refusal(tmp_path, "tensor", text, "tensor.axes.b=2", "parallel.data=1")
    assert "tensor.scheme=serial: a table that splits something needs a name" in line and "`scheme: NAME`" in line


@pytest.mark.parametrize(("text", "said"), BRANCH.items(), ids=BRANCH)
def test_an_own_branch(tmp_path, text, said):
    line = refusal(tmp_path, "branch", f"kind: own\n{text}", "branch.axes.g=2")
    assert all(part in line for part in said), line


def test_a_branch_without_a_name(tmp_path):
    assert "`kind: NAME`" in refusal(tmp_path, "branch", "append: {stream: [batch]}", "branch.axes.g=2")


@pytest.mark.parametrize(("layout", "said"), TYPED.items(), ids=TYPED)
def test_a_typed_layout(layout, said):
    with pytest.raises(ConfigError) as refused:
        compose_config(["+experiment=gpt_quick", "tensor=layout", "tensor.axes.b=2", f"tensor.layout={layout}"])
    assert all(part in str(refused.value) for part in said), refused.value


@pytest.mark.parametrize(
    "file", sorted(p.relative_to(CONF) for g in ("tensor", "branch") for p in (CONF / g).iterdir())
)
def test_the_shipped_ones_are_right(file):
    axes = ["branch.axes.g=1"] if file.parent.name == "branch" and file.stem != "none" else []
    compose_config(["+experiment=gpt_quick", f"{file.parent}={file.stem}", *axes])
