"""Checkpoints: blocks of global tensors on any storage, verified by hash, and restored under any plan.

A worker describes its own blocks as `Block`s, and the blocks of all ranks as `HeldTensor`s, the same list on every
rank. It makes an `Image` of its `shares`, fills it at a step, and writes it in the background; the driver's `Saver`
collects the workers' reports and commits the checkpoint. `find` returns the newest checkpoint that can be trusted,
`restore` fills the blocks of any plan from it. If `restore` raises Corrupt, `quarantine` that checkpoint and `find`
again.

`RankSnapshots` keeps snapshots of the last two steps in host memory, with `copies` at peers; `recover` fills the blocks
of any plan from what survivors hold.

Its files in reading order: blocks, buffer, snapshots, memory_recovery, manifest, catalogue, saver, moves,
interchange.
"""
