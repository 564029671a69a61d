"""A model that transformers can load: fine-tune it on a mixture, evaluate it, ask it, and give it back.

    python examples/fine_tune.py

No hub is needed: the "published" model is a small GPT-2 that is trained here first, on stories, and exported. It is
then tuned on a mixture of stories and questions, by four workers; measured source by source; asked something, first in
one process, then split over two; and exported again, tokenizer and all. The same with a model of your own: give its
folder as model.source.
"""

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

ANIMALS = {"cat": "sleeps", "dog": "runs", "owl": "sings", "fox": "hunts", "cow": "eats", "hen": "waits"}
LINKS = ("Then", "After that", "And", "Much later", "Meanwhile")
PLACE = Path("runs", "fine_tune")


def platform(command: str, *arguments: str) -> None:
    """Run a command of the platform, and show it."""
    print(f"\n$ python -m platform.{command} {shlex.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", f"platform.{command}", *arguments], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stderr)


def write_texts() -> None:
    """Write stories, a text, and questions, records with one field."""
    draw = random.Random(0)
    pick = lambda: draw.choice(list(ANIMALS))  # noqa: E731
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / "stories.txt").open("w") as stories, (PLACE / "questions.jsonl").open("w") as questions:
        for _ in range(1000):
            first, then = pick(), pick()
            stories.write(f"The {first} {ANIMALS[first]}. {draw.choice(LINKS)} the {then} {ANIMALS[then]}.\n")
        for _ in range(500):
            animal = pick()
            text = f"What does the {animal} do? It {ANIMALS[animal]}."
            questions.write(json.dumps({"text": text}) + "\n")


def main() -> None:
    write_texts()
    common = [f"data.cache={PLACE}/cache", "monitor.sample=0", "optimizer.warmup_steps=5", "train.steps=100",
              "checkpoint.every=100"]  # fmt: skip
    small = "model.layers=2 model.d_model=64 model.heads=4 model.length=32 model.vocab=320 eval.every=0".split()
    alone = "cluster=inline tensor=serial parallel.data=1".split()
    stories = ["data=text", f"data.path={PLACE}/stories.txt"]
    platform("launch", "+experiment=gpt_quick", *small, *alone, *stories, *common, f"run.dir={PLACE}/base")
    platform("weights", "export", f"{PLACE}/base/checkpoints", f"{PLACE}/published")

    mixture = ["data=mixture", f"data.sources.stories.path={PLACE}/stories.txt", "data.sources.stories.weight=1",
               f"data.sources.questions.path={PLACE}/questions.jsonl", "data.sources.questions.weight=3"]  # fmt: skip
    source = ["model=from_hf", f"model.source={PLACE}/published", "eval.every=50", "cluster=processes"]
    platform("launch", "+experiment=gpt_quick", *source, *mixture, *common, f"run.dir={PLACE}/tuned")
    platform("evaluate", f"{PLACE}/tuned")
    platform("generate", f"{PLACE}/tuned", "What does the fox do?", "--tokens", "12")
    split = "cluster=processes tensor=1d tensor.axes.t=2".split()
    platform("generate", f"{PLACE}/tuned", "What does the hen do?", "--tokens", "12", *split)
    platform("weights", "export", f"{PLACE}/tuned/checkpoints", f"{PLACE}/given_back")
    print(f"\n{PLACE}/given_back is what transformers loads")


if __name__ == "__main__":
    main()
