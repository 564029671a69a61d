"""Name of the network interface that an address of this machine belongs to."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_INET6 = "/proc/net/if_inet6"


def interface_of(address: str) -> str:
    """Return the name of this machine's network interface with the IPv4 or IPv6 `address`; "" if none is found."""
    with suppress(OSError, ValueError):
        return _with_inet6(address) if ":" in address else _with_inet(address)
    return ""


def _with_inet(address: str) -> str:
    """Return the name of the interface with this IPv4 address, asked by ioctl; "" if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex() if fcntl else []:
            with suppress(OSError):  # it has none
                found = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def _with_inet6(address: str) -> str:
    """Return the name of the interface with this IPv6 or IPv4-mapped address, from _INET6; "" if none has it."""
    if "." in address:  # an IPv4 address in IPv6's form
        return _with_inet(address.rpartition(":")[2])
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with open(_INET6) as lines:
        return next((line.split()[-1] for line in lines if line.startswith(wanted)), "")
