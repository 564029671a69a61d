"""A fuzzer of command lines: values of all kinds for every key, two or three keys together, and odd whole lines.

Every attempt ends as a plan, or as ConfigError with one printable line per mistake that names what was given, soon, and
with nothing written.
"""

from __future__ import annotations

import io
import os
import random
import re
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from unittest import mock

from platform import launch
from platform.boundary.refusals import ConfigError
from platform.cluster.shown_commands import PhaseTimes
from platform.config import fields
from platform.config.composition import open_composer
from platform.config.fields import Config, flatten_config
from platform.config.key import Key

SECONDS = 3.0  # of this thread's CPU, beside those of a plan
SECONDS_PER_LAYER = 0.03  # of a plan that is made
SECONDS_PER_MICROBATCH = 1e-4
EXPERIMENTS = ("gpt_quick",) * 6 + ("two_layer", "elastic_demo", "one_gpu", "transformer_base")
DEPENDENT = {"elastic_demo": ["elastic.faults"]}  # what an experiment sets that another layout may make illegal
SCHEMES = ("serial", "1d", "1d_sp", "2d", "2d_gather", "2p5d", "3d", "3d_literal", "layout", "mesh_tf_2d")
GROUPS = {
    "tensor": SCHEMES,
    "branch": ("none", "dsp", "dsp_slice", "dsp_csub"),
    "pipeline": ("none", "gpipe", "1f1b", "interleaved", "zb_h1", "file"),
    "data": ("stdlib", "text", "pairs", "synthetic"),
    "cluster": ("local", "ray", "processes", "inline"),
    "monitor": ("console", "wandb"),
    "model": ("gpt_tiny", "t5_tiny", "two_layer"),
}
AXES = ("tensor.axes.t", "tensor.axes.x", "tensor.axes.a", "branch.axes.g", "branch.axes.data", "tensor.axes.stage")
KEYS = {**flatten_config(Config()), **dict.fromkeys(AXES, 1)}
WORDS = ("a", "x/y", "fp32", "none", "auto", "2", "1:30", "5:kill:1", "batch:t", "os.path", "runs/mine", "text")
ODD = ("seed", "=3", "", "~seed", "~model", "+seed=1", "++seed=2", "seed@x=1", "seed==3", "a b=1", "model@y=gpt_tiny",
       "hydra.run.dir=x", "--seed", "-x", "--cfg=nosuch", "seed=1,2", "-m", "--multirun", "seed=range(3)", "\udcff=1",
       "seed=choice(1,2)", "seed=glob(*)", "experiment=[]", "+experiment={a:1}", "--config-dir=/nowhere", "optimizer=x",
       "🐍=1", "x" * 5000, "seed=" + "[" * 200, "--package=x", "tensor.axes.=2", "model..layers=2", ".=1")  # fmt: skip


def _huge(r: random.Random) -> str:
    return r.choice(["1e308", "9" * r.randrange(7, 40), str(10 ** r.randrange(3, 25)), str(2 ** r.randrange(31, 70))])


def _control(r: random.Random) -> str:
    place = r.choice("\x00\n\r\t\x1b\x07\x7f\x85\u2028\ud800\udcff")
    return r.choice(["a", "", "1", "runs/"]) + place + r.choice(["b", "2"])


def _nested(r: random.Random, depth: int = 0) -> str:
    if depth > r.randrange(1, 5):
        return r.choice(["1", "a", "null", "-1", "t", "0.5"])
    parts = [_nested(r, depth + 1) for _ in range(r.randrange(3))]
    if r.random() < 0.5:
        return "[" + ",".join(parts) + "]"
    names = ["t", "a", "mlp", "d_ff", "kind", "1"]
    return "{" + ",".join(f"{r.choice(names)}: {part}" for part in parts) + "}"


EASY = ("data.field", "data.target_field", "run.dir", "monitor.project", "data.cache", "checkpoint.url")
WELL_FORMED = ("extend=[]", "elastic.faults=[5:kill:1,7:stop:0]", "optimizer.betas=[0.5,0.9]", "tensor.axes={t: 2}",
               "resume.allow=[]", "branch.only=[]", "model={layers: 1}", "train={steps: 20, spike: 3}")  # fmt: skip
