"""What `gpu_day.py` measures on one GPU, part by part: functions that yield figures by name as they become known."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import host_cost
from benchmarks.gpu_day import Place
from benchmarks.gpu_profile import kernels_of
from benchmarks.step_time import (
    GPU_SIZES,
    STRETCH,
    PlainLoop,
    alternate,
    build_ours,
    check_losses,
    configured,
    timed,
)
from platform.config.fields import Config, Model
from platform.plan.quantisation import Quantisation
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_footprints
from platform.runtime.communicator import SingleRank
from platform.runtime.eight_bits import choose_scalings, multiply_by_kernel, quantise_matrices
from platform.train.rehearsal import rehearse_steps
from platform.train.trainer import Trainer
from tests.harness.oracle import MODELS, compare, compute, configure, on_host, serial, trainer_of

Figures = Iterator[dict[str, Any]]
PEAK = 989e12  # dense bf16 FLOP/s of an H200 and of an H100 SXM
LISTED = 25  # of the longest kernels
MOST_REASON = 120  # characters
TINY = {"layers": 2, "d_model": 32, "heads": 2, "length": 16, "vocab": 2001}

# rows, columns and inner dimension of products
PRODUCTS = {
    "square": (8192, 8192, 8192), "gpt2 qkv": (8192, 2304, 768), "gpt2 up": (8192, 3072, 768),
    "gpt2 down": (8192, 768, 3072), "gpt2 head": (8192, 50304, 768), "gpt2 odd head": (8192, 50257, 768),
    "gpt3 1.3b up": (8192, 8192, 2048), "llama 8b qkv": (8192, 6144, 4096), "llama 8b gate and up": (8192, 28672, 4096),
    "llama 8b down": (8192, 4096, 14336), "llama 8b wgrad of up": (28672, 4096, 8192),
}  # fmt: skip
# sequences, heads, heads of keys, length and width
ATTENTIONS = {"gpt2": (8, 12, 12, 1024, 64), "llama 8b": (1, 32, 8, 8192, 128)}
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
           "efficient": SDPBackend.EFFICIENT_ATTENTION, "auto": None}  # fmt: skip


def wait_for_device(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], place: Place) -> float:
    """Return the seconds of one call of `work`, of many in a row: the median of three."""
    repeats, seconds = 1 if place.tiny else 10, []
    for _ in range(3):
        work()
    for _ in range(3):
        wait_for_device(place.device)
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        wait_for_device(place.device)
        seconds.append((time.perf_counter() - begin) / repeats)
    return statistics.median(seconds)


def reason_of(error: Exception) -> str:
    """Return an error in a short line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:MOST_REASON]


def measure_peaks(place: Place) -> Figures:
    """Measure what the chip reaches: copies, products in bf16 and fp8 at the models' shapes, kernels of attention."""
    gpu = place.device == "cuda"
    name = torch.cuda.get_device_name() if gpu else "cpu"
    yield {"torch": torch.__version__, "name": name, "cuda": torch.version.cuda or "none"}
    yield {"copy_tb_s": round(rate_of_copies(place), 5)}
    rates = {}
    for title, shape in PRODUCTS.items():
        rates[title] = rates_of_product(*((min(n, 64) for n in shape) if place.tiny else shape), place)
        yield {"products": rates}
    beside = {"fp8_of_llama_8b_times": ("llama 8b gate and up", "fp8"), "fp8_of_gpt2_times": ("gpt2 up", "fp8"),
              "fp8_blocks_of_llama_8b_times": ("llama 8b gate and up", "fp8 blocks")}  # fmt: skip
    yield {
        "square_tflops": rates["square"]["bf16"],
        "gpt2_up_tflops": rates["gpt2 up"]["bf16"],
        "odd_vocab_times": round(rates["gpt2 head"]["bf16"] / rates["gpt2 odd head"]["bf16"], 3),
        **{name: round(rates[shape][kind] / rates[shape]["bf16"], 3)
           for name, (shape, kind) in beside.items() if isinstance(rates[shape][kind], float)},
    }  # fmt: skip
    attentions = {}
    for title, shape in ATTENTIONS.items():
        attentions[title] = rates_of_attention((1, 4, 2, 16, 8) if place.tiny else shape, place)
        yield {"attentions": attentions}
    known = {kernel: rate for kernel, rate in attentions["llama 8b"].items() if isinstance(rate, float)}
    yield {"attention_tflops": max(known.values()), "fastest": max(known, key=lambda kernel: known[kernel])}
    if "flash" in known:
        yield {"best_over_flash_times": round(max(known.values()) / known["flash"], 3)}


