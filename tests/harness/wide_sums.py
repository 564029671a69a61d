"""Gradients of a weight, summed over microbatches as a rank sums them, against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.runtime.flat_buffers import find_bucket_of_leaf
from platform.runtime.products import local_einsum_function
from platform.runtime.statistics import compute_and_add_gradient
from platform.train.rank_parameters import DTYPES
from tests.harness.oracle import configure, trainer_of

TOKENS = 64  # of a microbatch


@contextmanager
def kernels_on_cpus() -> Iterator[None]:
    """Products of CPUs that write to a wider type, as those of CUDA do: operands in 16 bits, added in fp32."""

    def mm(x: Tensor, y: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        return out.copy_(x.to(out_dtype) @ y.to(out_dtype))

    def addmm(added: Tensor, x: Tensor, y: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert added.data_ptr() == out.data_ptr() and out_dtype == out.dtype
        return out.add_(x.to(out_dtype) @ y.to(out_dtype))

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype_out", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    try:
        yield
    finally:
        library._destroy()


def errors(device: str, precision: str, microbatches: int) -> tuple[float, float]:
    """How far a weight's gradient is from the sum of its products in fp64, relative (2-norm), after so many
    microbatches: as the runtime sums it, and as a sum in the type of its products would be."""
    plan = make_plan(c := configure(precision=precision, layers=1))
    trainer = trainer_of(c, plan, SingleRank(plan.mesh, device))
    name, w = next((n, w) for n, w in trainer.weights.compute.items() if n.endswith("up"))
    owner = find_bucket_of_leaf(w)
    assert owner
    rows, columns = w.shape
    dims = ("token", "row"), ("token", "column"), ("row", "column")
    draw = torch.Generator(device).manual_seed(0)
    exact = torch.zeros(rows, columns, dtype=torch.float64, device=device)
    narrow = torch.zeros_like(w, requires_grad=False)
    for _ in range(microbatches):
        x, y = (torch.randn(TOKENS, n, generator=draw, device=device).add_(0.5) for n in (rows, columns))
        x, y = x.to(w.dtype), y.to(w.dtype)
        compute_and_add_gradient(w, partial(local_einsum_function(*dims), x, y, None))
        owner[0].end_backward_pass()
        exact += x.double().t() @ y.double()
        narrow += x.t() @ y
    summed = owner[0].gradient_sums()[name]
    assert summed.dtype == DTYPES[precision][1]
    return tuple(float((x.double() - exact).norm() / exact.norm()) for x in (summed, narrow))
