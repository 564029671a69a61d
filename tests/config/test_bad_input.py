"""Bad input of all kinds: status 2, a line per mistake that names key, value and the nearest legal, soon, nothing left.

Most rows are one line of a table: what is typed after +experiment=gpt_quick | how a line begins | what it ends with.
"""

import os
import time
from argparse import Namespace
from unittest import mock

import pytest

from platform import launch
from platform.boundary.refusals import ConfigError
from platform.boundary.terminal import escape_unprintable
from platform.cluster.shown_commands import PhaseTimes
from platform.config import run_rules
from platform.config.composition import open_composer
from platform.config.fields import KEYS, LONGEST, Config, Train, flatten_config
from tests.config.bad_input_table import NUMBERS, REALS, TABLE
from tests.fuzz.values import _again

TABLES = ("tensor.scheme", "branch.kind")  # the name of one stands for the group
ROWS = [tuple(part.strip() for part in line.split(" | ")) for line in TABLE.strip().splitlines()]


def _rows():
    """Every row as (arguments, beginning, further on)."""
    for line in NUMBERS.strip().splitlines():
        key, least, most = line.split()
        below = str(int(least) - 1)
        extra = ["branch=dsp"] if key.startswith("branch") else ["pipeline=interleaved"] if "pipeline" in key else []
        yield [*extra, f"{key}={below}"], f"{key}={below}: must be >= ", least
        yield [*extra, f"{key}={int(most) + 1}"], f"{key}={int(most) + 1}: must be <= {most}", f"nearest legal: {most}"
    for line in REALS.strip().splitlines():
        key, below, least, above, most = line.split()
        yield [f"{key}={below}"], f"{key}={below}: must be ", "" if least == "-" else f"nearest legal: {least}"
        yield [f"{key}={above}"], f"{key}={above}: must be ", "" if most == "-" else f"nearest legal: {most}"
        yield [f"{key}=nan"], f"{key}=nan: must be ", ""
        yield [f"{key}=inf"], f"{key}=inf: must be ", ""
        yield [f"{key}=fast"], f"{key}=fast: must be a number", "nearest legal: "
    for key, value in flatten_config(Config()).items():
        if type(value) is int and key not in ("checkpoint.every", "elastic.snapshot_every"):  # texts too
            yield [f"{key}=many"], f"{key}=many: must be an integer", f"nearest legal: {value}"
        if type(value) is str and key not in TABLES:
            odd = "a\x1bb"  # as an escape sequence of a terminal begins
            shown = "U+001B" if key not in TABLES and not KEYS[key].choices else "unknown"
            yield [f"{key}='{odd}'"], f"{key}=", shown
    for beginning in ROWS:
        typed, start, *rest = beginning
        yield _split(typed), start, rest[0] if rest else ""


def _split(typed):
    """Arguments apart by spaces before KEY=."""
    words: list[str] = []
    for word in typed.split(" "):
        if words and "=" not in word:
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


ALL = list(_rows())


@pytest.fixture(scope="module")
def refusal(tmp_path_factory):
    """`refusal(*arguments)`: the lines of a command that must be refused; Hydra is opened once for all of them."""
    private = tmp_path_factory.mktemp("bad_input")
    before = os.getcwd()
    os.chdir(private)

    def lines(*arguments):
        began = time.thread_time()
        with pytest.raises(ConfigError) as error:
            options = Namespace(config_dir=None, overrides=["+experiment=gpt_quick", *arguments], multirun=False)
            launch._plan_jobs(options, PhaseTimes())
        assert time.thread_time() - began < 3.0
        assert os.listdir(private) == []
        assert all(line.isprintable() for line in error.value.violations)
        return error.value.violations

    try:
        with open_composer(None) as composer, mock.patch.object(launch, "open_composer", _again(composer)):
            yield lines
    finally:
        os.chdir(before)


def test_there_are_more_than_three_hundred():
    assert len(ALL) > 300


MADE = len(ALL) - len(ROWS)  # of every bound of every key


@pytest.mark.parametrize("row", ALL, ids=[" ".join(row[0])[:60] for row in ALL])
def test_a_row(refusal, row):
    arguments, start, further = row
    lines = refusal(*arguments)
    assert any(line.startswith(start) and further in line for line in lines), lines


def test_every_number_has_both_ends():
    """A new key declares a lower end; its upper end is that of all numbers unless it declares one."""
    numbers = {key for key, value in flatten_config(Config()).items() if type(value) in (int, float)}
    endless = {key for key in numbers if not KEYS[key].bounds and not KEYS[key].choices}
    assert endless == {"parallel.data", "checkpoint.every"}  # -1 is legal there, 0 is not
    assert {line.split()[0] for line in (NUMBERS + REALS).splitlines() if line} - numbers <= {
        "tensor.axes.t",
        "branch.axes.g",
    }


def test_a_long_text_is_shown_in_part(refusal):
    [line] = refusal(f"monitor.project={'a' * (LONGEST + 1)}")
    assert line.startswith("monitor.project=aaa") and len(line) < 1000 and "characters" in line


