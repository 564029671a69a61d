"""A model that has learned a few sentences, as a run's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from platform.launch import main

SENTENCES = ["the plan is data and data is the plan.", "every worker knows its place in the mesh.",
             "a layout says which rank holds a block.", "nothing is lost when a worker dies."]  # fmt: skip


@pytest.fixture(scope="session")
def learned(tmp_path_factory) -> Path:
    """The directory of a run of 60 steps on its own sentences; `text` lies beside it."""
    folder = tmp_path_factory.mktemp("learned")
    text = folder / "text.jsonl"
    text.write_text("".join(f'{{"text": "{SENTENCES[i * 7 % 4]}"}}\n' for i in range(400)))
    run = folder / "run"
    status = main([
        "+experiment=gpt_quick", "cluster=inline", "tensor=serial", "parallel.data=1", "data=text", f"data.path={text}",
        f"data.cache={folder}/cache", "model.vocab=300", "model.layers=2", "model.d_model=48", "model.heads=4",
        "model.length=48", "data.document_mask=true", "train.steps=60", "train.global_batch=8", "eval.every=0",
        "train.microbatch=8", "optimizer.lr=1e-2", "optimizer.warmup_steps=5", "monitor.sample=0",
        "elastic.snapshot_every=0", f"run.dir={run}", "checkpoint.every=60",
    ])  # fmt: skip
    assert status == 0
    return run
