"""Prices of the jobs of a sweep, beside each other: `python -m platform.plan -m`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from platform.boundary.redaction import redact_secrets
from platform.config.fields import Config
from platform.plan.plan import Plan
from platform.plan.plan_summary import format_seconds
from platform.predict.hardware import Hardware
from platform.predict.measured_runs import MeasuredRun
from platform.predict.memory_budget import predict_peak_bytes
from platform.predict.plan_report import align_rows
from platform.predict.step_price import build_step_work, memory_of_worker
from platform.predict.systems import System
from platform.predict.work import count_step_flops


class JobPrice(NamedTuple):
    """Price of a job of a sweep that differs from the others by its `arguments`: the `seconds` of a step of so many
    `sequences` by its `workers`; FLOP/s of a device by the FLOPs of the model (`model_speed`) and with recomputed ones
    (`hardware_speed`); bytes that a worker needs at most, and whether they are there (`fits`)."""

    arguments: str
    workers: int
    sequences: int
    seconds: float
    model_speed: float
    hardware_speed: float
    bytes: int
    fits: bool


def price_job(arguments: Sequence[str], config: Config, plan: Plan, hardware: Hardware, system: System) -> JobPrice:
    """Predict the price of a job of a sweep under its `plan` on a hardware, as a `system` runs it."""
    work, workers = build_step_work(config, plan, system=system), plan.mesh.world_size
    price = MeasuredRun("", {}, work, hardware, 1.0, 1.0).predict_price({})
    again = count_step_flops(plan, recomputed=True)
    needed = predict_peak_bytes(config, plan)
    return JobPrice(
        arguments=" ".join(arguments),
        workers=workers,
        sequences=config.train.global_batch,
        seconds=price.seconds,
        model_speed=price.device_flops,
        hardware_speed=again / (price.seconds * workers),
        bytes=needed,
        fits=needed <= memory_of_worker(config, 0, hardware),
    )


def find_best_job(prices: Sequence[JobPrice]) -> JobPrice | None:
    """Return the job that fits the memory and trains its model fastest on a device; None if none fits."""
    return max((price for price in prices if price.fits), key=lambda price: price.model_speed, default=None)


def format_prices(prices: Sequence[JobPrice], hardware: str) -> list[str]:
    """Return the lines of a table of a sweep's prices, for the user, with the best job marked."""
    best = find_best_job(prices)
    cells = [
        [redact_secrets(price.arguments), f"{price.workers:,}", format_seconds(price.seconds),
         f"{price.sequences / price.seconds:.4g}", f"{price.model_speed / 1e12:.3g}",
         f"{price.hardware_speed / 1e12:.3g}", f"{price.bytes / 1e9:.3g} GB",
         "best" if price is best else "" if price.fits else "does not fit"]
        for price in prices
    ]  # fmt: skip
    head = ["", "workers", "step", "sequences/s", "TFLOP/s", "with recomputation", "memory", ""]
    return [f"jobs on {hardware}, predicted; TFLOP/s of a device, of the model and as its kernels compute",
            *align_rows([head, *cells])]  # fmt: skip


def dump_prices(prices: Sequence[JobPrice]) -> list[dict[str, Any]]:
    """Return a sweep's prices as JSON-able data."""
    best = find_best_job(prices)
    return [{**price._asdict(), "best": price is best} for price in prices]
