"""A language model without attention: a gated linear recurrence over length, under two tensor schemes.

    python examples/own_recurrence.py

Every token decays what the layer remembers by gates of its own and adds to it (RG-LRU, De et al. 2024). The recurrence
is one word, `ops.recurrence`: `platform/plan/operations/recurrence.py` has all of it in one file, from its dims to
its bytes, and shows how a word is added.
"""

from platform.api import Parameter, Spec, communication, compose, plan, register_model, run

STREAM = Spec.of("stream", "length batch d_model")  # region, then dims in the order of memory
HIDDEN = Spec.of("mlp", "length batch d_ff")
LOGITS = Spec.of("logits", "length batch vocab")


class Recurrent:
    """Next-token model: softmax(down(memory) + x), where memory[t] = gate[t] * memory[t - 1] + up(x[t])."""

    inputs = ("tokens", "labels")

    def __init__(self, config):
        self.sizes = {"length": config.length, "d_model": config.d_model, "d_ff": 64, "vocab": config.vocab}
        self.table = Parameter("table", ("vocab", "d_model"), "in", std=0.1, decay=True)
        self.gain = Parameter("gain", ("d_model",), "vector", "ones")
        self.up = Parameter("up", ("d_ff", "d_model"), "in", std=0.2, decay=True)
        self.gate = Parameter("gate", ("d_ff", "d_model"), "in", std=0.2, decay=True)
        self.down = Parameter("down", ("d_model", "d_ff"), "out", std=0.1, decay=True)

    def parameters(self):
        return [self.table, self.gain, self.up, self.gate, self.down]

    def forward(self, ops, inputs):
        x = ops.lookup("embedding", self.table, inputs["tokens"], STREAM)
        y = ops.norm(x, STREAM, "rmsnorm", self.gain, None)
        up, gate = ops.project(y, STREAM, (self.up, self.gate), (HIDDEN, HIDDEN))
        memory = ops.recurrence("memory", ops.pointwise("sigmoid", gate), up, HIDDEN)
        (y,) = ops.project(memory, HIDDEN, (self.down,), (STREAM,))
        (logits,) = ops.project(ops.pointwise("add", x, y), STREAM, (self.table,), (LOGITS,))
        return ops.cross_entropy("loss", logits, LOGITS, inputs["labels"])


register_model("recurrent", Recurrent)

OWN = ["extend=[own_recurrence]", "model.kind=recurrent", "model.d_model=32", "model.length=32", "model.vocab=300"]
TEXT = ["data=text", f"data.path={__file__}", "data.validation=0", "data.cache=runs/cache"]  # it learns this file
BATCH = ["train.global_batch=8", "train.microbatch=8", "train.steps=20", "optimizer.lr=0.03", "monitor.every=10"]
COMMON = [*OWN, *TEXT, *BATCH, "cluster.device=cpu"]


def main() -> None:
    schemes = {
        "megatron": ["tensor=1d", "tensor.axes.t=2"],  # d_ff is split: each rank has its own part of the memory
        "length": ["tensor=layout", "tensor.layout={stream: {length: c}, mlp: {length: c}}", "tensor.axes.c=2"],
    }
    for name, scheme in schemes.items():
        print(f"{name:>8} would move", communication(plan(compose(*COMMON, *scheme))), "bytes a step")
    result = run(compose(*COMMON, "cluster=inline", "run.dir=runs/own_recurrence"))
    print(f"loss {result.metrics[0].loss:.3f} -> {result.loss:.3f}")


if __name__ == "__main__":
    main()
