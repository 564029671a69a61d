"""Protocols of the URLs at which files may lie, judged without connecting to anything."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

# fsspec protocols under which a file appears only when it is committed, as checkpoints need.
WRITABLE = tuple("file local memory s3 s3a gs gcs abfs abfss az adl sftp ssh oci oss obs cos tos hf dbfs".split())


def violation_of_protocol(url: str, writing: bool = True) -> str:
    """Return why checkpoints cannot be saved at a path or URL, judging by its protocol alone; "" if they can.

    With `writing` False, returns why a file there cannot be read.
    """
    protocol, separator, rest = url.partition("://")
    if not separator:
        return ""
    if not rest.strip("/"):
        return "cannot be used: names no place in the storage"
    if special := _special_file(url):
        return f"cannot be used: {special} is a pipe or a device, and a regular file or a folder is needed"
    if "::" in url:
        return "cannot be used: nothing can be saved through a chain of storages" if writing else ""
    if protocol in WRITABLE:
        return ""
    import fsspec
    from fsspec.registry import known_implementations

    if protocol in known_implementations:
        return f"cannot be used: nothing can be saved through {protocol}" if writing else ""
    if protocol not in fsspec.registry:  # a module in `extend` may have registered one
        return f"cannot be used: no storage is known by {protocol}"
    return ""


def _special_file(url: str) -> str:
    """Return the path of a pipe, socket or device of this machine that a file's URL, or a part of its chain, names; ""
    if none does."""
    from fsspec.implementations.local import LocalFileSystem

    for part in url.split("::"):
        if part.partition("://")[0] in ("file", "local") or "://" not in part:
            path = LocalFileSystem._strip_protocol(part)
            with suppress(OSError, ValueError):  # who reads it says what is wrong
                mode = os.stat(path).st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    return path
    return ""