def rate_of_copies(place: Place) -> float:
    """Return terabytes a second that a copy within the device reads and writes."""
    source = torch.empty(1 << (12 if place.tiny else 31), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2e-12 * source.numel() / seconds_of(lambda: target.copy_(source), place)


def rates_of_product(rows: int, columns: int, inner: int, place: Place) -> dict[str, float | str]:
    """Return TFLOP/s of a product in bf16, and in fp8 with one scale for each tensor, row and block, or why not."""
    work = 2e-12 * rows * columns * inner
    a, b = (torch.randn(n, inner, device=place.device, dtype=torch.bfloat16) for n in (rows, columns))
    rates: dict[str, float | str] = {"bf16": round(work / seconds_of(lambda: a @ b.t(), place), 5)}
    one = torch.ones((), device=place.device)
    scales = {"fp8": (one, one), "fp8 rows": (one.expand(rows, 1).contiguous(), one.expand(1, columns).contiguous())}
    for name, (left, right) in scales.items():
        try:
            qa, qb = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            multiply = partial(torch._scaled_mm, qa, qb, left, right, out_dtype=torch.bfloat16)
            rates[name] = round(work / seconds_of(multiply, place), 5)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            rates[name] = reason_of(error)
    of_rows, of_weights = Quantisation("block").tiles
    left, right = quantise_matrices(a, of_rows, "e4m3", True), quantise_matrices(b, of_weights, "e4m3", True)
    if scalings := choose_scalings(left, right, a.dtype, True):
        multiply = partial(multiply_by_kernel, left, right, a.dtype, scalings)
        rates["fp8 blocks"] = round(work / seconds_of(multiply, place), 5)
    else:
        rates["fp8 blocks"] = "no kernel of this device takes them"
    return rates


def rates_of_attention(shape: tuple[int, int, int, int, int], place: Place) -> dict[str, float | str]:
    """Return TFLOP/s of a causal attention and its gradient, by kernel, or why a kernel cannot compute it."""
    sequences, heads, kv_heads, length, width = shape
    q, k, v = (torch.randn(sequences, n, length, width, device=place.device, dtype=torch.bfloat16, requires_grad=True)
               for n in (heads, kv_heads, kv_heads))  # fmt: skip
    work = 3.5 * 2e-12 * sequences * heads * length**2 * width  # half of the pairs

    def compute_both_passes(backend: SDPBackend | None) -> None:
        with sdpa_kernel(backend) if backend else nullcontext():
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads).sum().backward()

    rates: dict[str, float | str] = {}
    for name, backend in KERNELS.items():
        try:
            rates[name] = round(work / seconds_of(partial(compute_both_passes, backend), place), 5)
        except RuntimeError as error:
            rates[name] = reason_of(error)
    return rates


def shrink(model: Model) -> Model:
    """Return a model of the same kind that a CPU steps in moments."""
    return replace(model, **TINY, kv_heads=model.kv_heads and 1, d_ff=model.d_ff and 48)


def measure_model(name: str, beside: bool, pairs: int, place: Place) -> Figures:
    """Measure steps of one microbatch of a model of GPU_SIZES: ours, and `beside` it the plain loop in turn."""
    model, batch = GPU_SIZES[name]
    model, batch = (shrink(model), 2) if place.tiny else (model, batch)
    device, compiles, begin = place.device, not place.tiny, time.perf_counter()
    c = configured(model, batch, device, compiles)
    trainer = build_ours(c, device)
    # on the host, so that the peak is ours alone
    weights = {name: w.detach().to("cpu", copy=True) for name, w in trainer.weights.master.items()} if beside else {}
    if compiles and (uncompiled := rehearse_steps(trainer, 1)):
        yield {"uncompiled": uncompiled}
    losses = [trainer.step(k).loss for k in (1, 2)]
    yield {"compile_s": round(time.perf_counter() - begin, 1)}
    yield from measure_ours(trainer, place)
    if beside:
        begin = time.perf_counter()
        plain = PlainLoop(c, device, weights, compiles)
        check_losses(losses, [float(plain.step(k)) for k in (1, 2)], device)
        yield {"plain_compile_s": round(time.perf_counter() - begin, 1)}
        seconds = alternate(lambda k: trainer.step(k).loss, plain.step, 2 if place.tiny else pairs, device)
        yield {"plain_ms": round(1e3 * statistics.median(b for _, b in seconds), 3),
               "paired_ms": round(1e3 * statistics.median(a for a, _ in seconds), 3),
               "ratio": round(statistics.median(a / b for a, b in seconds), 3)}  # fmt: skip
        kernels = list_kernels(plain.step, device)
        yield {f"plain_{name}": value for name, value in kernels.items()}


