"""A model of your own, written in the platform's operations over named dims, under two tensor schemes.

    python examples/own_model.py

The forward pass is written once and names neither ranks nor collectives: recorded, it becomes the plan; on tensors, it
computes. `platform/plan/operations/registry.py` lists the operations. This one predicts the next token from the present
one through a gated layer; `d_ff` and `vocab` are dims that every scheme knows, `expert` is the model's own.
"""

from platform.api import Parameter, Spec, communication, compose, plan, register_model, run

STREAM = Spec.of("stream", "length batch d_model")  # region, then dims in the order of memory
HIDDEN = Spec.of("mlp", "length batch expert d_ff")
GATES = Spec.of("mlp", "length batch expert")
LOGITS = Spec.of("logits", "length batch vocab")


class GatedBigram:
    """Next-token model: softmax(down(gelu(up x) * gate x)) over a few experts of which each token weighs all."""

    inputs = ("tokens", "labels")

    def __init__(self, config):
        self.sizes = {
            "length": config.length,
            "d_model": config.d_model,
            "d_ff": 32,
            "expert": 4,
            "vocab": config.vocab,
        }
        self.table = Parameter("table", ("vocab", "d_model"), "in", std=0.3, decay=True)
        self.gain = Parameter("gain", ("d_model",), "vector", "ones")
        self.up = Parameter("up", ("d_model", "expert", "d_ff"), "in", std=0.3, decay=True)
        self.gate = Parameter("gate", ("d_model", "expert"), "in", std=0.3, decay=True)
        self.down = Parameter("down", ("expert", "d_ff", "d_model"), "out", std=0.1, decay=True)

    def parameters(self):
        return [self.table, self.gain, self.up, self.gate, self.down]

    def forward(self, ops, inputs):
        x = ops.lookup("embedding", self.table, inputs["tokens"], STREAM)
        y = ops.norm(x, STREAM, "rmsnorm", self.gain, None)
        hidden, gates = ops.project(y, STREAM, (self.up, self.gate), (HIDDEN, GATES))
        gates = ops.softmax("gates", gates, GATES, dim="expert")
        hidden = ops.einsum("gated", ops.pointwise("gelu", hidden), HIDDEN, gates, GATES, HIDDEN)
        (y,) = ops.project(hidden, HIDDEN, (self.down,), (STREAM,))
        (logits,) = ops.project(ops.pointwise("add", x, y), STREAM, (self.table,), (LOGITS,))
        return ops.cross_entropy("loss", logits, LOGITS, inputs["labels"])


register_model("gated_bigram", GatedBigram, dims=["expert"])

OWN = ["extend=[own_model]", "model.kind=gated_bigram", "model.d_model=32", "model.length=16", "model.vocab=300"]
TEXT = ["data=text", f"data.path={__file__}", "data.validation=0", "data.cache=runs/cache"]  # it learns this file
BATCH = ["train.global_batch=16", "train.microbatch=16", "train.steps=20", "optimizer.lr=0.03", "monitor.every=10"]
COMMON = [*OWN, *TEXT, *BATCH, "cluster.device=cpu"]


def main() -> None:
    schemes = {
        "megatron": ["tensor=1d", "tensor.axes.t=2"],
        "experts": ["tensor=layout", "tensor.layout=expert:e;vocab:e", "tensor.axes.e=2"],
    }
    for name, scheme in schemes.items():
        print(f"{name:>8} would move", communication(plan(compose(*COMMON, *scheme))), "bytes a step")
    result = run(compose(*COMMON, "cluster=inline", "run.dir=runs/own_model"))
    print(f"loss {result.metrics[0].loss:.3f} -> {result.loss:.3f}")


if __name__ == "__main__":
    main()
