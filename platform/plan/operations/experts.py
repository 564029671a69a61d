"""Experts: the choice of each token's experts and its share of the loss (`RouteOp`: Shazeer et al. 2017; Fedus et al.
2021), and the way of tokens to them and back.

Tokens go to all the experts that they choose, as packed rows (`DispatchRowsOp`, `CombineRowsOp`), or to slots, of which
each expert has a fixed number (`DispatchOp`, `CombineOp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from math import comb, prod
from typing import Any, NamedTuple

from platform.plan.layout import Layout
from platform.plan.model_types import Spec, tensor_dtype
from platform.plan.operation_plan import Collective, PlannedOperation
from platform.plan.operations.op import (
    INTEGER,
    BlockOp,
    Gradients,
    MeteredStorage,
    Op,
    Saved,
    Value,
    assemble_plan,
    token_fields,
)
from platform.plan.planner import Planner
from platform.plan.rule import Conversion, RelayoutStep
from platform.plan.scheme import ModelMistake

TOKENS = ("length", "batch")


class RouteOp(Op):
    """Weights [length batch experts] with which experts compute each token, from the `scores` of all experts, of type
    `spec`, both in the type of statistics; and the auxiliary loss of each token [length batch], None in generation.
    `router`: a `platform.plan.model_types.Router`. An expert takes the first tokens of each sequence for which
    it has slots; the weights of others, of experts that were not chosen, and of padding in the data tensor `tokens` are
    0. All of this depends on one sequence at a time and on the `states` that the step before has left, so on no plan.
    """

    wide = "inputs", "outputs"

    def record_operation(self, ops, name, scores, spec, tokens, router, states=()):
        if (spec.dims, spec.dtype) != ((*TOKENS, "experts"), "accumulate"):
            raise ModelMistake(name, f"a router's scores are [length batch experts] accumulate, unlike {spec}")
        of_tokens = Spec(spec.region, TOKENS, tuple(pair for pair in spec.sizes if pair[0] in TOKENS))
        outs = [spec] if ops.cache else [spec, of_tokens]
        symbols = ops.record_operation(self.kind, name, [scores], [spec, *states], outs, [tokens], router=router)
        return (symbols, None) if ops.cache else symbols

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the routing of whole sequences to all experts, whose scores are gathered; results are split again."""
        spec = operation.inputs[0]
        layout = planner.layout(spec).restrict_dims(("batch",))
        conversions = [planner.operand_conversion(spec, layout, layout.axes)]
        conversions += [planner.result_conversion(out, layout) for out in operation.outputs]
        return assemble_plan(planner, operation, layout, conversions, **token_fields(planner, spec, layout))

    def run_on_blocks(self, ops, name, scores, spec, tokens, router, states=()):
        """Compute the weights of experts and the tokens' auxiliary losses, these in the compute type in the end."""
        enter, *leave = ops.operation_plan(self.kind, name).conversions
        scores = ops.convert_block(scores, enter)
        if ops.absent(scores):
            return scores, scores.to(ops.compute_dtype) if len(leave) > 1 else None
        real, sizes = tokens[self.kind, name] >= 0, ops.plan.planner.tensor_sizes(spec)
        slots = sizes.get("slots", sizes["length"])  # where experts have rows, they take every token
        rows = {p.role: ops.parameter_block(p) for p in states}
        weights, auxiliary, counts = ops.kernels.expert_rows.route_tokens(scores, real, router, slots, rows)
        ops.count_routed(name, counts, ops.operation_plan(self.kind, name).compute_axes)
        weights_and_losses = weights, auxiliary.to(ops.compute_dtype)
        results = ops.convert_blocks(weights_and_losses[: len(leave)], leave)
        return results[0], results[1] if len(leave) > 1 else None

    def meter_memory(self, ops, name, scores, spec, tokens, router, states=()) -> tuple[Value, Value | None]:
        """Count the memory of weights and losses; scores are kept, and the choice, by which the backward pass weighs
        them again."""
        planned = ops.operation_plan(self.kind, name)
        enter, *leave = planned.conversions
        scores = ops.convert_block(scores, enter)
        if ops.absent(scores):
            return scores, scores if len(leave) > 1 else None
        n, rows = scores.elements, planned.token_count

        def meter_backward(_: Gradients, __: Saved) -> Gradients:
            """Count the weights, made again, and the gradient of the scores."""
            numbers = 7 + router.normalised
            held = ops.new(numbers * n, ops.wide), ops.integers(3 * n, 1)  # noqa: F841  (until the gradient is there)
            return [ops.new(n, ops.wide)]

        scratch = ops.new(3 * n, ops.wide)
        numbers = ops.integers(n)  # of the tokens, in the order of each expert's
        del numbers, scratch
        weights, auxiliary = ops.tensor(n, ops.wide), ops.tensor(rows)
        best = ops.integers(rows * router.chosen)
        ops.note_operation([weights, auxiliary], [scores], (scores.storage, best), meter_backward)
        results = ops.convert_blocks((weights, auxiliary)[: len(leave)], leave)
        return results[0], results[1] if len(leave) > 1 else None