def compare_precisions(name: str, precision: str, pairs: int, place: Place) -> Figures:
    """Measure steps of a model of GPU_SIZES in a precision, and beside it in bf16, in turn."""
    model, batch = GPU_SIZES[name]
    model, batch = (shrink(model), 2) if place.tiny else (model, batch)
    steps = list[Callable[[int], float]]()
    for chosen in (precision, "bf16"):
        c = configured(model, batch, place.device, not place.tiny)
        c.precision = chosen
        trainer = build_ours(c, place.device)
        if not place.tiny and (uncompiled := rehearse_steps(trainer, 1)):
            yield {f"{chosen}_uncompiled": uncompiled}
        steps.append(lambda k, trainer=trainer: trainer.step(k).loss)  # type: ignore[misc]
        losses = [steps[-1](k) for k in (1, 2)]
        yield {f"{chosen}_loss": round(losses[-1], 4)}
    seconds = alternate(steps[0], steps[1], 2 if place.tiny else pairs, place.device)
    yield {f"{precision}_ms": round(1e3 * statistics.median(a for a, _ in seconds), 3),
           "bf16_ms": round(1e3 * statistics.median(b for _, b in seconds), 3),
           "times_bf16": round(statistics.median(b / a for a, b in seconds), 3)}  # fmt: skip


def measure_ours(trainer: Trainer, place: Place) -> Figures:
    """Measure the steps of a trainer that is warm: time, memory beside the plan's, the host's part, and kernels."""
    device, plan, recorder = place.device, trainer.plan, trainer.passes.recorder
    train = replace(trainer.config.train, graphs="on" if recorder else "off")
    footprints = predict_footprints(replace(trainer.config, train=train), plan)
    planned = max(footprints, key=lambda footprint: footprint.total_bytes)
    tensors = planned.total_bytes - planned.reserved
    at_once = 1 if place.tiny else STRETCH[device]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(
        timed(trainer.step, range(3 + i * at_once, 3 + (i + 1) * at_once), device) for i in range(3)
    )
    tokens = plan.tokens_per_step
    yield {"ours_ms": round(1e3 * seconds, 3), "tokens_per_s": round(tokens / seconds),
           "mfu": round(plan.flops_per_token * tokens / seconds / PEAK, 8)}  # fmt: skip
    if device == "cuda":
        allocated = torch.cuda.max_memory_allocated()
        yield {"planned_gb": round(tensors / 1e9, 3), "allocated_gb": round(allocated / 1e9, 3),
               "planned_over_allocated": round(tensors / allocated, 3)}  # fmt: skip
    yield {"host_ms": round(1e3 * statistics.median(seconds_until_read(trainer, k, device) for k in range(20, 25)), 3)}
    yield list_kernels(trainer.step, device)
    if recorder:
        trainer.passes.recorder = None
        trainer.step(25)
        yield {"without_graphs_ms": round(1e3 * timed(trainer.step, range(26, 26 + at_once), device), 3)}
        trainer.passes.recorder = recorder


def seconds_until_read(trainer: Trainer, step: int, device: str) -> float:
    """Return the seconds from the start of a training step until the host has launched all that comes before it reads
    the step's numbers."""
    communicator, reads = trainer.communicator, []
    gc.collect(0)
    wait_for_device(device)

    def read_numbers(x: torch.Tensor) -> list[float]:
        reads.append(time.perf_counter())
        return type(communicator).read_numbers(communicator, x)

    communicator.read_numbers = read_numbers  # type: ignore[method-assign]
    begin = time.perf_counter()
    try:
        trainer.step(step)
    finally:
        del communicator.read_numbers
    return reads[0] - begin


def list_kernels(step: Callable[[int], Any], device: str) -> dict[str, Any]:
    """Return milliseconds and number of a training step's kernels, on a CPU of its operators, and the longest ones."""
    kernels = kernels_of(step, 30, device)
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:LISTED]
    total, launches = (sum(column) for column in zip(*kernels.values(), strict=True))
    return {"kernels_ms": round(total, 3), "launches": launches,
            "longest": [[name[:110], round(ms, 3), n] for name, (ms, n) in longest]}  # fmt: skip


def compare_numbers(place: Place) -> Figures:
    """Compare whole steps with one process on the CPU: in fp64 to rounding, eagerly and compiled, and in bf16."""
    cases = [("gpt", "off"), ("llama", "off"), ("t5", "off"), ("bert", "off"), ("gpt", "on"), ("llama", "on")]
    equal = 0
    for model, compiled in cases[: 2 if place.tiny else None]:
        c = configure(**MODELS[model])
        compare(c, make_plan(c), [whole_steps(c, compiled, place)], serial(c))
        equal += 1
        yield {"fp64_equal": equal}
    apart = 0.0
    for model in ("gpt", "llama"):
        losses = whole_steps(configure(precision="bf16", **MODELS[model]), "off", place).losses
        expected = serial(configure(**MODELS[model])).losses
        apart = max(apart, *(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)))
    yield {"bf16_apart": round(apart, 6)}


