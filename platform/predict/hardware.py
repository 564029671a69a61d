"""Hardware as numbers: the peaks of a device, the links between devices, and the shares of both that are reached."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from platform.plan.accelerators import find_accelerator
from platform.plan.operation_plan import TRAFFIC
from platform.plan.quantisation import Quantisation

HOST_REACHED = 25 / 32  # of the bytes/s of a GPU's link to host memory: copies over PCIe 4.0 reach 25 GB/s
LINK = ("bandwidth", "latency", "hop")


@dataclass(frozen=True)
class Link:
    """Links of each device of a group to others of one tier: bytes/s per direction and device (`bandwidth`), seconds of
    one collective beside its bytes (`latency`), and of each step around a ring or down a tree (`hop`). `kinds`: the
    same for collectives that differ, as transports reach less of a link with some, by their operation."""

    bandwidth: float
    latency: float
    hop: float
    kinds: Mapping[str, Link] = field(default_factory=dict)

    def kind_link(self, op: str) -> Link:
        """Return the links as a collective of this operation finds them."""
        return self.kinds.get(op, self)

    def slow_down(self, times: float) -> Link:
        """Return links that take so many times as long for everything."""
        kinds = {op: link.slow_down(times) for op, link in self.kinds.items()}
        return Link(self.bandwidth / times, self.latency * times, self.hop * times, kinds)


@dataclass(frozen=True)
class Reached:
    """Shares of a device's peaks that large operations reach: the speed of matrix `products`, and of products inside
    one kernel of `attention` (forward); the bandwidth of `memory`, of links inside a `node` and of the `network`
    between nodes. Measurements settle these few numbers; data sheets give all others."""

    products: float
    memory: float
    node: float
    network: float
    attention: float


_SHARES = tuple(f.name for f in fields(Reached))
MOST_REACHED = 1.5  # a share of a peak in a file; above 1 of peaks that are described too low
ATTENTION = 0.75  # share of the speed of products that one kernel of attention reaches, where nothing else is said


class StorageRates(NamedTuple):
    """Bytes/s of all nodes together, from and to the storage of checkpoints."""

    read: float
    write: float


@dataclass(frozen=True)
class Hardware:
    """Devices of one kind and the links between them; `conf/hardware/` has one file for each.

    `peaks`: dense FLOP/s by precision; `memory`: bytes; `bandwidth`: bytes/s of memory; `processors`: units over which
    the tiles of a product are dealt out; `launch`: seconds of the host for one kernel; `ranks`: devices of a node;
    `storage`: bytes/s of all nodes together. `fill`: length of the contracted dim at which a product reaches
    half of its speed, for the time to fill and drain its pipelines. `interference`: share of a hidden collective's time
    by which it slows what hides it, as it takes processors and memory (0.12 on A100 by Galvatron, 0.6 to 1 by the steps
    of FSDP in llm-foundry's tables). `adapters`: most adapters of a node that one group uses at once. `tile`: longer
    edge of the largest tile in which products are computed. `host`: bytes/s per direction between a device and the
    memory of its host, PCIe 4.0's where a file does not say. `ahead`: True if the host launches kernels while the
    device computes, and memory is read while it multiplies; a CPU does one after the other.
    """

    name: str
    peaks: Mapping[str, float]
    memory: float
    bandwidth: float
    processors: int
    launch: float
    ranks: int
    node: Link
    network: Link
    storage: StorageRates
    reached: Reached
    fill: float = 64.0
    interference: float = 0.4
    adapters: float = 64.0
    tile: float = 256.0
    host: float = 32e9
    ahead: bool = True

    def peak_flops(self, precision: str) -> float:
        """Return the dense FLOP/s of the device's matrix products in a precision of a plan."""
        return self.peaks[precision]

    def choose_narrow(self, how: Quantisation, precision: str) -> str:
        """Return the precision at whose peak products in 8 bits are computed: fp8, or `precision` if emulated."""
        entry = find_accelerator(self.name)
        has_kernels = entry is None or how.has_kernels(entry.capability)
        return "fp8" if has_kernels and "fp8" in self.peaks else precision

    def slow_down(self, times: Mapping[str, float]) -> Hardware:
        """Return the hardware whose `device`, links of a `node` and of the `network` take so many times as long."""
        device, reached = times["device"], self.reached
        slower = {name: getattr(reached, name) / device for name in ("products", "attention", "memory")}
        links = {name: getattr(self, name).slow_down(times[name]) for name in ("node", "network")}
        return replace(self, launch=self.launch * device, reached=replace(reached, **slower), **links)

    def replace_constants(self, values: Mapping[str, float]) -> Hardware:
        """Return the hardware with other values of some constants, by name: shares reached, or fields of its own."""
        shares = {key: value for key, value in values.items() if key in _SHARES}
        others: dict[str, Any] = {key: value for key, value in values.items() if key not in _SHARES}
        return replace(self, reached=replace(self.reached, **shares), **others)


def format_fitted_file(like: str, constants: Mapping[str, float], how: str) -> str:
    """Return the text of a hardware's file that is `like` another but for fitted constants; `how`: its remark."""
    shares = [f"  {key}: {min(value, MOST_REACHED):.4g}" for key, value in constants.items() if key in _SHARES]
    others = [f"{key}: {value:.4g}" for key, value in constants.items() if key not in _SHARES]
    base = json.dumps(str(Path(like).absolute()) if like.endswith((".yaml", ".yml")) else like)
    return "\n".join([f"# {how}", f"like: {base}", *others, *(["reached:", *shares] if shares else []), ""])


class HardwareMistake(ValueError):
    """Refusal of a description of hardware, `mistakes`: one line each."""

    def __init__(self, name: str, mistakes: list[str]):
        """Construct the refusal of the hardware called `name`."""
        self.mistakes = mistakes
        super().__init__("; ".join(f"hardware {name}: {line}" for line in mistakes))


@dataclass
class _DescriptionReader:
    """Reader of a description of hardware that collects its mistakes. `data`: a part of it; `path`: its place."""

    data: Mapping[str, Any]
    path: str = ""
    mistakes: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def read_number(self, key: str, default: float | None = None, most: float = float("inf")) -> float:
        """Return the positive number of a key; a mistake is noted for anything else, and for a missing key."""
        self.known.add(key)
        value = self.data.get(key, default)
        try:
            number = float(value)
            if 0 < number <= most:
                return number
        except (TypeError, ValueError):
            pass
        bound = f" and <= {most:g}" if most < 1e9 else ""
        self.mistakes.append(f"{self.path}{key}={value}: must be a number > 0{bound}")
        return 1.0

    def read_storage(self) -> StorageRates:
        """Return the rates of the storage: one number for both, or `read` and `write` apart."""
        if not isinstance(self.data.get("storage"), Mapping):
            return StorageRates(*2 * (self.read_number("storage"),))
        part = self.read_part("storage")
        rates = StorageRates(part.read_number("read"), part.read_number("write"))
        part.note_unknown_keys()
        return rates

    def read_flag(self, key: str, default: bool) -> bool:
        """Return the true or false of a key; a mistake is noted for anything else."""
        self.known.add(key)
        if isinstance(value := self.data.get(key, default), bool):
            return value
        self.mistakes.append(f"{self.path}{key}={value}: must be true or false")
        return default

    def read_link(self) -> Link:
        """Return the links that this part describes, and under `kinds` the links of collectives that differ."""
        kinds = self.read_part("kinds", {})
        parts_by_op = {op: kinds.read_part(op) for op in TRAFFIC if op in kinds.data}
        links_by_op = {op: part._build_link({}) for op, part in parts_by_op.items()}
        for part in (kinds, *parts_by_op.values()):
            part.note_unknown_keys()
        return self._build_link(links_by_op)

    def _build_link(self, kinds: Mapping[str, Link]) -> Link:
        """Return the links that this part describes, and the links of some `kinds` of collectives."""
        bandwidth, latency, hop = (self.read_number(key) for key in LINK)
        return Link(bandwidth, latency, hop, kinds)

    def read_part(self, key: str, default: Mapping[str, Any] | None = None) -> _DescriptionReader:
        """Return the reader of the mapping that a key has."""
        self.known.add(key)
        value = self.data.get(key, default)
        if not isinstance(value, Mapping):
            self.mistakes.append(f"{self.path}{key}: must have keys and values")
            value = {}
        return _DescriptionReader(value, f"{self.path}{key}.", self.mistakes)

    def note_unknown_keys(self) -> None:
        """Note a mistake for each key that nothing has read."""
        unknown = sorted(str(key) for key in self.data.keys() - self.known)
        self.mistakes.extend(f"{self.path}{key}: unknown key" for key in unknown)


def parse_hardware(name: str, data: Mapping[str, Any]) -> Hardware:
    """Return the hardware that a file of `conf/hardware/` describes; what it does not say of an `accelerator`, its
    memory and its peak in bf16, the table of accelerators does. Raises HardwareMistake with every mistake."""
    reader = _DescriptionReader(data)
    reader.known.add("accelerator")
    device = find_accelerator(str(data.get("accelerator") or ""))
    peaks = reader.read_part("peaks")
    speeds = {str(precision): peaks.read_number(str(precision)) for precision in peaks.data}
    if device and device.peak:
        speeds = {"bf16": device.peak, **speeds}
    if "bf16" not in speeds:
        reader.mistakes.append("peaks.bf16: must be there for an accelerator without a known peak")
    links = {key: reader.read_part(key) for key in ("node", "network")}
    tier_links = {key: part.read_link() for key, part in links.items()}
    ranks = links["node"].read_number("ranks")
    shares = reader.read_part("reached")
    first = {name: shares.read_number(name, most=MOST_REACHED) for name in _SHARES if name != "attention"}
    attention = shares.read_number("attention", ATTENTION * first["products"], most=MOST_REACHED)
    reached = Reached(**first, attention=attention)
    hardware = Hardware(
        name=name,
        peaks=speeds,
        memory=reader.read_number("memory", device.memory if device else None),
        bandwidth=reader.read_number("bandwidth"),
        processors=int(reader.read_number("processors")),
        launch=reader.read_number("launch"),
        ranks=int(ranks),
        storage=reader.read_storage(),
        fill=reader.read_number("fill", Hardware.fill),
        interference=reader.read_number("interference", Hardware.interference),
        adapters=reader.read_number("adapters", Hardware.adapters),
        tile=reader.read_number("tile", Hardware.tile),
        host=reader.read_number("host", Hardware.host),
        ahead=reader.read_flag("ahead", Hardware.ahead),
        reached=reached,
        **tier_links,
    )
    for part in (reader, *links.values(), shares):
        part.note_unknown_keys()
    if reader.mistakes:
        raise HardwareMistake(name, reader.mistakes)
    return hardware
