"""Compiled regions, compiled for a GPU that is not there: by torch's inductor and Triton to code of the device.

It happens in a process of its own, in which torch takes itself for one with a GPU (`_believe`). Tensors are fake, on
cuda. A region is called there as training calls it, and what inductor has written is run: every launch is seen, with
its tensors, and does nothing. Triton builds each kernel in all configurations that inductor would choose from.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from math import inf, nan, prod
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness.launches import moved, touched

# compute capability -> name, multiprocessors, bytes of shared memory of a block
TARGETS = {90: ("NVIDIA H100", 132, 232448), 100: ("NVIDIA B200", 148, 232448)}

# Autograd asks the device of a tensor for streams; without CUDA there is nobody who answers.
GUARD = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
struct Guard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}
namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""
# torch asks for the hooks while it is imported
START = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); from tests.harness.ahead import serve; serve(int(sys.argv[2]))"


@dataclass(frozen=True)
class Block:
    """A tensor without numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Traced:
    """A function by the code of its traced graph, as tensors of the card went through it."""

    source: str
    __name__: str

    def on_gpu(self) -> Callable[..., Tensor]:
        """The function, with a GPU in place of the card."""
        scope: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": inf, "nan": nan}
        exec(self.source.replace("type='card'", "type='cuda'"), scope)

        def function(*tensors: Tensor) -> Any:
            return scope["forward"](None, *tensors)

        function.__name__ = self.__name__
        return function


@dataclass(frozen=True)
class Call:
    """A call of a region: the function that is compiled, its arguments (tensors: as Block), and whether autograd
    follows it."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    gradient: bool

    @property
    def title(self) -> str:
        return self.function.__name__.lstrip("_") + " with gradients" * self.differentiated

    @property
    def differentiated(self) -> bool:
        return self.gradient and any(block.gradient for block in self.blocks)

    @property
    def blocks(self) -> list[Block]:
        return [x for x in tree_leaves(self.arguments) if isinstance(x, Block)]

    @property
    def largest(self) -> Block:
        return max(self.blocks, key=lambda block: block.elements)

    def __str__(self) -> str:
        return f"{self.title}: {', '.join(map(str, self.blocks))}"


def call_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Call:
    """The call of a region with these arguments, here and now."""
    return Call(function, tuple(map(_described, arguments)), torch.is_grad_enabled())


def _described(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return Block(tuple(argument.shape), argument.stride(), argument.dtype, argument.requires_grad)
    return tuple(map(_described, argument)) if isinstance(argument, list | tuple) else argument


@dataclass(frozen=True)
class Build:
    """A kernel in one configuration: registers of a thread, bytes that it spills, bytes of shared memory of a block."""

    registers: int
    spilled: int
    shared: int


@dataclass(frozen=True)
class Kernel:
    """One launch: the bytes that it reads and writes, and its builds (none: it is torch's own)."""

    name: str
    nbytes: int
    builds: tuple[Build, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """What a call of a region is compiled to, with its backward pass where autograd follows it."""

    call: Call
    kernels: tuple[Kernel, ...]

    def most(self, what: str) -> int:
        """The largest of this number of its builds; 0 if all kernels are torch's own."""
        return max((getattr(build, what) for kernel in self.kernels for build in kernel.builds), default=0)

    @property
    def spilled(self) -> int:
        """The bytes that a thread spills for certain, as no configuration of the kernel spills less."""
        every = [kernel.builds for kernel in self.kernels if kernel.builds]
        return max((min(build.spilled for build in builds) for builds in every), default=0)

    @property
    def per_element(self) -> float:
        """Bytes that are read and written per element of the largest argument."""
        return sum(kernel.nbytes for kernel in self.kernels) / self.call.largest.elements

    @property
    def passes(self) -> float:
        """How often all of the largest argument, or of another tensor of its size, is read or written."""
        return self.per_element / self.call.largest.dtype.itemsize


def lacking() -> str:
    """Why nothing can be compiled ahead of time here; "" if it can."""
    if not find_spec("triton"):
        return "triton is not installed: pip install -e .[gpu-rules]"
    if torch.version.cuda:
        return "torch has CUDA: the tests that are marked gpu compile"
    return "" if _cxx() else "there is no C++ compiler"


def _cxx() -> str | None:
    return next(filter(None, map(which, [os.environ.get("CXX", "g++"), "clang++"])), None)


@contextmanager
def compilers(folder: Path) -> Iterator[Callable[[Call, int], Compiled]]:
    """A function that compiles a call for one of TARGETS, each in a process of its own; files are kept in `folder`. It
    raises AssertionError with the compiler's words where it cannot."""
    library, home = folder / "guard.so", Path(torch.__file__).parent
    options = [f"-I{home}/include", f"-L{home}/lib", f"-Wl,--no-as-needed,-rpath,{home}/lib", "-ltorch_cpu", "-lc10"]
    command = [_cxx() or "", "-std=c++20", "-shared", "-fPIC", "-xc++", "-", *options, "-o", str(library)]
    subprocess.run(command, input=GUARD, text=True, check=True)
    with ExitStack() as stack:
        started = {target: stack.enter_context(_started(target, folder, library)) for target in TARGETS}
        yield lambda call, target: started[target](call)


@contextmanager
def _started(target: int, folder: Path, library: Path) -> Iterator[Callable[[Call], Compiled]]:
    from ray import cloudpickle  # of functions within functions

    places = {f"{user}_CACHE_DIR": str(folder / f"{user}{target}") for user in ("TORCHINDUCTOR", "TRITON")}
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}
    words = folder / f"words{target}"
    with words.open("wb") as said, subprocess.Popen(
        [sys.executable, "-c", START, str(library), str(target)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, env={**os.environ, **places, **settings},
    ) as child:  # fmt: skip
        assert child.stdin and child.stdout

        def compiled(call: Call) -> Compiled:
            cloudpickle.dump(call, child.stdin)
            child.stdin.flush()
            try:
                answer = cloudpickle.load(child.stdout)
            except EOFError:
                answer = words.read_text()
            assert isinstance(answer, Compiled), f"{call} for sm_{target}: {answer}"
            return answer

        yield compiled
        child.kill()


def serve(target: int) -> None:
    """Compiles the calls that come on standard input."""
    from ray import cloudpickle

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print is no answer
    _believe(target)
    launched = _watched()
    while True:
        try:
            call = cloudpickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = _compile(call, launched)
        except Exception:
            answer = traceback.format_exc()
        cloudpickle.dump(answer, answers)
        answers.flush()


def _believe(target: int) -> None:
    """Makes torch and Triton take this process for one with a GPU."""
    import torch._inductor.fx_passes.joint_graph as patterns
    import triton
    from triton.backends.driver import GPUDriver
    from triton.backends.nvidia.driver import CudaDriver

    name, multiprocessors, shared = TARGETS[target]
    major, minor = divmod(target, 10)
    properties = SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=multiprocessors, total_memory=80 << 30,
        warp_size=32, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        regs_per_multiprocessor=1 << 16, shared_memory_per_block=48 << 10, shared_memory_per_block_optin=shared,
    )  # fmt: skip
    answers: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_get_device_properties": lambda device: properties,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "synchronize": lambda device=None: None,
    }
    for question, answer in answers.items():
        setattr(torch.cuda, question, answer)
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._dynamo.guards._empty_strided_cuda = lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device="cuda"
    )
    torch._C._dynamo.guards._reinterpret_tensor = lambda x, shape, strides, offset=0: torch.as_strided(
        x, shape, strides, x.storage_offset() + offset
    )
    patterns.lazy_init = lambda device=None: None  # replace products, attention and permutations; made of real tensors

    fold = patterns.UniformValueConstantFolder._deduce_value

    def folded(self, node):
        """A constant's one number, which inductor has the device compute."""
        with _OnCpu():
            return fold(self, node)

    patterns.UniformValueConstantFolder._deduce_value = folded

    class Driver(CudaDriver):
        """Triton's driver of a GPU, which it never calls."""

        def __init__(self):
            GPUDriver.__init__(self)

    triton.runtime.driver.set_active(Driver())