def whole_steps(c: Config, compiled: str, place: Place) -> Any:
    """Return what the first steps of a configuration compute on the device, with tensors in host memory."""
    c = replace(c, train=replace(c.train, compile=compiled))
    plan = make_plan(c)
    return on_host(compute(c, plan, SingleRank(plan.mesh, place.device)))


def run_training(place: Place) -> Figures:
    """Measure a run as a user starts it, with a microbatch that a GPU of 141 GB has room for."""
    from platform import launch

    tiny = ["model=gpt_tiny", "precision=fp32", "train.microbatch=2", "train.global_batch=4", "train.steps=6"]
    large = ["cluster.gpu=H200", "train.microbatch=64", "train.global_batch=512", "train.steps=20"]
    folder = place.folder / "run"
    arguments = ["+experiment=one_gpu", f"cluster.device={place.device}", "data=synthetic", "eval.every=0",
                 "monitor.sample=0", "checkpoint.every=0", f"run.dir={folder}"]  # fmt: skip
    end_unless_done(launch.main([*arguments, *(tiny if place.tiny else large)]))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = rows[len(rows) // 2 :]

    def median_of(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    seconds = median_of("step_seconds")
    yield {"tokens_per_s": round(median_of("tokens_per_second")), "step_s": round(seconds, 4),
           "mfu": round(1e12 * median_of("tflops_per_worker") / PEAK, 6)}  # fmt: skip
    shares = {name: statistics.median(row["parts"][name] for row in rows) / seconds for name in rows[0]["parts"]}
    yield {"snapshot_share": round(shares["snapshot"], 4), "between_share": round(shares["rest"], 4), "shares": shares}


def end_unless_done(status: int) -> None:
    """End the part where a run's exit status is not 0: what the run said last is the reason."""
    if status:
        sys.exit(status)


def measure_host(place: Place) -> Figures:
    """Measure the host's milliseconds of a layer and microbatch, and of the rest of a step up to its read, on tensors
    too small to matter to a GPU."""
    seconds = {}
    for layers, microbatches in product(host_cost.LAYERS, host_cost.MICROBATCHES):
        c = host_cost.configured("gpt", layers, microbatches, "off" if place.tiny else "on")
        plan = make_plan(c)
        trainer = trainer_of(c, plan, SingleRank(plan.mesh, place.device))
        warm, last = (1, 4) if place.tiny else (5, 30)
        for k in range(1, warm + 1):
            trainer.step(k)
        times = (seconds_until_read(trainer, k, place.device) for k in range(warm + 1, last + 1))
        seconds[layers, microbatches] = statistics.median(times)
    layer = host_cost.of_one_more(seconds)
    (layers, microbatches), whole = min(seconds.items())
    yield {
        "layer_ms": round(1e3 * layer, 4),
        "beside_layers_ms": round(1e3 * (whole - layers * microbatches * layer), 3),
    }


def count_launches(place: Place) -> Figures:
    """Count what a layer and microbatch launch, forward and backward: the difference of models of four and two."""
    for name, model in (("gpt", "gpt2_124m"), ("llama", "llama_1b")):
        launches = {}
        for layers in (2, 4):
            small = replace(shrink(GPU_SIZES[model][0]), layers=layers)
            wide = small if place.tiny else replace(small, d_model=256, heads=4, d_ff=small.d_ff and 512, length=256)
            trainer = build_ours(configured(wide, 2, place.device, not place.tiny), place.device)
            for k in (1, 2):
                trainer.step(k)
            launches[layers] = list_kernels(trainer.step, place.device)["launches"]
        yield {name: (launches[4] - launches[2]) / 2}


def lose_a_rank(place: Place) -> Figures:
    """Measure what follows when one of four ranks that share the device is killed in the middle of a step."""
    from tests.harness import one_card

    folder = place.folder / "run"
    arguments = ["+experiment=elastic_demo", "cluster=processes", f"cluster.device={place.device}", "train.steps=40",
                 f"run.dir={folder}"]  # fmt: skip
    end_unless_done(one_card.main(arguments))
    yield failure_times(folder / "journal.jsonl")


def failure_times(journal: Path) -> dict[str, float]:
    """Return the seconds from a fault to the survivors' release and to the next step, and how many steps were lost."""
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    struck = next(i for i, event in enumerate(events) if event["event"] == "injected")
    first = {event["event"]: event for event in reversed(events[struck:])}
    begin = first["injected"]["time"]
    return {"released_s": round(first["released"]["time"] - begin, 2),
            "next_step_s": round(first["first_step"]["time"] - begin, 2),
            "steps_lost": first.get("rolled_back", {}).get("steps_lost", 0)}  # fmt: skip