def find_sharing_axes(planner: Planner, out: Spec, exchanged: Sequence[str]) -> tuple[str, ...]:
    """Return the axes over which experts of tokens of type `out` are split, if these divide the tokens' last dim."""
    # ranks along them have the same tokens; over `exchanged` each sends a part, and the parts are joined at the experts
    d = out.dims[-1]
    taken = planner.scheme.activation_layout(out.region, ("experts", "batch", "length", d))
    inside = planner.scheme.activation_layout(out.region, ("d_ff",))["d_ff"]
    axes = tuple(a for a in inside if a not in (*taken.axes, *taken.only))
    divides = planner.tensor_sizes(out)[d] % planner.mesh.count_ranks((*taken[d], *axes)) == 0
    return axes if exchanged and divides else ()


class RowEnds(NamedTuple):
    """Layout of `tokens` where they become rows, and are summed. Ranks along `held` have the same tokens and make rows
    for other experts; ranks along `exchanged` have other tokens, and send rows to each other's experts. Ranks along
    `sharing` have the same experts, and each sends a part of each row."""

    tokens: Layout
    held: tuple[str, ...]
    exchanged: tuple[str, ...]
    sharing: tuple[str, ...]

    @classmethod
    def find_row_layout(cls, planner: Planner, spec: Spec, out: Spec) -> RowEnds:
        """Return the ends of the way of tokens of type `spec` to rows of type `out`. Raises ValueError if axes do not
        divide the batch or the experts."""
        d = out.dims[-1]
        goal = planner.scheme.activation_layout(out.region, ("experts", "batch", "length", d))
        goal_axes = (*goal["experts"], *goal["batch"])
        # as few axes as can be leave the batch: a token is smaller than its rows
        kept_axes = tuple(takewhile(lambda a: a in goal_axes, planner.layout(spec)["batch"]))
        batch = (*kept_axes, *(a for a in goal["batch"] if a not in kept_axes))
        for dim, axes in (("batch", batch), ("experts", goal["experts"])):
            if planner.sizes[dim] % planner.mesh.count_ranks(axes):
                raise ValueError(f"{dim}={planner.sizes[dim]} would be split over {'+'.join(axes)}")
        exchanged = tuple(a for a in goal["experts"] if a in kept_axes)
        held = tuple(a for a in goal["experts"] if a not in kept_axes)
        sharing = find_sharing_axes(planner, out, exchanged)
        rules = {"length": goal["length"], "batch": batch, d: (*goal[d], *sharing)}
        return cls(Layout.build_canonical(rules, goal.only), held, exchanged, sharing)

    @property
    def compute_axes(self) -> tuple[str, ...]:
        """Return the axes that split the pairs of a token and an expert, and d_model, where rows are made."""
        return (*self.tokens.axes, *self.held)

    def row_conversion(self, planner: Planner, spec: Spec, out: Spec, chosen: int) -> Conversion:
        """Return the conversion of rows of type `out` to their experts' ranks, each token once to each, in the sizes of
        the worst routing."""
        length, batch, width = planner.local_shape(spec, self.tokens)
        if not self.exchanged:
            shape = planner.local_shape(out, self.layout_of_sent_rows(planner, out))
            return Conversion((), (), shape, shape, tensor_dtype(out), True)
        ranks = planner.mesh.count_ranks(self.exchanged)
        before, after = (length * batch * min(chosen, ranks), width), (length * batch * ranks, width)
        exchange = RelayoutStep("all_to_allv", planner.mesh.order_axes(self.exchanged), 0, 1, self.tokens.only, after)
        back = replace(exchange, dim=1, joined=0, shape=before)
        return Conversion((exchange,), (back,), before, after, tensor_dtype(out), True)

    def collectives_of_weights(
        self, planner: Planner, rows: Conversion, weights: Spec, chosen: int, phase: str
    ) -> list[Collective]:
        """Return the collective of weights that go with copies of tokens, or of their gradients; [] if none go."""
        if not sends_copies(self.exchanged, seats := self.count_seats(planner), chosen):
            return []
        [collective] = planner.collectives_of_steps(rows.forward, rows.before, phase, tensor_dtype(weights), True)
        return [replace(collective, elements=collective.rows * seats)]

    def count_seats(self, planner: Planner) -> int:
        """Return for how many experts a rank of the exchange can have rows, lent ones among them."""
        over = (*self.held, *self.exchanged)
        return planner.sizes["experts"] // planner.mesh.count_ranks(over) + planner.scheme.lent

    def layout_of_sent_rows(self, planner: Planner, out: Spec) -> Layout:
        """Return the layout of rows of type `out` at their experts' ranks as they are sent: parts of each."""
        layout, d = planner.layout(out), out.dims[-1]
        partial = tuple(a for a in layout.partial if a not in self.sharing)
        return replace(Layout.build_canonical({**layout, d: self.tokens[d]}, layout.only), partial=partial)

    def join_conversion(self, planner: Planner, out: Spec) -> Conversion:
        """Return the conversion that joins the parts of rows at their experts, and sums and splits their gradients."""
        source, target = self.layout_of_sent_rows(planner, out), planner.layout(out)
        return planner.operand_conversion(out, target, [a for a in target.gradient if a in self.sharing], source=source)

    def collectives_of_row_counts(self, planner: Planner, chosen: int) -> list[Collective]:
        """Return the collective that exchanges numbers of rows before the rows; [] without an exchange."""
        axes, seats = planner.mesh.order_axes(self.exchanged), self.count_seats(planner)
        numbers = planner.mesh.count_ranks(axes) * (seats + sends_copies(axes, seats, chosen))
        return [Collective("all_to_all", axes, numbers, "integers", "forward", self.tokens.only)] if axes else []

    def exchange_seats(self, planner: Planner, out: Spec, rank: int) -> tuple[tuple[str, ...], tuple[int, ...], int]:
        """Return the axes of a rank's exchange, the first expert of each rank there, and how many experts each has."""
        mesh, over = planner.mesh, planner.row_expert_axes(out)["experts"]
        axes, each = mesh.order_axes(self.exchanged), planner.sizes["experts"] // mesh.count_ranks(over)
        group = mesh.group_of_rank(rank, axes) if axes else (rank,)
        return axes, tuple(mesh.index_in_group(mesh.rank_coordinates(member), over) * each for member in group), each


