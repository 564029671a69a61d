"""Checkpoints: blocks of global tensors on any storage, verified by hash, and restored under any plan. They can be
converted to safetensors files and to torch.distributed.checkpoint, and back (`interchange.py`).

A worker describes its own blocks as `Block`s, and the blocks of all ranks as `HeldTensor`s, the same list on every
rank. It makes a `FileImage` of its `shares`, fills it at a step, and writes it in the background; the driver's
`CheckpointSaver` collects the workers' reports and commits the checkpoint. `find_newest_checkpoint` returns the newest
one that can be trusted, `restore_checkpoint` fills the blocks of any plan from it. If that raises Corrupt,
`quarantine_checkpoint` takes the checkpoint away, and the next one is sought.

`RankSnapshots` keeps snapshots of the last two steps in host memory, with copies at peers (`assign_copies`);
`recover_state` fills the blocks of any plan from the survivors' memory.

Its files in reading order: blocks, buffer, snapshots, memory_recovery, manifest, catalogue, saver, moves,
interchange.
"""
