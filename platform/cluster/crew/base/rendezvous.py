"""Rendezvous of the workers of a generation: a TCPStore in the driver."""

from __future__ import annotations

import socket


class Rendezvous:
    """TCPStore server at `address` (host, port); it answers from `start` on and for as long as this object lives.

    It listens on that one address only. A TCPStore by default listens on all of them and has no authentication.
    """

    def __init__(self, host: str):
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])

    def start(self) -> None:
        """Begin to answer; until then connections wait. Separate from the constructor because it imports torch."""
        from torch.distributed import TCPStore

        fd = self._listener.detach()
        self._store = TCPStore(*self.address, is_master=True, wait_for_workers=False, master_listen_fd=fd)
