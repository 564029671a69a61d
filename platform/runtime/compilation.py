"""Settings of torch by which a rank computes: its compiler, sums in a fixed order, and the kernel of attention.

`compile_region` wraps a small pure function of local tensors (a region) by torch.compile. A region contains no
collective, and takes as tensors all that changes between layers, steps and microbatches, so that there is one graph per
region and shape. Graphs stay in the process from one generation to the next. `CompileTrial` wraps one while a
generation forms: there a region may fail to compile. One process of a node compiles, others read the cache.

`use_deterministic_kernels` takes every sum in a fixed order, so that a step done again is equal in every bit
(train.deterministic). `select_attention_kernel` has torch compute attention in the kernel that the plan names.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from fcntl import LOCK_EX, flock
from functools import cache, cached_property, partial, wraps
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from shutil import which
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from platform.plan.model_types import AUTO, FLASH_PACKAGES
from platform.plan.step_collectives import may_compile
from platform.runtime.progress import PROGRESS
from platform.runtime.traced_collectives import join_turns, launch_collectives_of, launches_collectives

BACKEND = "inductor"
MOST_GRAPHS = 64  # of one region: shapes, with and without gradients; further ones run eagerly
_LOCK = Lock()  # torch compiles one function at a time


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """Pure function of tensors without autograd, by the `graph` that torch traced of it for tensors of fixed shapes."""

    graph: GraphModule
    __name__: str

    def __call__(self, *tensors: Tensor) -> Any:
        """Compute the traced function of `tensors` on this rank, one operation of torch's graph after another."""
        return self.graph(*tensors)

    @cached_property
    def in_turns(self) -> TracedFunction:
        """Return the function as it is compiled: its collectives, if there are any, as they run."""
        return replace(self, graph=join_turns(self.graph)) if launches_collectives(self.graph) else self


