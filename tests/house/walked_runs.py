"""Small runs that walks are traced in: `python -m tests.house.walked_runs FOLDER RUN BEGINNING`.

Each run is traced twice as it is (`same`, `again`), and with another beginning, in which one thing differs. Its notes
are in FOLDER/notes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from platform.data.tokenizer import train_tokenizer
from platform.generate import main as generate
from platform.launch import main as launch
from tests.data.tokenizers.texts import sources
from tests.house import trace
from tests.weights.written import written

TEXT = "the quick brown fox jumps over the lazy dog\n" * 100
SCHEME = """scheme: walked
order: [t]
regions:
  attention: {heads: [t]}
  mlp: {d_ff: [t]}
  logits: {vocab: [t]}
parameters:
  all: {heads: [t], d_ff: [t], vocab: [t]}
"""
WHOLE_TABLE = SCHEME.replace(", vocab: [t]", "").replace("{vocab: [t]}", "{}")
COMMON = [
    "+experiment=gpt_quick", "extend=[tests.house.trace]", "model=from_hf", "cluster=processes", "cluster.device=cpu",
    "tensor=walked", "data=text", "train.global_batch=2", "train.microbatch=2",
    "eval.every=0", "monitor.sample=0", "elastic.spares=0",
]  # fmt: skip


def write_model(folder: Path, beginning: str) -> Path:
    """Write a small Llama with its tokenizer, as transformers does."""
    written(folder, "llama", ours={"vocab": 320})
    tokenizer = Tokenizer.from_str(train_tokenizer(sources(0, 2), 318).to_str())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    if beginning == "weights":
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.embed_tokens.weight"][5, 3] += 1
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def run_walk(folder: Path, run: str, beginning: str) -> None:
    """Trace a run in `folder`."""
    model, notes, text = write_model(folder / "hf", beginning), folder / "notes", folder / "text.txt"
    notes.mkdir()
    schemes = folder / "conf" / "tensor"
    schemes.mkdir(parents=True)
    (schemes / "walked.yaml").write_text(WHOLE_TABLE if beginning == "tables" else SCHEME)
    text.write_text(TEXT.replace("dog", "dot") if beginning == "sample" else TEXT)
    os.environ[trace.FOLDER] = str(notes)
    rate = "2e-3" if beginning == "key" else "1e-3"
    common = [
        "--config-dir", str(folder / "conf"), *COMMON, f"model.source={model}", f"data.path={text}",
        f"data.cache={folder}/cache", f"run.dir={folder}/run", f"optimizer.lr={rate}",
    ]  # fmt: skip
    two, one = ["tensor.axes.t=2", "parallel.data=1"], ["tensor.axes.t=1", "parallel.data=1"]
    with trace.Tracer(notes):
        if run == "train":
            assert launch([*common, *two, "train.steps=2", "train.stop_at=1", "checkpoint.every=1"]) == 0
            if beginning in ("same", "again", "weights"):
                assert launch([*common, *one, "train.steps=2"]) == 0
        elif run == "failure":
            faults = [f"elastic.faults=[2:kill:{0 if beginning == 'failure' else 1}]", "elastic.min_workers=1"]
            assert launch([*common, *two, "train.steps=2", *faults]) == 0
        else:
            prompt = "the dot" if beginning == "prompt" else "the dog"
            assert generate([str(model), prompt, "--tokens", "1"]) == 0


if __name__ == "__main__":
    where = Path(sys.argv[1])
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    run_walk(where, sys.argv[2], sys.argv[3])
