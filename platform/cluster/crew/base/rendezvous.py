"""Rendezvous of the workers of a generation: a TCPStore in the driver."""

from __future__ import annotations

import socket
from typing import Any


def preload() -> None:
    """Import what `open_store` needs, a second of CPU, while nobody waits for it: while the first workers start."""
    import torch.distributed  # noqa: F401


def open_store(host: str) -> Any:
    """Start a TCPStore server in the driver, at which the workers of a generation meet to form their process groups. It
    listens on `host` alone (by default it would listen on all addresses, and it has no authentication), and answers for
    as long as the returned store lives."""
    from torch.distributed import TCPStore

    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port, descriptor = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