def share_of_copies(experts: int, seats: int, chosen: int) -> float:
    """Return how many ranks with `seats` of `experts` evenly `chosen` ones of a token are on, for each of these."""
    return experts / seats * (1 - comb(experts - seats, chosen) / comb(experts, chosen)) / chosen


def sends_copies(axes: Sequence[str], seats: int, chosen: int) -> bool:
    """Return True if tokens go once to each rank along `axes`: one may have several of a token's `chosen` experts."""
    return bool(axes) and min(seats, chosen) > 1


def _check_row_types(name: str, spec: Spec, out: Spec) -> None:
    """Raise ModelMistake if tokens of type `spec` are no rows of type `out`, or rows no tokens."""
    if spec.dims[:2] != TOKENS or out.dims[:1] != ("rows",) or spec.dims[2:] != out.dims[1:] or len(out.dims) != 2:
        raise ModelMistake(name, f"tokens [length batch d] are rows [rows d], unlike {spec} and {out}")


SORTED = 2  # accesses of rows that are put in the order of their experts, from that of the ranks that they are of


def add_row_accesses(op: Op, operation, operations, forward: int, backward: int) -> tuple[float, float]:
    """Return an operation's accesses of rows by pass; `forward`, `backward`: sums by token that each reads too."""
    planned, each = operations.get((operation.kind, operation.name)), 1 / operation["chosen"]
    first, second = op.memory_accesses
    if planned and (seats := _count_seats_of_copies(planned)):
        experts = next(c.after[-1] for c in planned.conversions if c.dtype == "accumulate")
        copies = share_of_copies(experts, seats, operation["chosen"])
        copied, added = 2 * copies, copies + each  # from tokens, or from copies to their sum
        more = (added, copied) if forward else (copied, added)
        return first + forward * copies + more[0], second + backward * copies + more[1]
    moved = SORTED * any(c.op == "all_to_allv" for c in planned.collectives) if planned else 0
    return first + forward * each + moved, second + backward * each + moved


