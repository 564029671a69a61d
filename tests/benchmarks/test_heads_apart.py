"""The two ways to compute heads in benchmarks/heads_apart.py are the same attention, and it prints every case."""

from __future__ import annotations

import torch

from benchmarks import heads_apart


def test_both_ways_are_one_function(capsys, monkeypatch):
    tensors = [torch.randn(2, 4, 8, 64, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    both = [f(*tensors) for f in (heads_apart.attend, heads_apart.attend_apart)]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), tensors) for y in both))
    monkeypatch.setattr("sys.argv", ["heads_apart.py", "--rounds", "3"])
    heads_apart.main()
    assert capsys.readouterr().out.count("\n") == 7
