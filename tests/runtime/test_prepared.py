"""What a process prepares before its first step: compiled functions, and streams of a GPU."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import torch

from platform.checkpoint import buffer
from platform.checkpoint.buffer import HostBuffer
from platform.runtime import compilation
from platform.runtime.progress import PROGRESS
from platform.train.worker import Worker
from tests.harness.oracle import configure

THREADS = """
import torch._dynamo  # as worker processes import it, before anything is compiled
from torch._inductor import config
before = config.compile_threads
from platform.runtime.compilation import reason_uncompiled
reason_uncompiled("on", "cpu")
print(before, config.compile_threads)
"""


def test_no_pool_of_processes_compiles_beside_a_worker():
    """Each of 8 workers would start one for every core of its machine."""
    out = subprocess.run([sys.executable, "-c", THREADS], check=True, capture_output=True, text=True).stdout
    assert out.split()[-1] == "1"


def test_a_heartbeat_says_that_a_function_is_being_compiled(monkeypatch):
    seen = []
    monkeypatch.setattr(compilation, "BACKEND", lambda graph, inputs: seen.append(PROGRESS.build_heartbeat()) or graph)
    compilation.compile_region.cache_clear()
    PROGRESS.begin_call("step(1)")
    doubled = compilation.compile_region(_doubled)
    assert doubled(torch.ones(3)).tolist() == [2.0] * 3
    assert doubled(torch.ones(3)).tolist() == [2.0] * 3
    [beat] = seen
    assert (beat.section, beat.preparing, beat.waiting) == ("compile _doubled", True, False)
    assert not PROGRESS.build_heartbeat().preparing
    PROGRESS.begin_call("")
    compilation.compile_region.cache_clear()


def test_products_of_16_bits_add_in_fp32(tmp_path):
    """Also where cuBLAS splits a sum over many tokens, such as a weight's gradient."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    Worker(configure(), 0, device="cpu", run_dir=str(tmp_path), threads=1)
    assert not matmul.allow_bf16_reduced_precision_reduction and not matmul.allow_fp16_reduced_precision_reduction


def _doubled(x):
    return 2 * x


def test_all_snapshots_are_copied_in_one_stream(monkeypatch):
    """torch hands out 32 streams in turn: of a hundred, some would be those in which collectives run."""
    streams = []

    class Stream:
        def __init__(self):
            streams.append(self)

        def wait_stream(self, other):
            pass

        def record_event(self, event):
            return SimpleNamespace(synchronize=lambda: None)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    buffer._stream_of_copies.cache_clear()
    pinned = HostBuffer([], data=torch.zeros(0, dtype=torch.uint8))
    pinned._pinned = True
    for _ in range(100):
        pinned.fill_parts([])
    assert len(streams) == 1
    buffer._stream_of_copies.cache_clear()
