"""Choice of the experts of each token, and what it adds to the loss (Shazeer et al. 2017; Fedus et al. 2021)."""

from __future__ import annotations

from platform.plan.language.mistakes import ModelMistake
from platform.plan.language.ops import Spec
from platform.plan.operations.op import Op, planned, reading
from platform.plan.operations.storages import Gradients, Saved

TOKENS = ("length", "batch")


class RouteOp(Op):
    """Weights [length batch experts] with which experts compute each token, from the `scores` of all experts, of type
    `spec`, both in the type of statistics; and the auxiliary loss of each token [length batch], None in generation.
    `router`: a `platform.plan.language.functions.Router`. An expert takes the first tokens of each sequence for which
    it has slots; the weights of others, of experts that were not chosen, and of padding in the data tensor `tokens` are
    0. All of this depends on one sequence at a time and on the `states` that the step before has left, so on no plan.
    """

    wide = "inputs", "outputs"

    def record(self, ops, name, scores, spec, tokens, router, states=()):
        if (spec.dims, spec.dtype) != ((*TOKENS, "experts"), "accumulate"):
            raise ModelMistake(name, f"a router's scores are [length batch experts] accumulate, unlike {spec}")
        of_tokens = Spec(spec.region, TOKENS, tuple(pair for pair in spec.sizes if pair[0] in TOKENS))
        outs = [spec] if ops.cache else [spec, of_tokens]
        found = ops.record(self.kind, name, [scores], [spec, *states], outs, [tokens], router=router)
        return (found, None) if ops.cache else found

    def plan(self, planner, operation):
        """Plan the routing of whole sequences to all experts, whose scores are gathered; results are split again."""
        spec = operation.inputs[0]
        layout = planner.layout(spec).restrict(("batch",))
        conversions = [planner.enter(spec, layout, layout.axes)]
        conversions += [planner.split(out, layout) for out in operation.outputs]
        return planned(planner, operation, layout, conversions, **reading(planner, spec, layout))

    def run(self, ops, name, scores, spec, tokens, router, states=()):
        """Compute the weights of experts and the tokens' auxiliary losses, these in the compute type in the end."""
        enter, *leave = ops.planned(self.kind, name).conversions
        scores = ops.apply(scores, enter)
        if ops.absent(scores):
            return scores, scores.to(ops.narrow) if len(leave) > 1 else None
        real, sizes = tokens[self.kind, name] >= 0, ops.plan.planner.sizes_of(spec)
        slots = sizes.get("slots", sizes["length"])  # where experts have rows, they take every token
        rows = {p.role: ops.parameter(p) for p in states}
        weights, auxiliary, counts = ops.kernels.slots.route(scores, real, router, slots, rows)
        ops.count_routed(name, counts, ops.planned(self.kind, name).compute_axes)
        found = weights, auxiliary.to(ops.narrow)
        results = ops.apply_each(found[: len(leave)], leave)
        return results[0], results[1] if len(leave) > 1 else None

    def meter(self, ops, name, scores, spec, tokens, router, states=()):
        """Count the memory of weights and losses; scores are kept, and the choice, by which the backward pass weighs
        them again."""
        found = ops.planned(self.kind, name)
        enter, *leave = found.conversions
        scores = ops.apply(scores, enter)
        if ops.absent(scores):
            return scores, scores if len(leave) > 1 else None
        n, rows = scores.elements, found.token_count

        def backward(_: Gradients, __: Saved) -> Gradients:
            """Count the weights, made again, and the gradient of the scores."""
            numbers = 7 + router.normalised
            held = ops.new(numbers * n, ops.wide), ops.integers(3 * n, 1)  # noqa: F841  (until the gradient is there)
            return [ops.new(n, ops.wide)]

        made = ops.new(3 * n, ops.wide)
        numbers = ops.integers(n)  # of the tokens, in the order of each expert's
        del numbers, made
        weights, auxiliary = ops.tensor(n, ops.wide), ops.tensor(rows)
        best = ops.integers(rows * router.chosen)
        ops.note([weights, auxiliary], [scores], (scores.storage, best), backward)
        results = ops.apply_each((weights, auxiliary)[: len(leave)], leave)
        return results[0], results[1] if len(leave) > 1 else None
