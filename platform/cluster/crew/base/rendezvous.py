"""Where the workers of a generation find each other: a store that the driver holds."""

from __future__ import annotations

import socket


class Rendezvous:
    """A TCPStore at `address` (host, port), from `start` on and for as long as this object lives.

    Only that one address is listened on: a TCPStore by itself would listen on all, and asks nobody for a password.
    """

    def __init__(self, host: str):
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])

    def start(self) -> None:
        """Begins to answer; until then connections wait. Apart from the constructor because it imports torch."""
        from torch.distributed import TCPStore

        fd = self._listener.detach()
        self._store = TCPStore(*self.address, is_master=True, wait_for_workers=False, master_listen_fd=fd)
