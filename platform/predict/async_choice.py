"""Choice of asynchronous products (tensor.async_products): whether a run's products with weights gather what they read,
and scatter what they give, as they multiply (`platform.plan.async_products`), and why not.

On GPUs torch's fused operations write to the memory of peers and wait, in a kernel, for a signal of theirs. No abort of
NCCL ends that wait: where a peer dies, its group's survivors are ended and replaced, and their state in memory is lost.
So `auto` leaves them off where a run goes on after deaths; `on` says what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from platform.boundary.refusals import format_violation
from platform.config.fields import Config
from platform.plan.async_products import fuse_products, list_fused_axes
from platform.plan.plan import Plan
from platform.plan.whole_blocks import may_hold_collectives
from platform.predict.memory_budget import device_kind

KEY = "tensor.async_products"
_Reasons = tuple[tuple[str, Callable[[Config, Plan, Plan], object]], ...]  # of the plan that waits, and the fused one


def goes_on_after_deaths(config: Config, workers: int) -> bool:
    """Return True if survivors of a death form a mesh of a run again: fewer workers may go on, or others come."""
    e = config.elastic
    return e.replace or e.spares > 0 or e.min_workers < workers


def _needs_others(config: Config, plan: Plan) -> bool:
    """Return True if a plan should have such products: not one that has shrunk to ranks that compute layers alone."""
    return may_hold_collectives(plan.mesh) or (config.tensor.scheme, config.branch.kind) == ("serial", "none")


def _leaves_nodes(config: Config, plan: Plan, fused: Plan) -> bool:
    """Return True if ranks whose products are one with a collective lie, on GPUs, on several nodes."""
    from platform.predict.price import count_group_ranks  # with numpy
    from platform.predict.step_price import choose_pricing_hardware

    if device_kind(config) == "cpu":
        return False
    ranks = choose_pricing_hardware(config).ranks
    groups = (count_group_ranks(plan.mesh, (axis,), ranks) for axis in list_fused_axes(fused))
    return any(near < members for near, members in groups)


def _gains_nothing(config: Config, plan: Plan, fused: Plan) -> bool:
    """Return True if no step is predicted to take less with asynchronous products, on the hardware that is named."""
    from platform.predict.step_price import choose_pricing_hardware, step_price  # with numpy

    hardware = choose_pricing_hardware(config)
    return step_price(config, fused, hardware).seconds >= step_price(config, plan, hardware).seconds


def _ask_workers_of_plan(holds: Callable[[Config, int], object]) -> Callable[[Config, Plan, Plan], object]:
    """Return a reason by a configuration and its number of workers as one by its plans."""
    return lambda config, plan, _: holds(config, plan.mesh.world_size)


# why no run can have asynchronous products; then why `auto` leaves them off: the first that holds is told
_AGAINST: _Reasons = (
    ("its products are in 8 bits (precision)", lambda c, p, f: p.has_scaled_products),
    ("train.mlp_chunks gathers before its chunks", lambda c, p, f: p.mlp_chunks > 1),
    (
        "no product with weights gathers what it reads, or scatters what it gives, in equal blocks over one axis",
        lambda c, p, f: not list_fused_axes(f) and _needs_others(c, p),
    ),
)
_OF_RUN: tuple[tuple[str, Callable[[Config, int], object]], ...] = (  # by its configuration and number of workers
    (f"{KEY}=off", lambda c, _: c.tensor.async_products == "off"),
    ("no GPU is asked for (cluster.gpu, cluster.device)", lambda c, _: device_kind(c) == "cpu"),
    ("parallel.overlap=false", lambda c, _: not c.parallel.overlap),
    ("train.graphs=on records passes without them", lambda c, _: c.train.graphs == "on"),
    (
        "survivors of a death would not come back (elastic.replace, elastic.spares, elastic.min_workers)",
        goes_on_after_deaths,
    ),
)
_LEFT_OFF: _Reasons = tuple((reason, _ask_workers_of_plan(holds)) for reason, holds in _OF_RUN)
# by the file of the hardware
_FAR_APART: _Reasons = (
    ("torch's fused operations reach GPUs of one node, and its groups have several nodes", _leaves_nodes),
)
_NO_GAIN: _Reasons = (("no step is predicted to be shorter with them", _gains_nothing),)


def _find_reason(reasons: _Reasons, config: Config, plan: Plan) -> str:
    """Return the first of `reasons` that holds of a configuration and its plan, without fused products; "" if none."""
    fused = fuse_products(plan)
    return next((reason for reason, holds in reasons if holds(config, plan, fused)), "")


def reason_against_async_products(config: Config, plan: Plan) -> str:
    """Return why products of a run wait for their collectives, by its `plan` without fused ones; "" if none does."""
    chosen = config.tensor.async_products == "on"
    return _find_reason(_AGAINST + (_FAR_APART if chosen else _LEFT_OFF + _FAR_APART + _NO_GAIN), config, plan)


def read_async_products(config: Config, workers: int) -> str:
    """Return how products of a run of so many workers may be asynchronous: on, off, or auto if that is faster."""
    if config.tensor.async_products == "on" or not any(holds(config, workers) for _, holds in _OF_RUN):
        return config.tensor.async_products
    return "off"


def choose_async_products(config: Config, plan: Plan) -> Plan:
    """Return a configuration's plan with asynchronous products, as tensor.async_products says; itself without them."""
    if config.tensor.async_products == "on":  # refused before where GPUs cannot
        return plan if _find_reason(_AGAINST, config, plan) else fuse_products(plan)
    return plan if reason_against_async_products(config, plan) else fuse_products(plan)


def settle_async_products(config: Config, plan: Plan) -> None:
    """Settle tensor.async_products=auto in place as a `plan` has it, where the file of the hardware decided that."""
    if config.tensor.async_products == "auto" and not _find_reason(_AGAINST + _LEFT_OFF, config, plan):
        config.tensor.async_products = "on" if list_fused_axes(plan) else "off"


def describe_async_products(config: Config, plan: Plan) -> str:
    """Return the line of a plan's screen on products that could be one with their collectives; "" where none could."""
    if axes := list_fused_axes(plan):
        return f"products gather and scatter over {', '.join(axes)} as they multiply"
    if not list_fused_axes(fuse_products(plan)):
        return ""
    return f"products wait for their collectives, as {reason_against_async_products(config, plan)}"


def warnings_of_async_products(config: Config, plan: Plan) -> list[str]:
    """Return what a user who asks for asynchronous products on GPUs has to know of deaths."""
    if device_kind(config) == "cpu" or not list_fused_axes(plan):
        return []
    if not goes_on_after_deaths(config, plan.mesh.world_size):
        return []
    return [f"{KEY}=on: if a worker dies, the others of its groups are ended and replaced, not kept with their state"]


def violations_of_async_products(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line if tensor.async_products=on asks for products that the run cannot have."""
    if config.tensor.async_products == "on" and (reason := reason_against_async_products(config, plan)):
        yield format_violation("tensor.async_products", "on", reason, ["auto", "off"])
