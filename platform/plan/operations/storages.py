"""Stand-ins for device memory: storages that count their bytes while something refers to them, and an autograd tape
whose backward passes allocate and free such storages.

A forward pass run on them by `platform.plan.memory.meter` keeps alive what it would keep alive on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from sys import getrefcount

INTEGER = 8  # bytes of a token id, and of an element's index

GradientKey = int | str  # of a gradient: a parameter's name, or a number for an activation


@dataclass
class Ledger:
    """Count of the bytes of living metered storages: now, and their maximum since `peak` was last set."""

    now: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """Add the bytes of a new metered storage to the bytes in use, and raise the forecast's peak if exceeded."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)


class MeteredStorage:
    """Memory under one or more tensors, counted until the last reference to it is gone. `counted`: its floating-point
    elements, 0 for integers; `parameter`: True for a gathered copy of a parameter; `permuted`: its dims lie in
    attention's order, and a product copies it."""

    __slots__ = ("_ledger", "counted", "nbytes", "parameter", "permuted")
    permuted: bool

    def __init__(self, ledger: Ledger, nbytes: int, counted: int, parameter: bool = False):
        """Construct a storage of `nbytes` and add them to the `ledger`; the other arguments as in the class."""
        self._ledger, self.nbytes, self.counted, self.parameter = ledger, nbytes, counted, parameter
        self.permuted = False
        ledger.add(nbytes)

    def like(self) -> MeteredStorage:
        """Allocate another metered storage of the same number of bytes, for the memory forecast."""
        return MeteredStorage(self._ledger, self.nbytes, self.counted, self.parameter)

    def __del__(self) -> None:
        """Remove the storage's bytes from the ledger of the memory meter once nothing refers to it."""
        self._ledger.now -= self.nbytes


_KEYS = count()
_ALONE = 2  # references to what a dict alone holds, as `getrefcount` counts them: its own argument is one


class Value:
    """Stand-in for a tensor in the memory meter: a number of elements in a storage; the storage is None for a parameter
    as it is stored, whose bytes are counted apart."""

    __slots__ = ("elements", "key", "storage")

    def __init__(self, storage: MeteredStorage | None, elements: int, key: GradientKey | None = None):
        """Construct a metered tensor; `key`: name of the parameter that it is, by default a new number."""
        self.storage, self.elements = storage, elements
        self.key: GradientKey = next(_KEYS) if key is None else key

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element of this metered tensor, 0 for a parameter as it is stored."""
        return self.storage.nbytes // self.storage.counted if self.storage and self.storage.counted else 0


Gradients = Sequence[MeteredStorage | None]
Saved = tuple[MeteredStorage | None, ...]
Backward = Callable[[Gradients, Saved], Gradients]  # (gradients of results, saved) -> gradients of inputs


@dataclass
class _Node:
    """Operation of a metered pass: its backward function, and the storages that this keeps."""

    outs: Sequence[GradientKey]
    ins: Sequence[GradientKey]
    saved: Saved
    backward: Backward


class Leaves:
    """Takes the gradients of parameters as they come in a backward pass, by name; this one drops them."""

    def setdefault(self, name: GradientKey, gradient: MeteredStorage) -> None:
        """Accept the metered gradient of the parameter `name`; a memory forecast without gradient sums drops it."""

    def in_place(self, name: GradientKey) -> bool:
        """Return True if the gradient of parameter `name` adds up in its bucket, after counting it; here False."""
        return False


class Tape:
    """Autograd tape of the memory meter: the operations of forward passes, in order."""

    def __init__(self) -> None:
        """Start an empty autograd tape of the memory meter."""
        self._nodes: list[_Node] = []

    def note(self, outs: Sequence[Value], ins: Sequence[Value], saved: Saved, backward: Backward) -> None:
        """Append an operation (outputs, inputs, `saved` storages, backward function) to the memory meter's tape."""
        self._nodes.append(_Node([x.key for x in outs], [x.key for x in ins], saved, backward))

    def saved(self) -> list[MeteredStorage]:
        """Return the distinct metered storages that the recorded operations save for the backward pass."""
        return list({id(s): s for node in self._nodes for s in node.saved if s}.values())

    def unwind(self, gradients: dict[GradientKey, MeteredStorage], leaves: Leaves) -> None:
        """Run the metered backward passes of the recorded operations in reverse order, freeing the saved storages.
        `gradients`: the outputs' gradients on entry and the inputs' in the end, by the tensor's key; `leaves`: receiver
        of the parameters' gradients. A further gradient of the same tensor is added in place, unless something else
        holds the first."""
        while self._nodes:
            node = self._nodes.pop()
            given = [gradients.pop(key, None) for key in node.outs]
            if any(given):
                found = list(node.backward(given, node.saved))
                del given
                for key in reversed(node.ins):
                    if g := found.pop():
                        if isinstance(key, str):
                            leaves.setdefault(key, g)
                        elif key in gradients and getrefcount(gradients[key]) > _ALONE:
                            gradients[key] = g.like()
                        else:
                            gradients.setdefault(key, g)
                    del g
