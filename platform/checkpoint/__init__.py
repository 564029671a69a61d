"""Checkpoints: blocks of global tensors on any storage, verified, and restored under any plan.

A worker describes what it holds as `Block`s, and what everybody holds as `Held`, the same list on all ranks. It makes
an `Image` of its `shares`, fills it at a step and writes it in the background; the driver's `Saver` gathers the reports
and commits. `find` names the newest checkpoint that can be trusted, `restore` fills the blocks of any other plan. Where
`restore` raises Corrupt: `quarantine` that one and `find` again.

A `Memory` holds the last steps in host memory, with `copies` at peers; `recover` fills the blocks of any other plan
with what survivors have.
"""

from platform.checkpoint.box import Box
from platform.checkpoint.catalogue import Found, find, load, quarantine, split, verify
from platform.checkpoint.image import Image
from platform.checkpoint.manifest import Corrupt, Manifest, Meta, Refused
from platform.checkpoint.memory import Memory, Snapshot
from platform.checkpoint.peers import Copy, copies, kept_bytes
from platform.checkpoint.reshard import read_tensor, restore
from platform.checkpoint.saver import Saver
from platform.checkpoint.state import Block, Held, Share, blocks, planned, shares
from platform.checkpoint.storage import Storage, connect
from platform.checkpoint.survivors import handed_over, keepers, recover, suffice, surviving, whole

__all__ = [
    "Block", "Box", "Copy", "Corrupt", "Found", "Held", "Image", "Manifest", "Memory", "Meta", "Refused", "Saver",
    "Share", "Snapshot", "Storage", "blocks", "connect", "copies", "find", "handed_over", "keepers", "kept_bytes",
    "load", "planned", "quarantine", "read_tensor", "recover", "restore", "shares", "split", "suffice", "surviving",
    "verify", "whole",
]  # fmt: skip
