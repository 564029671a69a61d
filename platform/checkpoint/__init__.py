"""Checkpoints: blocks of global tensors on any storage, verified by hash, and restored under any plan.

A worker describes the blocks that it holds as `Block`s, and those of all ranks as `Held`s, the same list on every rank.
It makes an `Image` of its `shares`, fills it at a step, and writes it in the background; the driver's `Saver` collects
the workers' reports and commits the checkpoint. `find` returns the newest checkpoint that can be trusted, `restore`
fills the blocks of any plan from it. If `restore` raises Corrupt, `quarantine` that checkpoint and `find` again.

A `Memory` keeps snapshots of the last two steps in host memory, with `copies` at peers; `recover` fills the blocks of
any plan from what survivors hold.
"""

from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.placement import Block, Held, Share, blocks, planned, shares
from platform.checkpoint.in_memory.copies import Copy, copies, kept_bytes
from platform.checkpoint.in_memory.recover import handed_over, keepers, recover, suffice, surviving, whole
from platform.checkpoint.in_memory.snapshots import Memory, Snapshot
from platform.checkpoint.moves.reshard import read_tensor, restore
from platform.checkpoint.storage.catalogue import Found, find, load, quarantine, split, verify
from platform.checkpoint.storage.image import Image
from platform.checkpoint.storage.manifest import Corrupt, Manifest, Meta, Refused
from platform.checkpoint.storage.saver import Saver
from platform.checkpoint.storage.storage import Storage, connect

__all__ = [
    "Block", "Box", "Copy", "Corrupt", "Found", "Held", "Image", "Manifest", "Memory", "Meta", "Refused", "Saver",
    "Share", "Snapshot", "Storage", "blocks", "connect", "copies", "find", "handed_over", "keepers", "kept_bytes",
    "load", "planned", "quarantine", "read_tensor", "recover", "restore", "shares", "split", "suffice", "surviving",
    "verify", "whole",
]  # fmt: skip
