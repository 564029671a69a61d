"""Addresses of this machine, and the network interfaces that have them."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import closing, suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_INET6 = Path("/proc/net/if_inet6")
_SCOPES = ("00", "10")  # there: of global addresses and of loopback; addresses of a link would need a zone


def interface_of(address: str) -> str:
    """Return this machine's network interface with the IPv4 or IPv6 `address`, for workers to use; "" for none."""
    wanted = address.rpartition(":")[2] if "." in address else address  # an IPv4 address in IPv6's form
    return next((name for name, own in [*addresses(4), *addresses(6)] if own == wanted), "")


def addresses(version: int) -> list[tuple[str, str]]:
    """Return (interface, routable address of an IP version) of this machine, for driver and workers; loopback last."""
    found = _ipv4() if version == 4 else _ipv6(_INET6)
    return sorted(found, key=lambda pair: pair[0] == "lo")


def _ipv4() -> list[tuple[str, str]]:
    """Return (interface, address) of this machine's network interfaces with an IPv4 address, for workers to use."""
    found = []
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _ipv6(table: Path) -> list[tuple[str, str]]:
    """Return (network interface, IPv6 address), global ones and loopback, from the kernel's table (_INET6)."""
    with suppress(OSError):
        rows = [line.split() for line in table.read_text().splitlines()]
        return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows if row[3] in _SCOPES]
    return []