@cache
def compile_region(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `function`, a pure function of tensors and constants, wrapped so that torch.compile compiles it, with its
    backward pass, at the first call with tensors of new shapes. While it compiles, the process's progress says so, so
    that the rank does not count as hung. A call of a TracedFunction launches its kernels directly, without torch's
    search for a graph that fits the arguments."""
    traced = isinstance(function, TracedFunction)
    build = partial(_compile_graph, function) if isinstance(function, TracedFunction) else _compile_function(function)
    known: dict[object, Callable[..., Tensor]] = {}

    @wraps(function)
    def run_compiled(*arguments):
        """Call the function compiled for tensors of these shapes, compiling it first if the shapes are new."""
        if traced:  # for fixed shapes and types
            signature: object = (*map(Tensor.stride, arguments),)
        else:
            signature = torch.is_grad_enabled(), *map(_compilation_key_of_argument, arguments)
        if compiled_function := known.get(signature):
            return compiled_function(*arguments)
        code = function.graph.code if isinstance(function, TracedFunction) else f"{function.__module__}.{function}"
        with _LOCK, PROGRESS.mark_preparing(f"compile {function.__name__}"), _take_turn_on_node(code, arguments):
            with launch_collectives_of(None):
                compiled_function = build(arguments)
            out = None if traced else compiled_function(*arguments)  # which compiles it
        known[signature] = compiled_function
        return compiled_function(*arguments) if traced else out  # whose collectives wait for others that compile

    return run_compiled


@contextmanager
def _take_turn_on_node(code: str, arguments: Sequence[Any]) -> Iterator[None]:
    """Let one process of this node at a time compile this `code` for tensors of these shapes, within the context: the
    first one compiles, the others read what it has left in the cache of torch's inductor."""
    if BACKEND != "inductor":
        yield
        return
    folder = import_module("torch._inductor.runtime.cache_dir_utils").cache_dir()
    os.makedirs(folder, exist_ok=True)
    what = re.sub(r" at 0x\w+", "", f"{code} {torch.is_grad_enabled()} {_compilation_key_of_argument(arguments)}")
    lock = os.open(os.path.join(folder, f"{sha256(what.encode()).hexdigest()}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):  # of a file system without locks: then each compiles by itself
            flock(lock, LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _use_cache_of_graphs() -> Iterator[None]:
    """Let torch's inductor use its cache of graphs within the context: it asks for a place of symbolic shapes."""
    shapes, fakes = import_module("torch.fx.experimental.symbolic_shapes"), import_module("torch._subclasses")
    guards, gradients = import_module("torch._guards"), import_module("torch._functorch.config")
    mode = fakes.FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes.ShapeEnv(), static_shapes=True)
    with guards.tracing(guards.TracingContext(mode)), gradients.patch(enable_autograd_cache=False):
        yield


def _compile_function(function: Callable[..., Tensor]) -> Callable[[Sequence[Any]], Callable[..., Tensor]]:
    """Return a function that gives, for any arguments, one and the same torch.compile of `function`."""
    compiled_function = torch.compile(function, dynamic=False, backend=BACKEND)
    limits = import_module("torch._dynamo").config
    limits.recompile_limit = max(MOST_GRAPHS, limits.recompile_limit)
    gradients: Any = import_module("torch._functorch.config")
    gradients.force_non_lazy_backward_lowering = True
    return lambda arguments: compiled_function


def _compile_graph(function: TracedFunction, arguments: Sequence[Tensor]) -> Callable[..., Any]:
    """Return a traced function compiled to kernels for tensors of the shapes and strides of `arguments`."""
    if BACKEND != "inductor":
        return import_module("torch._dynamo").lookup_backend(BACKEND)(function.graph, list(arguments))
    fx = import_module("torch._inductor.compile_fx")
    kernels: list[Callable[[list[Tensor]], Sequence[Any]]] = []

    def keep_kernels(*graph: Any, **how: Any) -> Any:
        """Return a graph compiled to kernels by torch's inductor, and keep the function that launches them."""
        kernels.append(fx.compile_fx_inner(*graph, **how))
        return kernels[-1]

    # a graph is looked up by the shapes and strides of its arguments, so it need not check them in each call
    settings = {"size_asserts": False}
    if launches_collectives(function.graph):  # as early as in the graph, and waits as late
        settings |= {"reorder_for_locality": False, "reorder_for_peak_memory": False}
    with import_module("torch._inductor").config.patch(settings), _use_cache_of_graphs():
        compiled_function = fx.compile_fx(function.graph, list(arguments), inner_compile=keep_kernels)
    signatures = [_compilation_key_of_argument(x) for x in compiled_function(*arguments)]
    if signatures != [_compilation_key_of_argument(x) for x in kernels[-1](list(arguments))]:
        return compiled_function
    # what is around the kernels serves functions that change their arguments or return views of them
    return lambda *tensors: kernels[-1]([*tensors])


class CompileTrial:
    """Wrapper of regions in place of `compile_region`: one that fails to compile runs uncompiled. `failed`: which did,
    and why, in a line each."""

    def __init__(self) -> None:
        """Begin a trial of torch.compile in which no function has failed to compile yet."""
        self.failed: list[str] = []

    def __call__(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `function` of tensors compiled by torch, or run uncompiled where compiling fails for its arguments."""
        return self.wrap_with_fallback(function.__name__, compile_region(function), function)

    def wrap_with_fallback(
        self, name: str, compiled_function: Callable[..., Any], fallback: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that calls `compiled_function`, and if that fails notes why under this name and calls
        `fallback`."""

        def run_or_fall_back(*arguments: Any) -> Any:
            """Call the compiled function of tensors; if that fails, note why in `failed` and call the other one."""
            try:
                return compiled_function(*arguments)
            except Exception as error:  # whatever a compiler may lack for it
                self.failed.append(f"{name}: {_compiler_error_line(error)}")
            return fallback(*arguments)

        return run_or_fall_back


def _compilation_key_of_argument(argument: object) -> object:
    """Return an argument's part of a compiled function's key: of a tensor shape, strides, dtype, requires_grad."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.requires_grad
    return tuple(map(_compilation_key_of_argument, argument)) if isinstance(argument, list | tuple) else argument


def reason_uncompiled(choice: str, device: str) -> str:
    """Return the reason, in a line, why this process runs its functions of tensors without torch.compile on `device`
    (cpu, cuda) under the key train.compile=`choice`: "" if it compiles them. `auto` compiles on GPUs alone: on CPU the
    seconds of compiling are longer than most runs win."""
    return _explain_why_compiler_fails(device) if may_compile(choice, device) else f"train.compile={choice}"


@cache
def _explain_why_compiler_fails(device: str) -> str:
    """Return the reason, in a line, why torch.compile does not work on `device` (cpu, cuda) in this process, "" if it
    works: a tiny function is compiled once and its numbers are compared. Takes seconds, as it imports torch's
    compiler."""
    if device == "cuda" and not find_spec("triton"):
        return "triton is not installed"
    if not any(map(which, [os.environ.get("CXX", "g++"), "clang++", "gcc", "cc"])):
        return "there is no C++ compiler"
    try:
        if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # no pool of processes beside each worker
            import_module("torch._inductor").config.compile_threads = 1  # the variable has been read by now
        x = torch.ones(64, device=device)
        right = torch.equal(torch.compile(_probe_function, dynamic=False)(x), _probe_function(x))
    except Exception as error:  # whatever a compiler, its headers or its cache may lack
        return _compiler_error_line(error)
    return "" if right else "what it compiles computes wrong numbers"


def _compiler_error_line(error: Exception) -> str:
    """Return an error of torch.compile in one line: its type and message, or the error that it wraps."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {(more or [first])[0] if first.endswith('raised:') else first}"[:300]


def _probe_function(x: Tensor) -> Tensor:
    """Return 2 x + 1 of a tensor x: the tiny function with which torch.compile is tried."""
    return x * 2 + 1


_SETTINGS: Any = import_module("torch.utils.deterministic")


@contextmanager
def use_deterministic_kernels(compiles: bool) -> Iterator[None]:
    """Make torch use deterministic kernels within the context, which take every sum in a fixed order, in forward and
    backward passes alike; an operation without such a kernel raises RuntimeError with its name. `compiles`: True if
    functions compiled by torch are to be deterministic too.

    Its environment variables, read before CUDA and NCCL start, are in `platform.cluster.crew.job`.
    """
    before = torch.get_deterministic_debug_mode(), _SETTINGS.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.set_deterministic_debug_mode("error")
    # filling costs a pass over all memory, and nothing is read before it is written
    _SETTINGS.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False  # chooses kernels by how fast they happen to be
    if compiles:
        torch.use_deterministic_algorithms(True)  # tells the compiler too, whose import takes seconds
    try:
        yield
    finally:
        if compiles:
            torch.use_deterministic_algorithms(False)
        torch.set_deterministic_debug_mode(before[0])
        _SETTINGS.fill_uninitialized_memory, torch.backends.cudnn.benchmark = before[1:]


_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    **dict.fromkeys(FLASH_PACKAGES, SDPBackend.FLASH_ATTENTION),
}
_CHOOSING = Lock()  # the choice is the process's, of which ranks may be threads


def select_attention_kernel(name: str) -> AbstractContextManager[None]:
    """Return a context in which torch's scaled_dot_product_attention runs in the kernel `name`, one of KERNELS, or
    raises RuntimeError if that kernel cannot compute on its tensors; under `auto` torch chooses. The backward pass uses
    the kernel that ran forward. Raises ImportError if the package of `flash3` or `flash4` is missing."""
    return nullcontext() if name == AUTO else _restrict_attention_kernel(name)


@contextmanager
def _restrict_attention_kernel(name: str) -> Iterator[None]:
    """Restrict torch's scaled_dot_product_attention to one kernel within the context, one thread at a time."""
    with _CHOOSING, sdpa_kernel(_BACKENDS[name]):
        package = FLASH_PACKAGES.get(name)  # its kernels stay behind the context, for backward passes
        if _BACKENDS[name] == SDPBackend.FLASH_ATTENTION and current_flash_attention_impl() != package:
            activate_flash_attention_impl(package) if package else restore_flash_attention_impl()
        yield


def name_attention_kernel(device: str, dtype: torch.dtype, d_kv: int) -> str:
    """Return the kernel, one of KERNELS, that torch chooses by itself here for causal attention in heads of `d_kv`."""
    x = torch.zeros(1, 1, 8, d_kv, dtype=dtype, device=device, requires_grad=True)
    choice = SDPBackend(torch._fused_sdp_choice(x, x, x, is_causal=True))
    return next(name for name, backend in _BACKENDS.items() if backend == choice)


def reason_kernel_fails(name: str, device: str, dtype: torch.dtype, d_kv: int, d_value: int = 0) -> str:
    """Return the reason, in a line, why this process cannot compute attention with heads of width `d_kv` in the kernel
    `name` on `device`; "" if it can. A tiny attention is computed and differentiated to find out. `d_value`: the width
    of values; 0 = d_kv."""
    if name == AUTO:
        return ""
    x, v = (torch.zeros(1, 1, 8, n, dtype=dtype, device=device, requires_grad=True) for n in (d_kv, d_value or d_kv))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with select_attention_kernel(name):
                F.scaled_dot_product_attention(x, x, v, is_causal=True).sum().backward()
        except (RuntimeError, ImportError) as error:
            reasons = [str(w.message).partition(" (Triggered")[0] for w in warned]  # per kernel, after its name
            named = [i + 1 for i, line in enumerate(reasons) if name in line.lower() and line.endswith("because:")]
            return next(iter(reasons[named[0] :] if named else []), str(error).partition("\n")[0])[:300]
    return ""
