"""Rendezvous of the workers of a generation: a TCPStore in the driver."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ctypes import CDLL, c_int
from pathlib import Path
from typing import Any

_LEVEL = "TORCH_CPP_LOG_LEVEL"
_ERROR = 2  # of torch's C++ log


def preload() -> None:
    """Import torch.distributed, a second of CPU, which the driver's TCPStore needs, while the first workers start."""
    import torch.distributed  # noqa: F401


def open_store(host: str) -> Any:
    """Start a TCPStore server in the driver, at which the workers of a generation meet to form their process groups. It
    listens on `host` alone (by default it would listen on all addresses, and it has no authentication), and answers for
    as long as the returned store lives."""
    from torch.distributed import TCPStore

    _keep_backtraces_out_of_logs()
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port, descriptor = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _keep_backtraces_out_of_logs() -> None:
    """Let torch's C++ part in the driver, which serves the workers' TCPStore, log errors alone, unless the user's
    environment sets its level: for each invalid message, which any stranger can send, the store warns in 25 lines, and
    they would fill a disk.

    The variable itself is only read while torch is imported, which may have been long ago.
    """
    import torch

    if _LEVEL not in os.environ:
        with suppress(OSError, ValueError):  # another build of torch
            library = CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _ERROR