CHOICES = [key.choices for key in fields.KEYS.values() if key.choices]
KINDS: dict[str, Callable[[random.Random], str]] = {
    "huge": _huge,
    "tiny": lambda r: r.choice(["1e-300", "5e-324", "1e-9", "0.0001", "0", "0.0"]),
    "negative": lambda r: r.choice(["-1", "-0", "-0.5", "-1e-30", f"-{_huge(r)}", str(-r.randrange(1, 100))]),
    "not finite": lambda r: r.choice(["nan", "NaN", "inf", "-inf", "Infinity", ".nan", "1e400"]),
    "wrong type": lambda r: r.choice(["many", "true", "false", "null", "None", "1.5", "2.0", "'3'", "0x10", "???"]),
    "unicode": lambda r: r.choice(["é", "数据", "٣", "²", "🐍", "a\u0301", "ａ", "\u200b", "\u202e1", "１２", "ß/ø"]),
    "control": _control,
    "nested": _nested,
    "empty": lambda r: r.choice(["", "''", '""', "[]", "{}", " ", "' '", "[[]]", "[{}]", "[,]"]),
    "interpolation": lambda r: r.choice(
        ["${seed}", "${train.steps}", "${nope}", "${oc.env:NOSUCH}", "${oc.env:HOME}", "${", "${}", "$", "${oc.nope:1}",
         "${model}", "a${seed}b", "${oc.env:NOSUCH,7}", "${oc.decode:'[1'}", "${${seed}}"]
    ),
    "quotes": lambda r: r.choice(["'", '"', "'a", 'a"', "\\", "'a'b'", '"\\"', "a;b|c", "`id`", "$(id)", "%s{}"]),
    "small": lambda r: str(r.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 27, 64, 0, 0.5, 0.1])),
    "word": lambda r: r.choice([*WORDS, *(str(v) for v in r.choice(CHOICES))]),
    "bound": lambda r: "",  # drawn for its key, in `_value`
}  # fmt: skip
COMMAND = "command line"
NEVER = {("control", "accepted")}
CLASSES = tuple(
    f"{kind}: {end}" for kind in (*KINDS, COMMAND) for end in ("accepted", "refused") if (kind, end) not in NEVER
)


def _value(r: random.Random, kind: str, key: str) -> str:
    if kind != "bound":
        return KINDS[kind](r)
    key = re.sub(r"(axes)\..*", r"\1", key)
    legal = fields.KEYS.get(key, Key(""))
    most = legal.most
    least = [int(float(b.split()[1])) for b in (legal.bounds or ">= 0").split(" and ") if b[0] == ">"]
    return str(r.choice([*least, *(n - 1 for n in least), most, most + 1]))


@contextmanager
def opened() -> Iterator[Callable[[int], str]]:
    """Yield `attempt`, which runs in a private working and home directory."""
    from platform.cluster import driver  # what a whole command would call

    with tempfile.TemporaryDirectory() as private, open_composer(None) as composer:
        before, clean = os.getcwd(), {"HOME": private, "XDG_CACHE_HOME": f"{private}/cache"}
        torn = [name for name in os.environ if name.startswith(("RAY_", "WANDB_", "SLURM_", "TORCHELASTIC_"))]
        os.chdir(private)
        try:
            with (
                mock.patch.dict(os.environ, clean),
                mock.patch.object(driver, "drive_run", lambda config, plan, **_: 0),
                mock.patch.object(launch, "open_composer", _again(composer)),
            ):
                for name in torn:
                    os.environ.pop(name)
                yield lambda seed: _attempt(seed, private)
        finally:
            os.chdir(before)


def _again(composer):
    """`open_composer` with Hydra open already, which is most of what a command takes."""

    @contextmanager
    def again(config_dir):
        if config_dir is not None:  # of the fuzzer's there is none
            with open_composer(config_dir):
                raise AssertionError(config_dir)
        yield composer

    return again