def test_too_deep_and_too_long_arguments(refusal):
    for value in ("[" * 3000 + "]" * 3000, "{a:" * 100 + "1" + "}" * 100, "9" * 6000, "x" * 10**6):
        [line] = refusal(f"seed={value}")
        assert line.startswith(f"seed={value[:100]}") and len(line) < 1000


WORDS = ("x", "\\", "'", "\\'", '"', " ", "{", "${", ":", ",", "a/", "s3:", "${oc.env:", "~")


@pytest.mark.parametrize("form", ["seed={}x", "run.dir={}x", "optimizer={}x"])
def test_long_arguments_are_read_in_linear_time(refusal, form):
    """Each is as long as a command line takes; one read in the square of its length would take minutes, not 3 s."""
    for word in WORDS:
        refusal(form.format(word * (130_000 // len(word))))


def test_all_mistakes_at_once(refusal):
    lines = refusal(
        "train.stepz=1", "seed=-1", "run.dir=~nosuchuser/x", "optimizer.lr=nan", "model=nope", "precision=fp9"
    )
    for start in (
        "train.stepz=1",
        "seed=-1",
        "run.dir=~nosuchuser/x",
        "optimizer.lr=nan",
        "model=nope",
        "precision=fp9",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, lines


# The environment.

VARIABLES = [
    (["cluster=ray"], "RAY_ADDRESS", "garbage", "auto"),
    (["cluster=ray"], "RAY_ADDRESS", "ray://", "auto"),
    (["cluster=ray"], "RAY_ADDRESS", "ray://127.0.0.1:10001", "auto"),
    (["cluster=ray"], "RAY_ADDRESS", "local", "auto"),  # it would start a Ray, and write into ~/.ray
    (["cluster=ray"], "RAY_ADDRESS", "host:port", "127.0.0.1:6379"),
    (["cluster=ray"], "RAY_ADDRESS", "a b:1", "127.0.0.1:6379"),
    (["cluster=ray"], "RAY_ADDRESS", "", "auto"),
    (["monitor=wandb"], "WANDB_MODE", "nosuch", "online, offline, disabled"),
    (["monitor=wandb"], "WANDB_MODE", "Offline\n", "offline"),
    (["train.deterministic=true"], "CUBLAS_WORKSPACE_CONFIG", ":0:0", ":4096:8, :16:8"),
    (["train.deterministic=true"], "NCCL_ALGO", "NVLS", "^NVLS,NVLSTree, Ring"),
    (["train.deterministic=true"], "NCCL_ALGO", "^NVLS", "^NVLS,NVLSTree"),
    (["train.deterministic=true"], "NCCL_ALGO", "^Tree", "^NVLS,NVLSTree"),
]


@pytest.mark.parametrize(("arguments", "name", "value", "legal"), VARIABLES)
def test_a_variable(refusal, monkeypatch, arguments, name, value, legal):
    monkeypatch.setenv(name, value)
    [line] = refusal(*arguments)
    assert line.startswith(f"{name}={escape_unprintable(value)}: (environment) ") and legal in line


@pytest.mark.parametrize("name", run_rules.TORCHRUN)
def test_a_variable_of_torchrun(refusal, monkeypatch, name):
    for each in run_rules.TORCHRUN:
        monkeypatch.setenv(each, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv(name, "²")
    [line] = refusal("cluster=processes")
    assert line.startswith(f"{name}=²: (environment) must be ")


def test_variables_that_nothing_reads_may_be_anything(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "nosuch")
    monkeypatch.setenv("RAY_ADDRESS", "garbage")
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    assert run_rules.violations_of_environment(Config()) == []
    deterministic = Config(train=Train(deterministic=True))
    assert len(run_rules.violations_of_environment(deterministic)) == 1
    for algorithm in ("^nvlstree,NVLS", "Ring", "allreduce:tree;allgather:ring"):
        monkeypatch.setenv("NCCL_ALGO", algorithm)
        assert run_rules.violations_of_environment(deterministic) == []
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    deterministic.cluster.device = "cpu"
    assert run_rules.violations_of_environment(deterministic) == []


# Tables of schedules.

TABLES_OF_SCHEDULES = {
    "pipe": (None, "is no file"),
    "folder": (None, "is no file"),
    "absent": (None, "cannot be read"),
    "empty": ("", "no backward pass"),
    "words": ("hello,world\n", "is no action"),
    "far": ("0F999999999,0B999999999\n", "microbatches"),
    "digits": ("0F" + "9" * 5000 + "\n", "is no action"),
    "half": ("0F0,0F1,0B0\n", "0B1 is missing"),
    "binary": (b"\xff\xfe", "cannot be read"),
    "odd": ("0F٣,0B٣\n", "is no action"),
}


@pytest.mark.parametrize("name", TABLES_OF_SCHEDULES)
def test_a_table_of_a_schedule(refusal, tmp_path, name):
    content, said = TABLES_OF_SCHEDULES[name]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    elif name != "absent":
        (os.mkfifo if name == "pipe" else os.mkdir)(path)
    lines = refusal("pipeline=file", f"pipeline.file={path}")
    assert lines[0].startswith(f"pipeline.file={path}: ") and said in lines[0]