class DispatchRowsOp(Op):
    """Activation x of type `spec` [length batch d_model] as rows at its experts, of type `out` [rows d_model], expert
    after expert and token after token; and the counts of the rows of each expert, which products and `combine_rows`
    take. A token has a row for each expert whose weight, of type `of_weights`, is not 0: at most `chosen`. Tokens are
    converted to the rows' other dims and copied; then rows are sent along axes that move from batch to experts. The
    rows' gradient may be partial: it is summed as the tokens' gradient, which is smaller."""

    wide = ("inputs",)
    open = {"outputs": "gradient"}
    moves_rows = True
    is_traceable = False  # it counts rows
    memory_accesses = (2, 1)  # of rows: copied from tokens; their gradients are read, to be summed

    def accesses_of_both_passes(self, operation, operations):
        """Return the accesses of rows, and of the sums of their gradients."""
        return add_row_accesses(self, operation, operations, 0, 1)

    def record_operation(self, ops, name, x, spec, weights, of_weights, out, chosen):
        _check_row_types(name, spec, out)
        ops.weights_of_rows[name] = weights
        rows = ops.record_operation(self.kind, name, [x, weights], [spec, of_weights], [out], chosen=chosen)
        return rows, name

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan where tokens become rows, and the largest exchange of rows; weights get no gradient from here."""
        (spec, weights), (out,) = operation.inputs, operation.outputs
        ends = RowEnds.find_row_layout(planner, spec, out)
        enter_weights = planner.operand_conversion(weights, ends.tokens.restrict_dims(weights.dims), ends.compute_axes)
        rows = ends.row_conversion(planner, spec, out, operation["chosen"])
        enter = planner.operand_conversion(spec, ends.tokens, (*ends.compute_axes, *planner.layout(out).gradient))
        conversions = [enter, replace(enter_weights, backward=()), rows, ends.join_conversion(planner, out)]
        sent = ends.collectives_of_row_counts(planner, operation["chosen"])
        sent += ends.collectives_of_weights(planner, rows, weights, operation["chosen"], "forward")
        return assemble_plan(planner, operation, ends.tokens, conversions, sent, compute_axes=ends.compute_axes)

    def run_on_blocks(self, ops, name, x, spec, weights, of_weights, out, chosen):
        """Copy this rank's tokens and send them to experts; return the rows of this rank's experts, and counts."""
        planned = ops.operation_plan(self.kind, name)
        enter, weights_conversion, _, join = planned.conversions
        x, weights = ops.convert_blocks((x, weights.detach()), (enter, weights_conversion))
        if ops.absent(x):
            return x, None
        kernel, ends = ops.kernels.expert_rows, RowEnds.find_row_layout(ops.plan.planner, spec, out)
        own_seats, lent = ends.exchange_seats(ops.plan.planner, out, ops.communicator.rank), ops.plan.scheme.lent
        own_place = ops.communicator.group_index(own_seats[0]) if own_seats[0] else 0
        seats = kernel.ExpertSeats(*own_seats, own_place, lent, ops.communicator.lent.get(name, ()))
        with ops.communicator.keep_turn():
            counts = kernel.count_rows(ops.communicator, weights, seats, chosen)
        ops.record_sent_rows(name, zip(seats.experts_by_seat, counts.by_expert, strict=True), counts.sent)
        return ops.convert_block(kernel.dispatch_rows(ops.communicator, x, counts), join), counts

    def meter_memory(self, ops, name, x, spec, weights, of_weights, out, chosen) -> tuple[Value, Value]:
        """Count the memory of rows by the worst routing; of their places integers are kept."""
        enter, weights_conversion, rows, join = (planned := ops.operation_plan(self.kind, name)).conversions
        x, weights = ops.convert_blocks((x, weights), (enter, weights_conversion))
        if ops.absent(x):
            return x, x
        sent_elements, local_elements = prod(rows.before), prod(join.before)
        n, tokens = x.elements, prod(enter.after[:2])
        places = _meter_row_places(ops, planned, tokens, weights.elements // tokens, chosen)
        expert_rows = ops.tensor(sent_elements)
        expert_rows = _meter_moved_rows(ops, expert_rows, rows, local_elements)

        def meter_backward(gradients: Sequence[Any], _: Any) -> Sequence[Any]:
            """Count the rows on their way back, and the sum of each token's."""
            back = _meter_moved_rows(ops, None, rows, sent_elements)
            total = ops.new(n)
            del back
            return [total]

        ops.note_operation([expert_rows], [x], (places,), meter_backward)
        return ops.convert_block(expert_rows, join), places


