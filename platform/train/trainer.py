"""One rank's training step: forward and backward over microbatches, reduction, clipping, update."""

from __future__ import annotations

import resource
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor

from platform.config import Config
from platform.model import build as build_model
from platform.model.decoder import LOGITS
from platform.parallel import gradients, random
from platform.parallel.clock import Clock
from platform.parallel.groups import Communicator
from platform.parallel.ops import ParallelOps, Position
from platform.plan.layout import Layout, block
from platform.plan.ops import LOSSES, READERS
from platform.plan.plan import Plan
from platform.train.optimizers import OPTIMIZERS
from platform.train.schedule import learning_rate
from platform.train.weights import Weights

SECTIONS = ("data", "forward", "backward", "exposed_comm", "bubble", "reduce", "optimizer", "checkpoint")


class Corpus(Protocol):
    """What the trainer needs of platform.data: one global order of samples."""

    def batch(self, split: str, start: int, end: int) -> Any: ...  # int64 [end - start, length + 1]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Trainer:
    """Executes a plan on the rank of `communicator`."""

    def __init__(self, config: Config, plan: Plan, communicator: Communicator, corpus: Corpus):
        self.config, self.plan, self.communicator, self.corpus = config, plan, communicator, corpus
        self.model = build_model(config.model)
        self.weights = Weights(plan, communicator, config.seed)
        self.ops = ParallelOps(plan, communicator, self.weights.compute, config.model.dropout)
        self.optimizer = self._make_optimizer()
        self.clock = communicator.clock = Clock(communicator.device)
        self._token_layouts = [plan.layout_of_tokens(kind) for kind in (READERS, LOSSES)]

    def _make_optimizer(self) -> torch.optim.Optimizer:
        o, master = self.config.optimizer, self.weights.master
        decayed = [master[p.name] for p in self.plan.parameters if p.decay]
        others = [master[p.name] for p in self.plan.parameters if not p.decay]
        groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return OPTIMIZERS[o.kind].make([g for g in groups if g["params"]], o)

    def step(self, step: int) -> dict[str, Any]:
        """Update number `step` (from 1): the rank's report, plain data, for the driver to aggregate."""
        plan, communicator, clock = self.plan, self.communicator, self.clock
        batch = self.config.train.global_batch
        communicator.moved.clear()
        clock.read()
        with clock.section("other"):
            loss, norm = self.compute_gradients(step)
            with clock.section("optimizer"):
                lr = learning_rate(self.config.optimizer, step, self.config.train.steps)
                self._update(norm, lr)
        seconds = clock.read()
        return {
            "step": step,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": step * plan.tokens_per_step,
            "samples": [(step - 1) * batch, step * batch],
            "step_seconds": sum(seconds.values()),
            "seconds": {name: seconds.get(name, 0.0) for name in SECTIONS},
            "comm_bytes": dict(communicator.moved),
            "peak_memory_bytes": peak_memory(communicator.device),
        }

    def compute_gradients(self, step: int) -> tuple[float, float]:
        """Leaves the gradient of the global mean loss in `weights.gradients`, reduced and not yet clipped.

        Returns the loss and the gradient's global 2-norm.
        """
        loss = self._forward_backward(step)
        with self.clock.section("reduce"):
            grads = self.weights.gradients
            gradients.reduce(self.plan, self.communicator, grads)
            squares = gradients.squared_norm(self.plan, self.communicator, grads)
            total, square = self._sum_over_world(loss, squares)
        return total / self.plan.tokens_per_step, sqrt(square)

    def _forward_backward(self, step: int) -> Tensor:
        """Accumulates this rank's gradient of the global mean loss; returns its summed loss."""
        first = (step - 1) * self.config.train.global_batch
        total = torch.zeros((), dtype=torch.float64, device=self.communicator.device)
        together = self.plan.sizes["batch"]
        for m in range(self.plan.microbatches):
            with self.clock.section("data"):
                tokens, labels = self._load("train", first + m * together)
            self.ops.position = Position(self.config.seed, step, m * together)
            with self.clock.section("forward"):
                loss = self.model.forward(self.ops, tokens, labels)
            with self.clock.section("backward"):
                (loss / self.plan.tokens_per_step).backward()
                self.weights.accumulate()
            total += loss.detach()
        return total

    def _load(self, split: str, first: int) -> tuple[Tensor, Tensor]:
        """This rank's blocks of token ids and labels, [length, batch] each, of the sequences from `first` on."""
        out = []
        for shift, layout in enumerate(self._token_layouts):
            (start, n), (offset, length) = self._token_block(layout)
            rows = torch.as_tensor(self.corpus.batch(split, first + start, first + start + n))
            ids = rows[:, offset + shift : offset + shift + length].t().contiguous()
            out.append(ids.to(self.communicator.device, non_blocking=True))
        return out[0], out[1]

    def _token_block(self, layout: Layout) -> list[tuple[int, int]]:
        dims = ("batch", "length")
        return block(dims, self.plan.sizes, layout, self.plan.mesh, self.communicator.coordinates)

    def _sum_over_world(self, loss: Tensor, squares: Tensor) -> tuple[float, float]:
        """The loss summed over every token of the global batch, and another fp64 scalar summed over all ranks."""
        layout = self._token_layouts[1]
        mine = loss if gradients.owns(self.communicator, layout) else torch.zeros_like(loss)
        both = torch.stack((mine, squares))
        if world := self.plan.mesh.ordered(self.plan.mesh.axes):
            both = self.communicator.launch("all_reduce", both, world).wait()
        return both[0].item(), both[1].item()

    def _update(self, norm: float, lr: float) -> None:
        clip = self.config.optimizer.clip
        if clip and norm > clip:
            torch._foreach_mul_(list(self.weights.gradients.values()), clip / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.weights.refresh()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss per token over the first `eval.batches` global batches of the held-out split."""
        total = torch.zeros((), dtype=torch.float64, device=self.communicator.device)
        together = self.plan.sizes["batch"]
        count = self.config.eval.batches * self.config.train.global_batch // together
        self.ops.position = Position(training=False)
        for m in range(count):
            total += self.model.forward(self.ops, *self._load("validation", m * together))
        loss, _ = self._sum_over_world(total, torch.zeros_like(total))
        return {"val_loss": loss / (count * together * self.plan.sizes["length"])}

    @torch.no_grad()
    def sample(self, count: int, prompt: str = "def ", temperature: float = 0.8) -> str:
        """Text after `prompt`: `count` tokens, drawn alike on every rank."""
        length, rows = self.plan.sizes["length"], self.plan.sizes["batch"]
        ids = self.corpus.encode(prompt)[: length - 1]
        self.ops.position = Position(training=False)
        (start, n), (offset, extent) = self._token_block(self._token_layouts[0])
        for i in range(count):
            window = ids[-length:]
            whole = torch.zeros(length, rows, dtype=torch.int64)
            whole[: len(window)] = torch.tensor(window).unsqueeze(1)
            tokens = whole[offset : offset + extent, start : start + n].to(self.communicator.device)
            logits = self.ops.gathered(self.model.logits(self.ops, tokens), LOGITS)[len(window) - 1, 0]
            p = torch.softmax(logits.double() / temperature, -1)
            draw = (random.bits(random.key(self.config.seed, "sample"), torch.tensor(i)) & 0xFFFFFFFF) * 2.0**-32
            ids.append(min(int(torch.searchsorted(p.cumsum(0).cpu(), draw.double())), len(p) - 1))
        return self.corpus.decode(ids)


def peak_memory(device: torch.device) -> int:
    """Bytes: the largest allocation on CUDA, the largest resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
