"""Distillation: a run whose teacher transformers has saved beside plain torch, and what becomes of its file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from platform.cluster.control import teacher
from platform.data import teacher_classes
from platform.data.corpus import open_run_corpus
from platform.data.tokenizer import train_tokenizer
from platform.launch import compose_config
from platform.train.generator import TextGenerator
from platform.train.replies import AskedTexts
from platform.train.worker import Worker as RankWorker
from tests.answers.cached import louder, uncached, whole_weights
from tests.data.tokenizers.texts import sources
from tests.harness.commands import in_this_process
from tests.harness.oracle import make_plan, trainer_of
from tests.harness.suite import suite
from tests.harness.threads import run_threads
from tests.runtime.oracle.test_distillation import build
from tests.runtime.oracle.test_preferences import PLANS
from tests.weights.peer import in_double, transformers
from tests.weights.written import written

VOCAB, STEPS, LR, T, WEIGHT, TOP = 320, 3, 2e-3, 1.7, 0.6, 40
RUN = (
    *("+experiment=gpt_quick", "cluster=inline", "tensor=serial", "parallel.data=1", "eval.every=0", "run.dir=run"),
    *("monitor.sample=0", "data.validation=0", "precision=fp64", "train.microbatch=2", f"train.steps={STEPS}"),
    *("optimizer.kind=sgd", f"optimizer.lr={LR}", "optimizer.warmup_steps=0", "optimizer.momentum=0"),
    *("optimizer.weight_decay=0", "optimizer.clip=0", "optimizer.schedule=constant", "checkpoint.last=false"),
    *("train.loss=distill", f"train.loss_settings={{weight: {WEIGHT}, temperature: {T}, top: {TOP}}}"),
)


def saved(folder: Path, **sizes: int) -> Path:
    """A Llama of transformers of other sizes, with the tokenizer that all have."""
    written(folder, "llama", ours={"vocab": VOCAB, "length": 64, **sizes})
    tokenizer = Tokenizer.from_str(train_tokenizer(sources(0, 2), VOCAB - 2).to_str())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def words_of(tmp_path: Path, student: Path, teacher: Path, *more: str) -> list[str]:
    (tmp_path / "text.txt").write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(40)))
    data = ["data=text", f"data.path={tmp_path / 'text.txt'}", f"data.cache={tmp_path / 'cache'}"]
    return [*RUN, "model=from_hf", f"model.source={student}", f"train.teacher={teacher}", *data, *more]


def metrics(folder: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows]


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A model that learns, and a wider teacher of the same tokenizer."""
    return saved(tmp_path / "student"), saved(tmp_path / "teacher", d_model=48, d_ff=56, layers=3)


