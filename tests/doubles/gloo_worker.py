"""Workers in a real gloo group, without a model."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from platform.runtime.progress import PROGRESS
from platform.train.replies import Joined


class GlooWorker:
    """`turn`: two all-reduces, between which a rank may die."""

    def __init__(self, config, number, *, device, run_dir, threads):
        torch.set_num_threads(1)
        self.number, self.run_dir, self.stays = number, Path(run_dir), False

    def join_mesh(self, rank, world_size, config, store, generation, stage_of, plan=""):
        self.rank, self.generation = rank, generation
        prefix = dist.PrefixStore(f"generation/{generation}", dist.TCPStore(*store, is_master=False))
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size)
        return Joined(rank, {}, os.getpid(), "here")

    def turn(self, kill=None, stays=False):
        """`stays`: who notices that a rank is gone keeps its connections (the mistake that leaves others waiting)."""
        self.stays = stays
        x = torch.ones(1 << 10)
        dist.all_reduce(x)
        if self.rank == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        with PROGRESS.mark_waiting("all_reduce"):
            dist.all_reduce(x)
        return x[0].item()

    def turns(self):
        """Until a rank is gone."""
        while True:
            self.turn()

    def abort(self):
        pass

    def leave(self):
        (self.run_dir / f"left-{self.generation}-{self.number}").touch()
        if dist.is_initialized() and not self.stays:
            dist.destroy_process_group()

    def close(self):
        self.stays = False
        self.leave()
