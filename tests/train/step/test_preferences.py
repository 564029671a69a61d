"""Preferences: a run on pairs of answers beside trl's DPOTrainer, and its losses beside trl's formulas."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from platform.boundary.refusals import ConfigError
from platform.cluster.asked_model import AskedModel
from platform.cluster.control import references
from platform.cluster.control.references import PairReferences
from platform.config.extensions import PairSettings
from platform.data.corpus import open_run_corpus
from platform.data.streams import known_document_starts
from platform.data.tokenizer import train_tokenizer
from platform.evaluate import main as evaluate
from platform.launch import compose_config
from platform.model.losses import _orpo, _simpo
from platform.runtime.chunked_loss import AnswerSums
from tests.data.tokenizers.texts import sources
from tests.harness.commands import in_this_process
from tests.weights.peer import in_double, transformers
from tests.weights.written import written

TEXTS = {"prompt": "a", "chosen": " b", "rejected": " c"}  # of trl's trainer, which then gets ours
VOCAB, BETA, STEPS, LR = 320, 0.3, 3, 2e-3
RUN = (
    *("+experiment=gpt_quick", "cluster=inline", "tensor=serial", "parallel.data=1", "eval.every=0", "run.dir=run"),
    *("monitor.sample=0", "data=preferences", "data.validation=0", "precision=fp64", "train.microbatch=1"),
    *(f"train.steps={STEPS}", "optimizer.kind=sgd", f"optimizer.lr={LR}", "optimizer.warmup_steps=0"),
    *(
        "optimizer.momentum=0",
        "optimizer.weight_decay=0",
        "optimizer.clip=0",
        "optimizer.schedule=constant",
        "checkpoint.last=false",
    ),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama with a tokenizer, and beside it records of pairs."""
    folder = written(tmp_path / "hf", "llama", ours={"vocab": VOCAB, "length": 128})
    tokenizer = Tokenizer.from_str(train_tokenizer(sources(0, 2), VOCAB - 2).to_str())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    records = [
        {"prompt": f"def f{i}(x):", "chosen": f" return x + {i}", "rejected": " pass" + " # no" * (i % 3)}
        for i in range(7)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def arguments(tmp_path: Path, folder: Path, loss: str) -> list[str]:
    data = [f"data.path={tmp_path / 'pairs.jsonl'}", f"data.cache={tmp_path / 'cache'}"]
    settings = ["train.loss=" + loss, f"train.loss_settings.beta={BETA}"]
    words = [*RUN, "model=from_hf", f"model.source={folder}", *data, *settings]
    rows = open_run_corpus(compose_config(words)).sample_counts["train"]
    assert 1 < rows < 7  # of several pairs
    return [*words, f"train.global_batch={rows}"]


def pairs_as_trl_reads_them(words: list[str]) -> list[dict[str, list[int]]]:
    """The token ids of each pair of our corpus: prompt, chosen and rejected."""
    stream = open_run_corpus(compose_config(words)).parts[0].streams["train"].tokens
    bounds = [*known_document_starts(stream).tolist(), len(stream)]
    documents = [(stream[np.arange(a, b)].tolist(), stream.learned[a:b]) for a, b in pairwise(bounds)]
    rows = []
    for (chosen, learned), (rejected, _) in zip(documents[::2], documents[1::2], strict=True):
        prompt = int(np.flatnonzero(learned)[0])
        assert chosen[:prompt] == rejected[:prompt]
        rows.append({"prompt_ids": chosen[:prompt], "chosen_ids": chosen[prompt:], "rejected_ids": rejected[prompt:]})
    return rows


@pytest.mark.parametrize(("ours", "theirs"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_a_run_is_what_trl_trains(tmp_path, model, ours, theirs):
    reason = "trl comes by the extra of that name"
    trl, datasets = (pytest.importorskip(name, reason=reason) for name in ("trl", "datasets"))
    words = arguments(tmp_path, model, ours)
    rows = pairs_as_trl_reads_them(words)
    library = transformers()
    with in_double():
        network = library.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        config = trl.DPOConfig(
            str(tmp_path / "trl"), beta=BETA, loss_type=[theirs], per_device_train_batch_size=len(rows), use_cpu=True,
            max_steps=1, report_to="none", gradient_checkpointing=False, bf16=False, max_length=None,
        )  # fmt: skip
        tokenizer = library.AutoTokenizer.from_pretrained(model)
        tokenizer.pad_token = tokenizer.eos_token
        peer = trl.DPOTrainer(network, None, config, train_dataset=datasets.Dataset.from_list([TEXTS]),
                              processing_class=tokenizer)  # fmt: skip
        batch = peer.data_collator(rows)
        expected = []
        for _ in range(STEPS):
            loss = peer.compute_loss(peer.model, batch)
            peer.model.zero_grad()
            loss.backward()
            gradients = [w.grad for w in peer.model.parameters() if w.grad is not None]
            expected.append((loss.item(), torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item()))
            with torch.no_grad():
                for w in peer.model.parameters():
                    if w.grad is not None:
                        w -= LR * w.grad
    done = in_this_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows_of_run = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [(row["loss"], row["grad_norm"]) for row in rows_of_run]
    assert np.allclose(curve, expected, rtol=1e-6, atol=1e-9), (curve, expected)
    if ours == "dpo":
        assert abs(curve[0][0] - np.log(2)) < 1e-9 and curve[-1][0] < curve[0][0]


def answers(log: torch.Tensor, labels: torch.Tensor) -> AnswerSums:
    return AnswerSums(log * labels, torch.zeros_like(log), labels)


def test_losses_without_a_reference_are_trl_s():
    """Of mean log-probabilities of answers: trl's own methods on the same numbers."""
    cpo = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    orpo = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    draw = np.random.default_rng(0)
    logs = [torch.tensor(-draw.uniform(0.01, 4, 50)) for _ in range(2)]
    labels = [torch.tensor(draw.integers(1, 30, 50)).double() for _ in range(2)]
    both = [answers(*pair) for pair in zip(logs, labels, strict=True)]
    settings = PairSettings(beta=2.0, margin=0.7)
    place = SimpleNamespace(device="cpu")
    own: Any = SimpleNamespace(alpha=0.0, accelerator=place, loss_type="simpo", simpo_gamma=0.7, beta=2.0,
                               label_smoothing=0.0)  # fmt: skip
    assert torch.allclose(_simpo(*both, settings), cpo.cpo_loss(own, *logs)[0], rtol=1e-12)
    theirs = -logs[0] - orpo.odds_ratio_loss(own, *logs)[0]
    assert torch.allclose(_orpo(*both, settings), theirs.double(), rtol=1e-5)


def test_the_prompt_term_of_trl_s_orpo_is_what_the_page_says():
    """trl's loss less ours is a mean over all tokens of the batch's chosen texts, prompts too, less one over answers'
    labels and pairs; of answers without a prompt, one pair at a time, both are equal."""
    orpo = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    draw = np.random.default_rng(1)

    def compare(prompts: list[int], sizes: list[int]) -> tuple[float, float, float]:
        """trl's loss, ours, and the page's difference, of pairs with so many tokens of prompt and of answers."""
        width = max(prompts) + max(sizes)
        places, rows = np.arange(width), np.repeat(np.array([prompts, sizes]).T, 2, 0)
        rows = np.concatenate([rows[::2], rows[1::2]])  # chosen ones, then rejected ones
        ids, ends = torch.tensor(draw.integers(0, 9, (len(rows), width))), rows.sum(1, keepdims=True)
        logits, seen = torch.tensor(draw.normal(size=(*ids.shape, 9))), torch.tensor(places < ends)
        labels = ids.where(torch.tensor((places >= rows[:, :1]) & (places < ends)), -100)
        names = ("input_ids", "labels", "attention_mask")
        batch = {f"concatenated_{n}": x for n, x in zip(names, (ids, labels, seen.long()), strict=True)}
        own: Any = SimpleNamespace(
            concatenated_inputs=lambda *_, **__: batch, padding_value=0, accelerator=SimpleNamespace(device="cpu"),
            is_encoder_decoder=False, aux_loss_enabled=False, get_batch_logps=orpo.get_batch_logps, beta=2.0,
        )  # fmt: skip
        model = lambda *_, **__: SimpleNamespace(logits=logits)  # noqa: E731
        logs, rejected, _, _, mean = orpo.concatenated_forward(own, model, {"chosen_labels": ids[: len(prompts)]})
        theirs = mean - orpo.odds_ratio_loss(own, logs, rejected)[0].mean()
        of_token = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        counts = labels[:, 1:] >= 0
        sums = (of_token * counts).sum(1), torch.zeros(len(ids)), counts.sum(1).double()
        sides = (AnswerSums(*(x[part] for x in sums)) for part in (slice(0, len(prompts)), slice(len(prompts), None)))
        ours = _orpo(*sides, PairSettings(beta=2.0)).mean()
        chosen, every = of_token[: len(prompts)], seen[: len(prompts), 1:]
        page = (chosen * counts[: len(prompts)]).sum(1) / counts[: len(prompts)].sum(1)
        return theirs.item(), ours.item(), (page.mean() - chosen[every].mean()).item()

    for prompts, sizes in (([1], [9]), ([5], [7]), ([3, 8, 1], [6, 2, 9])):
        theirs, ours, page = compare(prompts, sizes)
        assert np.isclose(theirs - ours, page, rtol=0, atol=1e-6), (prompts, sizes)
        assert (abs(page) < 1e-12) == (prompts == [1])


SMALL = (
    *("+experiment=gpt_quick", "tensor=serial", "data=preferences", "data.validation=0.2", "model.layers=1"),
    *("model.d_model=32", "model.length=64", "model.vocab=300", "train.global_batch=8", "train.microbatch=2"),
    *("train.steps=4", "eval.every=2", "monitor.sample=0", "run.dir=run", "precision=fp64", "checkpoint.every=2"),
    f"data.path={Path(__file__).parents[3] / 'examples' / 'pairs.jsonl'}",
)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def launched(folder: Path, *words: str, status: int = 0) -> str:
    folder.mkdir(exist_ok=True)
    done = in_this_process(*SMALL, *words, cwd=folder)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_goes_on_with_the_references_that_it_began_with(tmp_path, monkeypatch, capsys):
    inline = ["cluster=inline", "parallel.data=1", f"data.cache={tmp_path / 'cache'}"]
    printed = launched(tmp_path / "whole", *inline)
    assert "preference/accuracy" in printed and "preference/margin" in printed
    parted = tmp_path / "parted"
    launched(parted, *inline, "train.stop_at=2")
    file = parted / "run" / "references.bin"
    kept = file.read_bytes()
    for damaged in (kept[:-8], kept[:-1] + b"x", b"{}\n" + kept, kept.replace(b"train", b"trail")):
        file.write_bytes(damaged)
        assert "references.bin cannot be used" in launched(parted, *inline, status=2)
    file.unlink()
    assert "has no references.bin" in launched(parted, *inline, status=2)
    file.write_bytes(kept)
    launched(parted, *inline)
    monkeypatch.chdir(parted)
    assert evaluate(["run"]) == 2
    assert "data.kind=preferences: has pairs of answers" in capsys.readouterr().err
    assert losses(parted) == losses(tmp_path / "whole") and abs(losses(parted)[0] - np.log(2)) < 1e-9


def test_references_are_of_the_weights_that_the_run_takes(tmp_path):
    """Before the first step nothing that an earlier start has left counts: its weights may have been others."""
    inline = ["cluster=inline", "parallel.data=1", f"data.cache={tmp_path / 'cache'}", "train.stop_at=1"]
    launched(tmp_path, *inline)
    kept = (tmp_path / "run" / "references.bin").read_bytes()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "references.bin").write_bytes(kept)
    launched(tmp_path, *inline, "seed=1")  # other weights of the same data
    assert abs(losses(tmp_path)[0] - np.log(2)) < 1e-9


@pytest.fixture
def scored(monkeypatch) -> list[int]:
    """The number of answers that each asking scores."""
    counts, score = [], PairReferences._score_missing

    def count(self, crew, plan, values, weights):
        counts.append(len(self._list_missing(values)))
        score(self, crew, plan, values, weights)

    monkeypatch.setattr(PairReferences, "_score_missing", count)
    return counts


def test_answers_are_scored_that_the_run_reads(tmp_path, scored, monkeypatch):
    """A run that goes on for longer scores the rest by its first weights, not by those that it has; what an interrupted
    asking has scored is kept."""
    words = [
        "cluster=inline",
        "parallel.data=1",
        f"data.cache={tmp_path / 'cache'}",
        "eval.every=0",
        "data.validation=0",
    ]
    words += ["train.global_batch=2"]
    launched(tmp_path / "whole", *words)
    launched(parted := tmp_path / "parted", *words, "train.stop_at=2")
    monkeypatch.setattr(references, "_AT_ONCE", 2)
    wait, calls = AskedModel.score_continuations, []

    def fail_later(self, texts):
        calls.append(texts)
        if len(calls) == 2:
            raise ConfigError("a reference that fails")
        return wait(self, texts)

    monkeypatch.setattr(AskedModel, "score_continuations", fail_later)
    launched(parted, *words, status=2)
    launched(parted, *words)
    whole, first, rest, left = scored
    assert first + rest == whole and left == rest - 2 > 0, scored
    assert np.allclose(losses(parted), losses(tmp_path / "whole"), rtol=1e-9)


@pytest.mark.full
def test_a_killed_worker_changes_no_loss(tmp_path):
    """Two replicas of which one dies: the other goes on alone, by the same references."""
    cache = f"data.cache={tmp_path / 'cache'}"
    launched(tmp_path / "whole", "cluster=inline", "parallel.data=1", cache)
    faults = ["elastic.faults=[2:kill:1]", "elastic.min_workers=1"]
    printed = launched(tmp_path / "killed", "cluster=processes", "parallel.data=2", cache, *faults)
    assert "1 worker" in printed
    assert np.allclose(losses(tmp_path / "killed"), losses(tmp_path / "whole"), rtol=1e-9)
