"""One rank's training step: forward and backward over microbatches, reduction, clipping, update."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from math import sqrt
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.config import Config
from platform.data import END_OF_TEXT
from platform.model import build as build_model
from platform.model.blocks import LOGITS
from platform.model.encoder import Encoder
from platform.parallel import gradients, random
from platform.parallel.clock import Clock
from platform.parallel.groups import Communicator
from platform.parallel.ops import ParallelOps, Position
from platform.plan.plan import Plan
from platform.train.inputs import Blocks, place
from platform.train.optimizers import OPTIMIZERS
from platform.train.schedule import learning_rate
from platform.train.weights import Weights

SECTIONS = ("data", "forward", "backward", "exposed_comm", "bubble", "reduce", "optimizer", "checkpoint")


class Corpus(Protocol):
    """What the trainer needs of platform.data: one global order of samples."""

    def batch(self, split: str, start: int, end: int) -> Any: ...  # data tensor -> int64 [end - start, length]

    def predicted(self, split: str, start: int, end: int) -> int: ...  # labels that are not padding

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

    def _make_optimizer(self) -> torch.optim.Optimizer:
        o, owned = self.config.optimizer, self.weights.owned
        decayed = [owned[p.name] for p in self.plan.parameters if p.name in owned and p.decay]
        others = [owned[p.name] for p in self.plan.parameters if p.name in owned and not p.decay]
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
        loss, predicted = self._forward_backward(step)
        with self.clock.section("reduce"):
            grads = self.weights.gradients
            gradients.reduce(self.plan, self.communicator, grads)
            squares = gradients.squared_norm(self.plan, self.communicator, grads)
            total, square = self._sum_over_world(loss, squares)
        return total / predicted, sqrt(square)

    def _forward_backward(self, step: int) -> tuple[Tensor, int]:
        """Accumulates this rank's gradient of the global mean loss; returns its summed loss and the number of tokens
        that the mean is over."""
        first = (step - 1) * self.config.train.global_batch
        predicted = self.corpus.predicted("train", first, first + self.config.train.global_batch)
        total = torch.zeros((), dtype=torch.float64, device=self.communicator.device)
        together = self.plan.sizes["batch"]
        for m in range(self.plan.microbatches):
            with self.clock.section("data"):
                inputs = self.load("train", first + m * together)
            self.ops.position = Position(self.config.seed, step, m * together)
            with self.clock.section("forward"):
                loss = self.model.forward(self.ops, inputs)
            with self.clock.section("backward"):
                (loss / predicted).backward()
                self.weights.accumulate()
            total += loss.detach()
        return total, predicted

    def load(self, split: str, first: int) -> Blocks:
        """This rank's blocks of the microbatch whose first sequence (all replicas together) is `first`."""
        return place(self.plan, self.communicator, lambda i, j: self.corpus.batch(split, first + i, first + j))

    def _sum_over_world(self, loss: Tensor, squares: Tensor) -> tuple[float, float]:
        """The loss summed over every token of the global batch, and another fp64 scalar summed over all ranks."""
        mine = loss if gradients.owns(self.communicator, self.plan.loss_layout) else torch.zeros_like(loss)
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
            total += self.model.forward(self.ops, self.load("validation", m * together))
        loss, _ = self._sum_over_world(total, torch.zeros_like(total))
        return {"val_loss": loss / self.corpus.predicted("validation", 0, count * together)}

    @torch.no_grad()
    def sample(self, count: int, prompt: str = "def ", temperature: float = 0.8) -> str:
        """`count` tokens of text after `prompt`, or in answer to it where an encoder reads it; alike on every rank."""
        assert not isinstance(self.model, Encoder), "platform.checks refuses monitor.sample"
        length, given = self.plan.sizes["length"], self.corpus.encode(prompt)
        answers = "source" in self.model.inputs
        ids = [END_OF_TEXT] if answers else given[: length - 1]
        source = self._row(given, self.config.model.source_length or length)
        self.ops.position = Position(training=False)
        for i in range(count):
            window = ids[-length:]
            row = self._row(window, length)
            inputs = self._place({"source": source, "tokens": row, "labels": row})
            logits = self.ops.gathered(self.model.logits(self.ops, inputs), LOGITS)[len(window) - 1, 0]
            p = torch.softmax(logits.double() / temperature, -1)
            draw = (random.bits(random.key(self.config.seed, "sample"), torch.tensor(i)) & 0xFFFFFFFF) * 2.0**-32
            ids.append(min(int(torch.searchsorted(p.cumsum(0).cpu(), draw.double())), len(p) - 1))
        return self.corpus.decode(ids[1:] if answers else ids)

    def _place(self, data: Mapping[str, Tensor]) -> Blocks:
        """This rank's blocks of a batch of equal sequences [1, length]."""
        return place(self.plan, self.communicator, lambda i, j: {k: v.expand(j - i, -1) for k, v in data.items()})

    @staticmethod
    def _row(ids: list[int], length: int) -> Tensor:
        """[1, length]: the ids, then padding."""
        return F.pad(torch.tensor([ids[:length]], dtype=torch.int64), (0, max(0, length - len(ids))), value=-1)


def peak_memory(device: torch.device) -> int:
    """Bytes: the largest allocation on CUDA, the largest resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