class CombineRowsOp(Op):
    """Sum over its experts of what they made of each token, the rows `y` of type `spec` [rows d_model] with their
    `counts`, times the weights that `dispatch_rows` was given: `out` [length batch d_model], 0 for tokens without an
    expert. If `y` is partial, so are these sums, which are smaller, and summed over ranks last."""

    wide = ("inputs",)
    open = {"inputs": "value"}
    moves_rows = True
    is_traceable = False
    memory_accesses = (1, 2)  # of rows: read, to be summed; read again for the weights, and their gradients written

    def accesses_of_both_passes(self, operation, operations):
        """Return the accesses of rows, of their sums, and of the gradient of these, for weights and for rows."""
        return add_row_accesses(self, operation, operations, 1, 2)

    def record_operation(self, ops, name, y, spec, counts, weights, of_weights, out, chosen):
        _check_row_types(name, out, spec)
        if ops.weights_of_rows.get(counts) is not weights:
            raise ModelMistake(name, "weights are not those with which `dispatch_rows` has sent its rows")
        return ops.record_operation(self.kind, name, [y, weights], [spec, of_weights], [out], chosen=chosen)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the way back of rows to where their tokens were copied, and of sums, which are partial over ranks with
        rows of other experts, to the result's layout."""
        (spec, weights), (out,) = operation.inputs, operation.outputs
        ends = RowEnds.find_row_layout(planner, out, spec)
        sent = ends.row_conversion(planner, out, spec, operation["chosen"])
        rows = replace(sent, forward=sent.backward, backward=sent.forward, before=sent.after, after=sent.before)
        parts = ends.layout_of_sent_rows(planner, spec)
        axes = (*ends.compute_axes, *parts.partial)
        enter_weights = planner.operand_conversion(weights, ends.tokens.restrict_dims(weights.dims), axes)
        summands = replace(ends.tokens, partial=(*ends.held, *parts.partial))
        leave = planner.operand_conversion(out, planner.layout(out), (), source=summands)
        conversions = [planner.operand_conversion(spec, parts, ()), rows, enter_weights, leave]
        back = ends.collectives_of_weights(planner, sent, weights, operation["chosen"], "backward")
        return assemble_plan(planner, operation, ends.tokens, conversions, back, compute_axes=ends.compute_axes)

    def run_on_blocks(self, ops, name, y, spec, counts, weights, of_weights, out, chosen):
        """Send the rows of this rank's experts back, and add up the rows of its tokens."""
        split, _, weights_conversion, leave = ops.operation_plan(self.kind, name).conversions
        weights = ops.convert_block(weights, weights_conversion)
        if counts is None:
            return ops.convert_block(ops.build_empty_block([y, weights]), leave)
        y = ops.convert_block(y, split)
        return ops.convert_block(ops.kernels.expert_rows.combine_rows(ops.communicator, y, weights, counts), leave)

    def meter_memory(self, ops, name, y, spec, counts, weights, of_weights, out, chosen) -> Value:
        """Count the memory of the weighted sum; rows, as they came back, and weights are kept."""
        split, rows, weights_conversion, leave = (planned := ops.operation_plan(self.kind, name)).conversions
        weights = ops.convert_block(weights, weights_conversion)
        if ops.absent(y):
            return ops.convert_block(ops.build_empty_block([y, weights]), leave)
        y = ops.convert_block(y, split)
        n, sent_elements, received_elements = prod(leave.before), prod(rows.after), prod(rows.before)
        if not (seats := _count_seats_of_copies(planned)):
            return ops.convert_block(_meter_weighted_sum(ops, y, weights, rows, n, sent_elements), leave)
        # weights of copies have their bytes in the places
        of_copies = Value(MeteredStorage(ops.ledger, 0, rows.before[0] * seats), rows.before[0] * seats)
        sums = _meter_weighted_sum(ops, y, of_copies, Conversion(), received_elements, y.elements)
        moved = _meter_moved_rows(ops, sums, rows, sent_elements)
        total = ops.tensor(n)
        del moved

        def meter_backward(gradients: Sequence[Any], _: Any) -> Sequence[Any]:
            """Count the gradients of the sums, which go to ranks of experts, and of the weights, which come back."""
            of_sums = _meter_moved_rows(ops, ops.tensor(sent_elements), rows, received_elements)
            return [of_sums.storage, ops.new(weights.elements, ops.wide)]

        ops.note_operation([total], [sums, weights], (weights.storage,), meter_backward)
        return ops.convert_block(total, leave)


