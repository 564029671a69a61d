"""The examples in jobs/: each is what a command writes. `python -m tests.jobs.examples` writes them all again."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path

from platform.jobs.kubernetes import render_kubernetes_claim, render_kubernetes_job
from platform.jobs.slurm import render_slurm_job

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "jobs"
WRITE = {"kubernetes": render_kubernetes_job, "slurm": render_slurm_job}

DATA = "data=text data.path=/shared/corpus checkpoint.url=/shared/checkpoints/"
POD = " job.image=elastic-platform:0.1.0 job.claim=shared"
ONE = "+experiment=one_gpu "
NODE = "+experiment=one_gpu job.name=one-node model=gpt3_1_3b train.microbatch=2 parallel.data=8 parallel.zero=1"
NODE += " cluster.gpu=H100 "
TWO = NODE.replace("one-node", "no-ray").replace("data=8", "data=16") + "job.launcher=torchrun "
GPT = "+experiment=gpt175b elastic.spares=8 "
CHECK = "+experiment=cluster_check job.nodes=2 job.workers=1 job.name=check checkpoint.url=/shared/checkpoints/check"
EXAMPLES = {  # file -> arguments of `python -m platform.jobs kubernetes|slurm`
    "kubernetes/one_gpu/job.yaml": f"{ONE}{DATA}one-gpu{POD}",
    "kubernetes/one_node/job.yaml": f"{NODE}{DATA}one-node{POD}",
    "kubernetes/gpt175b/job.yaml": f"{GPT}{DATA}gpt175b{POD} job.storage=50Ti",
    "kubernetes/kind/job.yaml": f"{CHECK}{POD}",
    "kubernetes/torchrun/job.yaml": f"{TWO}{DATA}no-ray{POD}",
    "slurm/one_gpu.sbatch": f"{ONE}{DATA}one-gpu job.shared=true job.time=12:00:00",
    "slurm/one_node.sbatch": f"{NODE}{DATA}one-node job.time=24:00:00",
    "slurm/gpt175b.sbatch": f"{GPT}{DATA}gpt175b job.time=48:00:00",
}


CLAIM = "kubernetes/gpt175b/claim-shared.yaml"


def written_claim() -> str:
    """Return the claim that the command of GPT-3's manifest writes beside it."""
    _, text, _ = render_kubernetes_claim(shlex.split(EXAMPLES["kubernetes/gpt175b/job.yaml"]))
    return text


@cache
def written(name: str) -> str:
    """Return what the command of an example writes."""
    return WRITE[name.partition("/")[0]](shlex.split(EXAMPLES[name]))


if __name__ == "__main__":
    for name in EXAMPLES:
        (JOBS / name).write_text(written(name))
        print(f"jobs/{name}")
    (JOBS / CLAIM).write_text(written_claim())
    print(f"jobs/{CLAIM}")