class _OnCpu(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **{name: "cpu" if name == "device" else x for name, x in (kwargs or {}).items()})


def _watched() -> list[Any]:
    """A list that gets every launch of the output code that is run from now on: (name, bytes, Triton's kernel)."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    launched: list[tuple[str, int, Any]] = []
    config.force_disable_caches, config.use_static_triton_launcher = True, False

    class OfTorch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            nbytes = moved(function, args, kwargs or {}, out)
            if function.namespace != "prim" and nbytes is not None:
                launched.append((str(function), nbytes, None))
            return out

    def run(self, *args, **_):
        nbytes = 0
        for name, x in zip(self.fn.arg_names, args, strict=False):
            if isinstance(x, Tensor):
                ways = [way for way in ("load", "store") if f"tl.{way}({name} " in self.fn.src]
                assert ways, f"neither read nor written: {name}\n{self.fn.src}"
                nbytes += touched(x) * len(ways)
        launched.append((self.inductor_meta["kernel_name"], nbytes, self))

    make = GraphLowering.compile_to_module

    def compile_to_module(self):
        module = make(self)
        call = module.call

        def counted(args):
            with OfTorch():
                return call(args)

        module.call = counted
        return module

    CachingAutotuner.precompile, CachingAutotuner.run = lambda self, *args, **kwargs: None, run
    GraphLowering.compile_to_module = compile_to_module
    return launched


def _compile(call: Call, launched: list[Any]) -> Compiled:
    """Calls the region, and differentiates it where autograd follows; then builds what was launched."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from platform.runtime import eight_bits  # noqa: F401  which traced blocks call
    from platform.runtime.compilation import compile_region
    from tests.harness import one_attention  # noqa: F401  as well

    torch._dynamo.reset()
    launched.clear()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(call.gradient):
        arguments = tuple(map(_made, call.arguments))
        function = call.function.on_gpu() if isinstance(call.function, Traced) else call.function
        output = compile_region(function)(*arguments)
        if call.differentiated:
            leaves = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
            torch.autograd.grad(output, leaves, torch.empty_like(output))
    builds = {kernel: _builds(kernel) for _, _, kernel in launched if kernel}
    return Compiled(call, tuple(Kernel(name, nbytes, builds.get(kernel, ())) for name, nbytes, kernel in launched))


def _made(argument: Any) -> Any:
    if isinstance(argument, Block):
        block = torch.empty_strided(argument.shape, argument.strides, dtype=argument.dtype, device="cuda:0")
        return block.requires_grad_(argument.gradient)
    return tuple(map(_made, argument)) if isinstance(argument, tuple) else argument


def _builds(kernel: Any) -> tuple[Build, ...]:
    """Builds a kernel in all configurations, and reads what ptxas says of each. (On a device, where registers leave
    room for few blocks, inductor adds smaller ones.)"""
    builds = []
    for configuration in kernel.configs:
        with redirect_stdout(StringIO()) as said:
            compiled = kernel._precompile_config(configuration)
        assert compiled.kernel.asm["cubin"]
        (registers,) = re.findall(r"Used (\d+) registers", said.getvalue())
        spilled = re.findall(r"(\d+) bytes spill", said.getvalue())  # stores and loads
        builds.append(Build(int(registers), max(map(int, spilled)), compiled.kernel.metadata.shared))
    return tuple(builds)