def _meter_weighted_sum(ops, y: Value, weights: Value, rows: Conversion, n: int, places: int) -> Value:
    """Count the memory of a sum of `n` elements of rows that come back to `places`; these and the weights are kept."""
    back, elements = _meter_moved_rows(ops, y, rows, places), y.elements
    total = ops.tensor(n)
    scratch = 0 if ops.wide == ops.plan.itemsize["compute"] else 2 * n  # rows of one place, in the wider type
    ops.new(scratch, ops.wide)

    def meter_backward(gradients: Sequence[Any], _: Any) -> Sequence[Any]:
        """Count the gradients of the weights, and of the rows on their way."""
        of_weights = ops.new(weights.elements, ops.wide)
        ops.new(scratch, ops.wide)
        return [_meter_moved_rows(ops, ops.tensor(places), rows, elements).storage, of_weights]

    ops.note_operation([total], [y, weights], (back.storage, weights.storage), meter_backward)
    return total


def _count_seats_of_copies(planned: PlannedOperation) -> int:
    """Return in how many seats the copies of tokens that a planned operation sends have weights; 0 if it sends none."""
    weights = (c for c in planned.collectives if c.op == "all_to_allv" and c.dtype == "accumulate")
    return next((c.elements // c.rows for c in weights), 0)


def _meter_moved_rows(ops, rows, conversion: Conversion, elements: int):
    """Count the memory of rows on their way; return what there is in the end, of `elements`."""
    if not conversion.forward:
        return rows if rows is not None else ops.tensor(elements)
    moved_rows = ops.tensor(max(prod(conversion.before), prod(conversion.after)))
    ordered = ops.tensor(elements)
    del rows, moved_rows
    return ordered


def _meter_row_places(ops, planned: PlannedOperation, tokens: int, experts: int, chosen: int):
    """Count the integers that say which rows are of which tokens, and where each token's lie; and weights of copies."""
    _, _, rows, join = planned.conversions
    ops.integers(tokens * (experts + 6 * chosen))  # while they are sorted
    if ops.plan.scheme.lent:
        ops.integers(tokens * (2 * experts + 8 * chosen))
    sent, received = rows.before[0], rows.after[0]
    if not (seats := _count_seats_of_copies(planned)):
        return ops.integers(2 * tokens * chosen + sent + (2 * received if rows.forward else 0))
    ops.integers(received * (seats + 6 * min(chosen, seats)))
    places = 2 * tokens * chosen + 4 * sent + 2 * received * min(chosen, seats) + join.before[0]
    return ops.integers(places * INTEGER + received * seats * ops.wide, 1)


PLACES = ("experts", "batch", "slots")
SUMMED = 3  # integers that a sum of rows takes for each: its index, where sums begin, and how many rows they have


def _check_slot_types(name: str, spec, out) -> None:
    """Raise ModelMistake if tokens of type `spec` do not go to places of type `out`, or back."""
    expected_dims = (*TOKENS, *out.dims[3:])
    if out.dims[:3] != PLACES or spec.dims != expected_dims or len(expected_dims) != 3 or spec.dtype != out.dtype:
        raise ModelMistake(
            name, f"tokens [length batch d] have places [experts batch slots d], unlike {spec} and {out}"
        )


def _layout_beside_slots(planner: Planner, spec: Spec, places: Spec) -> Layout:
    """Return the layout of tokens of type `spec` where they go to slots of type `places`, or come from there."""
    at_experts, d = planner.layout(places), spec.dims[-1]
    layout = planner.layout(spec).restrict_dims(spec.dims[1:]).drop_axes((*at_experts.gradient, *at_experts.partial))
    sharing = find_sharing_axes(planner, places, [a for a in at_experts["experts"] if a in layout["batch"]])
    sharing = tuple(a for a in sharing if a not in (*layout.axes, *layout.only))  # along which the tokens are the same
    return Layout.build_canonical({**layout, d: (*layout[d], *sharing)}, layout.only)


class DispatchOp(BlockOp):
    """Activation x of type `spec` [length batch d_model] in the slots of experts: `out` [experts batch slots d_model].
    A token lies in the next free slot of each of its sequence's experts whose weight, of type `of_weights`, is not 0:
    at most `chosen` of them; empty slots are 0. It computes where the sequences are, each of them whole; the result is
    then converted, by an all-to-all where an axis moves from batch to experts. The slots' gradient may be partial: it
    is summed as the tokens' gradient, which is smaller."""

    wide = ("inputs",)
    open = {"outputs": "gradient"}
    sums_rows = True

    def record_operation(self, ops, name, x, spec, weights, of_weights, out, chosen):
        _check_slot_types(name, spec, out)
        return ops.record_operation(self.kind, name, [x, weights], [spec, of_weights], [out], chosen=chosen)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the gathers of whole sequences, and the conversion of the slots; weights get no gradient from here."""
        (spec, of_weights), (out,) = operation.inputs, operation.outputs
        goal, layout = planner.layout(out), _layout_beside_slots(planner, spec, out)
        weights_conversion = planner.operand_conversion(of_weights, layout.restrict_dims(of_weights.dims), layout.axes)
        enter = planner.operand_conversion(spec, layout, (*layout.axes, *goal.gradient))
        summed = (a for a in goal.gradient if a in layout.axes)
        leave = planner.operand_conversion(out, goal, (*goal.axes, *summed), source=layout)
        conversions = [enter, replace(weights_conversion, backward=()), leave]
        return assemble_plan(planner, operation, layout, conversions)

    def run_on_blocks(self, ops, planned, name, x, spec, weights, of_weights, out, chosen):
        """Copy this rank's tokens to the slots of all experts."""
        slots = ops.plan.planner.tensor_sizes(out)["slots"]
        return ops.kernels.expert_rows.dispatch_slots(x, weights.detach(), slots, chosen)

    def meter_memory(self, ops, planned, name, x, spec, weights, of_weights, out, chosen) -> Value:
        """Count the memory of the slots, with the numbers of each; where each token lies is kept."""
        n, leave = x.elements, planned.conversions[-1]
        slots, places = prod(leave.before[:3]), weights.elements // leave.before[0] * chosen
        held, lies = _meter_slot_places(ops, slots, places, weights.elements)
        read = _meter_slot_tokens(ops, slots), ops.new(slots), ops.integers(SUMMED * slots)
        result = ops.inner(planned, leave)
        del held, read

        def meter_backward(_: Gradients, __: Saved) -> Gradients:
            """Count the gradient of the tokens, each a sum over its slots."""
            read = ops.new(places), ops.integers(SUMMED * places)  # noqa: F841  (until the sum is there)
            return [ops.new(n)]

        ops.note_operation([result], [x], (lies,), meter_backward)
        return result


class CombineOp(BlockOp):
    """Sum over its experts of what they made of each token, `y` of type `spec` [experts batch slots d_model], times
    their weights: `out` [length batch d_model], 0 for tokens without an expert. If `y` is partial, so are these sums,
    which are smaller, and summed over ranks last."""

    wide = ("inputs",)
    open = {"inputs": "value"}
    sums_rows = True

    def record_operation(self, ops, name, y, spec, weights, of_weights, out, chosen):
        _check_slot_types(name, out, spec)
        return ops.record_operation(self.kind, name, [y, weights], [spec, of_weights], [out], chosen=chosen)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the sum where the sequences are: the slots of all experts are converted to there."""
        (spec, weights), (out,) = operation.inputs, operation.outputs
        layout = _layout_beside_slots(planner, out, spec)
        partial = tuple(a for a in planner.layout(spec).partial if a not in layout.axes)
        enter = planner.operand_conversion(spec, replace(layout.restrict_dims(spec.dims), partial=partial), layout.axes)
        axes = (*layout.axes, *partial)
        enter_weights = planner.operand_conversion(weights, layout.restrict_dims(weights.dims), axes)
        leave = planner.operand_conversion(out, planner.layout(out), (), source=replace(layout, partial=partial))
        return assemble_plan(planner, operation, layout, [enter, enter_weights, leave])

    def run_on_blocks(self, ops, planned, name, y, spec, weights, of_weights, out, chosen):
        """Add up what the experts made of this rank's tokens, in the type of statistics."""
        return ops.kernels.expert_rows.combine_slots(y, weights, chosen)

    def meter_memory(self, ops, planned, name, y, spec, weights, of_weights, out, chosen) -> Value:
        """Count the memory of the weighted sum, with the numbers of each slot; slots, weights and places are kept."""
        shape, by_expert, elements = planned.conversions[0].after, weights.elements, y.elements
        slots, places, dtype = prod(shape[:3]), by_expert // shape[0] * chosen, ops.plan.itemsize[of_weights.dtype]
        held, lies = _meter_slot_places(ops, slots, places, by_expert)
        read = ops.new(places, ops.wide), ops.integers(SUMMED * places)
        total = ops.inner(planned, planned.conversions[-1])
        _meter_sum_over_rows(ops, total.elements)
        del read

        def meter_backward(_: Gradients, __: Saved) -> Gradients:
            """Count the gradients of slots, each of a token's, and of weights."""
            of_places = ops.new(places, ops.wide), ops.integers(SUMMED * places)
            of_each = ops.new(by_expert, dtype)
            read = _meter_slot_tokens(ops, slots), ops.new(slots, dtype), ops.integers(SUMMED * slots)
            _meter_sum_over_rows(ops, elements)
            of_slots = ops.new(elements)
            del of_places, read
            return [of_slots, of_each]

        ops.note_operation([total], [y, weights], (y.storage, weights.storage, held, lies), meter_backward)
        return total


def _meter_slot_places(ops, slots: int, places: int, by_expert: int) -> tuple[MeteredStorage, MeteredStorage]:
    """Count the integers that say which token lies in each of the `slots`, and in which `places` each token lies."""
    held, lies = ops.integers(slots), ops.integers(places)
    ops.integers(3 * by_expert)  # while tokens are numbered
    return held, lies


def _meter_slot_tokens(ops, slots: int) -> MeteredStorage:
    """Count the numbers of the tokens in the `slots`, among all tokens of the rank."""
    ops.integers(3 * slots)  # while they are computed
    return ops.integers(slots)


def _meter_sum_over_rows(ops, elements: int) -> None:
    """Count what a sum of rows takes, of which each is cast to the type of statistics, unless it is that type."""
    if ops.wide != ops.plan.itemsize["compute"]:
        total = ops.new(elements, ops.wide)  # noqa: F841  (beside each row and its cast)
        row = ops.new(elements)  # noqa: F841
        ops.new(elements, ops.wide)
