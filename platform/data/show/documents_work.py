"""Work of attention on the ranks that share the sequences of a step, with what their documents hide counted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.plan.core.plan import Plan
from platform.plan.reports.attention_work import ranks_of_context


def work_of_documents(plan: Plan, begins: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many scores each rank of a context computes per head, [ranks, sequences], for sequences whose tokens'
    documents begin at `begins` [sequences, length]."""
    column, places = np.arange(begins.shape[1]), ranks_of_context(plan)
    found = np.zeros((len(places), len(begins)), np.int64)
    for planned in plan.attentions:
        operation, out = planned.operation, planned.operation.outputs[0]
        seen = column - (begins if operation["begins"] else np.zeros_like(begins)) + 1
        seen = np.minimum(seen, operation["window"] or len(column))
        for i, at in enumerate(places):
            found[i] += sum(seen[:, q.first : q.end].sum(1) for q in plan.stretches(out, "length", at))
    return found


def busiest(work: NDArray[np.int64], together: int) -> float:
    """Return the `work` of the ranks that others wait for, in so many sequences `together`, in terms of the mean."""
    each = np.add.reduceat(work, np.arange(0, work.shape[1], together), 1)
    return float(each.max(0).sum() / each.mean(0).sum())