def of_torch(logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a run in plain torch, of log-probabilities of a teacher that were kept in fp32."""
    logs, ids = F.log_softmax(teacher / T, -1).topk(TOP, -1)
    logs, own = logs.float().double(), F.log_softmax(logits / T, -1).gather(-1, ids)
    both = [torch.cat((x, (1 - x.exp().sum(-1, keepdim=True)).log()), -1) for x in (logs, own)]
    divergence = F.kl_div(both[1], both[0], reduction="sum", log_target=True)
    return ((1 - WEIGHT) * F.cross_entropy(logits, labels, reduction="sum") + WEIGHT * T**2 * divergence) / len(labels)


@pytest.mark.full
def test_a_run_is_what_torch_trains(tmp_path, models):
    """Loss and gradient norm of three steps; a teacher in its own width and depth, in rows of several documents."""
    words = words_of(tmp_path, *models)
    corpus = open_run_corpus(compose_config(words))
    rows = corpus.sample_counts["train"]
    batch = {name: torch.tensor(x) for name, x in corpus.batch("train", 0, rows).items()}
    with in_double():
        student, learned_from = (
            transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in models
        )
        with torch.no_grad():
            said = learned_from(batch["tokens"]).logits
        expected = []
        for _ in range(STEPS):
            loss = of_torch(
                student(batch["tokens"]).logits.flatten(0, 1), said.flatten(0, 1), batch["labels"].flatten()
            )
            student.zero_grad()
            loss.backward()
            gradients = [w.grad for w in student.parameters() if w.grad is not None]
            expected.append((loss.item(), torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item()))
            with torch.no_grad():
                for w in student.parameters():
                    if w.grad is not None:
                        w -= LR * w.grad
    done = in_this_process(*words, f"train.global_batch={rows}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"teacher  {models[1]}: {TOP} likeliest classes" in done.stdout
    assert np.allclose(metrics(tmp_path), expected, rtol=1e-6), (metrics(tmp_path), expected)


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """The number of samples that each launch asks a teacher about."""
    counts, add = [], teacher_classes.add_samples

    def count(path, header, kept, parts):
        counts.append(0)

        def counted():
            for part in parts:
                counts[-1] += len(part) // header.sample_type.itemsize
                yield part

        add(path, header, kept, counted())

    monkeypatch.setattr(teacher_classes, "add_samples", count)
    return counts


@pytest.mark.full
def test_a_run_goes_on_with_what_its_teacher_said(tmp_path, models, asked):
    """It is asked about what the run reads, once, and a longer run about the rest; again about what is damaged, and all
    of it if the settings are others: the losses stay."""
    words = words_of(tmp_path, *models, "train.global_batch=4", "checkpoint.every=1")
    launch = lambda folder, *more: in_this_process(*words, f"run.dir={tmp_path / folder / 'run'}", *more, cwd=tmp_path)  # noqa: E731
    assert launch("whole").returncode == 0
    samples = open_run_corpus(compose_config(words)).sample_counts["train"]
    assert asked == [4 * STEPS] and asked[0] < samples
    first = launch("parted", "train.stop_at=1")
    file = tmp_path / "parted" / "run" / "teacher.bin"
    assert first.returncode == 0 and "likeliest classes of 4 samples" in first.stdout
    again = launch("parted", "train.stop_at=2")
    assert again.returncode == 0 and "of 4 samples, " in again.stdout and "beside 4 samples that it has" in again.stdout
    kept = file.read_bytes()
    file.write_bytes(kept[:-9] + b"x" + kept[-8:])
    last = launch("parted")
    assert last.returncode == 0 and "of 5 samples, " not in last.stdout and asked[1:] == [4, 4, 4]
    assert np.allclose(metrics(tmp_path / "parted"), metrics(tmp_path / "whole"), rtol=1e-6)
    more = f"train.steps={samples // 4 + 9}"  # of which the last read again what the first have read
    assert launch("long", more).returncode == 0 and asked[4:] == [samples]
    other = launch(
        "parted", "resume.allow=[train.loss_settings]", "train.loss_settings.top=7", f"train.steps={STEPS + 1}"
    )
    assert "it is of another teacher, of other samples or settings; the teacher is asked again" in other.stdout
    assert asked[5:] == [4]


@pytest.mark.full
def test_an_interrupted_asking_goes_on(tmp_path, models, asked, monkeypatch):
    """A teacher that fails after its first answers: the next start asks about the rest. A run that goes on elsewhere
    asks about what is left to read."""
    words = words_of(tmp_path, *models, "train.global_batch=4", "checkpoint.every=1", "train.stop_at=2")
    rank = RankWorker.rank_classes

    def fail_later(self, *arguments):
        if asked == [4]:
            asked.append(0)
            raise ValueError("a teacher that fails")
        return rank(self, *arguments)

    monkeypatch.setattr(teacher, "_ROWS", 4)
    monkeypatch.setattr(RankWorker, "rank_classes", fail_later)
    assert in_this_process(*words, "elastic.attempts=1", cwd=tmp_path).returncode
    done = in_this_process(*words, cwd=tmp_path)
    assert done.returncode == 0 and asked == [4, 0, 4], (asked, done.stdout + done.stderr)
    elsewhere = f"run.dir={tmp_path / 'elsewhere'}", f"checkpoint.resume={tmp_path / 'run'}", "train.stop_at=0"
    moved = in_this_process(*words, *elsewhere, cwd=tmp_path)
    assert moved.returncode == 0 and asked[3:] == [4], moved.stdout + moved.stderr


def test_evaluations_measure_the_divergence(tmp_path, models):
    words = words_of(tmp_path, *models, "train.global_batch=4", "data.validation=0.3", "eval.every=3")
    done = in_this_process(*words, cwd=tmp_path)
    assert done.returncode == 0 and "distill/divergence" in done.stdout, done.stdout + done.stderr


def test_what_no_teacher_can_be(tmp_path, models):
    """Before any process starts, and at once."""
    student, teacher = models
    other = saved(tmp_path / "other", vocab=VOCAB + 4)
    (other / "tokenizer.json").write_bytes((teacher / "tokenizer.json").read_bytes())
    short = [*words_of(tmp_path, student, other), "train.loss_settings.top=999", "train.loss_settings.temperature=0"]
    refused = in_this_process(*short, cwd=tmp_path)
    assert refused.returncode == 2 and not (tmp_path / "run").exists()
    for line in (
        f"train.teacher={other}: has model.vocab={VOCAB + 4}, and the model that learns {VOCAB}",
        f"train.loss_settings.top=999: must be <= model.vocab={VOCAB}; nearest legal: {VOCAB}, 0",
        "train.loss_settings.temperature=0.0: must be > 0",
    ):
        assert line in refused.stderr, refused.stderr
    heads = in_this_process(
        *words_of(tmp_path, student, teacher, "tensor=1d", "tensor.axes.t=2", "train.teacher=nowhere"), cwd=tmp_path
    )
    assert heads.returncode == 2 and "train.teacher=" in heads.stderr and "there is nothing" in heads.stderr
    vocabulary = Tokenizer.from_str(train_tokenizer(sources(2, 4), VOCAB - 2).to_str())
    vocabulary.add_special_tokens(["<s>", "</s>"])
    vocabulary.save(str(teacher / "tokenizer.json"))
    foreign = in_this_process(*words_of(tmp_path, student, teacher), cwd=tmp_path)
    assert foreign.returncode == 2 and "is not that of the teacher in" in foreign.stderr, foreign.stderr


TEXTS = AskedTexts([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7], [1, 8, 2, 8, 1]])
ASKED = {"direction": "forward", "top": 5, "temperature": 1.0, "model": "modern", "recompute": "none"}


@suite("teachers asked under every plan", [{"plan": plan} for plan in PLANS], [{"plan": "context 1d"}, {"plan": "3d"}])
def test_a_teacher_says_what_one_forward_pass_does(case):
    c = build({**ASKED, **case})
    c.train.loss, c.train.loss_settings = "", {}
    plan, weights = make_plan(c), whole_weights(c)

    def ask(communicator):
        trainer = trainer_of(c, plan, communicator)
        louder(trainer)
        return TextGenerator(c, plan, communicator, trainer.weights).rank_classes(TEXTS, 7, 1.5)

    expected = [F.log_softmax(uncached(c, weights, ids, []) / 1.5, -1).topk(7, -1) for ids in TEXTS.ids]
    for actual in run_threads(plan.mesh, ask):
        for row, (logs, ids) in zip(actual, expected, strict=True):
            assert torch.equal(row[: len(ids), :7], ids.double())
            assert torch.allclose(row[: len(ids), 7:], logs, rtol=1e-9)


@pytest.mark.full
def test_a_killed_worker_changes_no_loss(tmp_path, models):
    """Two replicas, on which two others of the teacher were asked; one dies, and the other goes on alone."""
    words = words_of(tmp_path, *models, "train.global_batch=4", "checkpoint.every=1")
    whole = in_this_process(*words, f"run.dir={tmp_path / 'whole' / 'run'}", cwd=tmp_path)
    faults = ["cluster=processes", "parallel.data=2", "elastic.faults=[2:kill:1]", "elastic.min_workers=1"]
    killed = in_this_process(*words, *faults, f"run.dir={tmp_path / 'killed' / 'run'}", cwd=tmp_path)
    assert whole.returncode == 0 and killed.returncode == 0, killed.stdout + killed.stderr
    assert "1 worker" in killed.stdout and killed.stdout.count("likeliest classes") == 1
    assert np.allclose(metrics(tmp_path / "killed"), metrics(tmp_path / "whole"), rtol=1e-9)
