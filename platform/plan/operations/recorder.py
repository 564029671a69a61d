"""The recorder, which turns a model's forward pass into the list of its operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from platform.plan.language.attention_kernels import AUTO
from platform.plan.language.functions import PLAIN, LabelLoss
from platform.plan.language.mistakes import ModelMistake, check_specs
from platform.plan.language.ops import NO_RECOMPUTATION, Operation, Parameter, Recompute, Spec, dtype_of
from platform.plan.language.scheme import Scheme
from platform.plan.operations.attention.cached import KeyValueCache
from platform.plan.operations.words import Ops

LINEAR = ("shift", "dropout")  # operations whose gradients need no value of what they take


@dataclass(frozen=True)
class Symbol:
    """Stand-in for an activation while a model's forward pass is recorded; it carries only the type."""

    spec: Spec


@dataclass
class Recorder(Ops):
    """Records the operations of a model's forward pass as data, without computing anything; the scheme decides
    `fuses_attention`. A data tensor is represented by its name. `loss`: the training loss, in place of
    cross-entropy."""

    scheme: Scheme
    dropout_rate: float = 0.0
    recompute: Recompute = NO_RECOMPUTATION
    fused_dropout: bool = False
    attention_kernel: str = AUTO
    loss: LabelLoss = PLAIN
    operations: list[Operation] = field(default_factory=list)
    functions: list[tuple] = field(
        default_factory=list
    )  # of which nothing is planned: (operations before it, its words)
    kept: list[Spec] = field(default_factory=list)  # type of x of every recomputed function
    sizes: Mapping[str, int] = field(default_factory=dict)  # dim -> size; {}: dims are not checked
    declared: Mapping[str, Parameter] = field(default_factory=dict)  # by name; {}: parameters are not checked
    cache: KeyValueCache | None = None
    leaves_out: bool = True  # results of recomputed operations that no gradient needs
    span: int = 0  # stretch of the forward pass under way: odd in a block, even between blocks
    spans: list[int] = field(default_factory=list)  # by operation
    method = "record"
    _names: set[tuple[str, str]] = field(default_factory=set)
    _recomputing: bool = False

    @property
    def settings(self) -> tuple:
        """Return all on which depends what this recorder finds in a model: of the scheme what it asks of it."""
        given = self.dropout_rate, self.recompute, self.fused_dropout, self.attention_kernel, self.loss, self.leaves_out
        return repr(self.scheme.regions), self.scheme.uneven, self.scheme.ring, *given

    def recomputed(self, kind, name, function, spec, x, *more):
        """Record `function`, and that its operations are recomputed if activations of this `kind` are."""
        again, block = kind == self.recompute.kind, kind == "full"
        if again:
            self.check(x, spec)
            self.kept.append(spec)
            self._recomputing = True
        self.span += block
        begun = len(self.operations)
        out = function(x, *more)
        self.span += block
        if again:
            self._recomputing = False
        if again and block and self.leaves_out:
            self._leave_out(begun)
        return out

    def _leave_out(self, begun: int) -> None:
        """Mark the last product of a recomputed stretch, whose operations begin at `begun`, if no gradient needs its
        result: all behind it add or drop."""
        last = len(self.operations) - 1
        while last >= begun and self.operations[last].kind in LINEAR:
            last -= 1
        behind = [words[1:] for words in self.functions if words[0] > last]
        if last >= begun and all(words[:2] == ("pointwise", "add") for words in behind):
            o = self.operations[last]
            if o.kind == "project" and len(o.outputs) == 1:
                self.operations[last] = replace(o, once=True)

    def record(
        self,
        kind: str,
        name: str,
        x: Sequence,
        inputs: Sequence,
        outputs: Sequence[Spec],
        reads: Sequence[str | None] = (),
        **more: Any,
    ) -> Any:
        """Append an operation to the recorded forward pass of a model; return the symbol of its result, or a tuple of
        several. `x`: the activations, checked against the types with which `inputs` starts; `reads`: the data tensors
        that it reads, if not None; `more`: its attributes."""
        for activation, declared in zip(x, inputs, strict=False):
            self.check(activation, declared)
        self._judge(kind, name, inputs, outputs)
        attributes = tuple(sorted(more.items()))
        read = tuple(name for name in reads if name)
        operation = Operation(kind, name, tuple(inputs), tuple(outputs), attributes, read, self._recomputing)
        self.operations.append(operation)
        self.spans.append(self.span)
        symbols = tuple(Symbol(s) for s in outputs)
        return symbols[0] if len(symbols) == 1 else symbols

    def _judge(self, kind: str, name: str, inputs: Sequence, outputs: Sequence[Spec]) -> None:
        """Refuse a recorded operation `kind` `name` of a model with ModelMistake if its inputs or outputs have an
        unknown region or dim, if a parameter is not declared or declared otherwise, if it does not compute in the type
        of statistics where it should, or if an operation of the same kind already has the name."""
        if self.sizes:
            check_specs(f"{kind} {name}", [*inputs, *outputs], self.sizes)
        for p in (t for t in inputs if isinstance(t, Parameter)):
            if self.declared and self.declared.get(p.name) != p:
                known = "is declared otherwise" if p.name in self.declared else "is not declared"
                legal = self.declared if p.name not in self.declared else ()
                raise ModelMistake(p.name, f"a parameter that {known}, in {kind} {name}", legal)
        for end, tensors in (("inputs", inputs), ("outputs", outputs)):
            word = getattr(Ops, kind)
            for t in (t for t in tensors if isinstance(t, Spec) and t.open):
                if word.open.get(end) != t.open:
                    raise ModelMistake(name, f"{end} of {kind} are complete, unlike {t}")
            if end not in word.wide and (wide := [t for t in tensors if dtype_of(t) != "compute"]):
                raise ModelMistake(name, f"{end} of {kind} are in the compute type, unlike {wide[0]}")
        if (kind, name) in self._names:
            raise ModelMistake(name, f"several operations {kind} have this name")
        self._names.add((kind, name))

    def note(self, *words: Any) -> None:
        """Take note of a function element by element, of which nothing is planned, by `words` that say which it is."""
        self.functions.append((len(self.operations), *words))

    def check(self, x: Symbol, spec: Spec) -> None:
        """Raise ModelMistake if x is no activation, or one of another type than the `spec` that a model declares."""
        if not isinstance(x, Symbol):
            raise ModelMistake(type(x).__name__, f"what flows is what an operation returned, as {spec}")
        if x.spec != spec:
            raise ModelMistake(str(x.spec), f"the model passes it where it declares {spec}", [str(spec)])

    def rings(self, name, spec, kv, sink):
        alone = sink and self.scheme.fuses_attention(spec.region) and not self.splits(spec, "length")
        return not self.cache and not self.dropout_rate and (alone or self.scheme.rings(spec.region, kv.region))

    def splits(self, spec, dim):
        return bool(self.scheme.regions[spec.region][dim])

    def fuses_attention(self, name, spec):
        return (self.fused_dropout or not self.dropout_rate) and self.scheme.fuses_attention(spec.region)