def _attempt(seed: int, private: str) -> str:
    r = random.Random(seed)
    began = time.thread_time()
    if r.random() < 0.06:
        arguments = ["+experiment=gpt_quick"] if r.random() < 0.9 else []
        extra = r.sample(ODD, r.choice([1, 1, 2])) if r.random() < 0.7 else []
        arguments += [*extra, *(_argument(r, r.choice(list(KINDS)))[1] for _ in range(r.randrange(2)))]
        kind, accepted, deep = COMMAND, _command(arguments), 0
    else:
        kind = r.choice(list(KINDS))
        if r.random() < 0.3:
            return _easy(r, kind, began, private)
        drawn = [_argument(r, kind), *(_argument(r, r.choice(list(KINDS))) for _ in range(r.choice([0, 0, 1, 2])))]
        chosen = [f"{group}={r.choice(options)}" for group, options in GROUPS.items() if r.random() < 0.08]
        experiment = r.choice(EXPERIMENTS)
        arguments = [f"+experiment={experiment}", *chosen, *(argument for _, argument in drawn)]
        accepted, deep = _planned(arguments, [*chosen, *(key for key, _ in drawn), *DEPENDENT.get(experiment, ())])
    return _judged(kind, accepted, deep, began, private, arguments)


def _easy(r: random.Random, kind: str, began: float, private: str) -> str:
    """Attempt one value for a key that takes nearly anything."""
    key = r.choice(EASY)
    argument = r.choice(WELL_FORMED) if kind == "nested" else f"{key}={_value(r, kind, key)}"
    arguments = ["+experiment=gpt_quick", argument]
    accepted, deep = _planned(arguments, [argument.split("=")[0]])
    return _judged(kind, accepted, deep, began, private, arguments)


def _judged(kind: str, accepted: bool, allowed: float, began: float, private: str, arguments: list[str]) -> str:
    seconds = time.thread_time() - began
    assert seconds < SECONDS + allowed, f"{seconds:.1f} s of CPU for {arguments!a}"
    assert os.listdir(private) == [], f"{os.listdir(private)} left by {arguments!a}"
    return f"{kind}: {'accepted' if accepted else 'refused'}"


def _argument(r: random.Random, kind: str) -> tuple[str, str]:
    """A key, and the argument that gives it a value."""
    key = r.choice(list(KEYS))
    return key, f"{key}={_value(r, kind, key)}"


def _planned(arguments: list[str], keys: list[str]) -> tuple[bool, float]:
    """Whether the arguments make a plan, and the seconds that so large a one may take."""
    try:
        jobs = launch._plan_jobs(Namespace(config_dir=None, overrides=arguments, multirun=False), PhaseTimes())
    except ConfigError as error:
        assert error.violations, f"refused without a word: {arguments!a}"
        for line in error.violations:
            assert line.isprintable() and re.match(r"\S.*: \S", line), f"{line!a} for {arguments!a}"
        parts = {part for key in keys for part in (key.split("=")[0], key.split(".")[0], key.split(".")[-1])}
        assert any(part in line for part in parts for line in error.violations), f"{error.violations} for {arguments!a}"
        return False, 0.0
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} for {arguments!a}") from error
    [job] = jobs
    return True, SECONDS_PER_LAYER * job.config.model.layers + SECONDS_PER_MICROBATCH * job.plan.microbatches


def _command(arguments: list[str]) -> bool:
    """Whether a whole command ends with status 0; else it ends with 2, and lines that say so."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = launch.main(arguments)
    except (Exception, SystemExit) as error:
        raise AssertionError(f"{type(error).__name__}: {error} for {arguments!a}") from error
    lines = err.getvalue().splitlines()
    assert status in (0, 2), f"status {status} for {arguments!a}: {lines[-1:]}"
    assert status == 0 or (lines and all(line.startswith("config: ") for line in lines)), f"{lines} for {arguments!a}"
    return status == 0
