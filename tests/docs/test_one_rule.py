"""docs/one-rule.md: what it derives is what the rule gives and what `platform.plan` prints."""

from __future__ import annotations

import pytest

from tests.docs.one_rule import PAGE, answer, generate


def test_the_page_is_what_the_rule_gives():
    assert generate(PAGE.read_text()) == PAGE.read_text(), "`python -m tests.docs.one_rule` writes the page"


@pytest.mark.parametrize(
    ("changed", "forward"),
    [
        ("H[L, B, F_t] = X[L, B, M] . W[M, F_t]", "-"),
        ("H[L, B, F_t] = X[L, B, M_t] . W[M, F_t]", "AllGather_t(X, M)"),
        ("H[L, B, F] = X[L, B, M_t] . W[M_t, F]", "AllReduce_t(H)"),
        ("H[L, B_t, F] = X[L, B, M_t] . W[M_t, F]", "ReduceScatter_t(H, B)"),
    ],
)
def test_another_layout_has_another_answer(changed, forward):
    assert answer(changed)[0] == forward


def test_one_axis_splits_one_dim():
    with pytest.raises(ValueError, match="axis t would split both B and F"):
        answer("H[L, B_t, F_t] = X[L, B_t, M] . W[M, F_t]")
