"""What hard use found in the refusals of a command: tracebacks, acceptances of what can never be, counting to n."""

from argparse import Namespace

import pytest

from platform import launch
from platform.boundary.refusals import ConfigError
from platform.cluster.shown_commands import PhaseTimes

FOUND = [
    ("elastic.faults=[[5:kill:1]]", "elastic.faults=[[5:kill:1]]: "),
    ("+experiment={a:1}", "experiment={a:1}: "),
    ("model.layers=???", "model.layers=???: must be given"),
    ("monitor.project='a/b c#'", "monitor.project=a/b c#: "),
    ("seed=18446744073709551616", "seed=18446744073709551616: must be <= "),
    ("train.microbatch=1000000000", "train.microbatch=1000000000: must be <= "),
    ("optimizer.lr=1e308", "optimizer.lr=1e+308: must be <= "),
    ("cluster.threads=100000000000", "cluster.threads=100000000000: must be <= "),
    ("run.dir=/", "run.dir=/: "),
    ("run.dir=~nosuchuser/x", "run.dir=~nosuchuser/x: there is no user"),
    ("elastic.faults=[5:kill:99]", "elastic.faults=5:kill:99: its rank"),
    ("elastic.faults=[999:kill:1]", "elastic.faults=999:kill:1: its step"),
    ("elastic.faults=[5:kill:1:nowhere]", "elastic.faults=5:kill:1:nowhere: a step has no section"),
    ("checkpoint.url=ftp://127.0.0.1/x", "checkpoint.url=ftp://127.0.0.1/x: "),
    ("checkpoint.url=zip://x", "checkpoint.url=zip://x: "),
    ("checkpoint.url=reference://x", "checkpoint.url=reference://x: "),
    ("train.global_batch=2000000", "train.global_batch=2000000: is 250000 microbatches"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "start"), FOUND, ids=[argument for argument, _ in FOUND])
def test_found(argument, start):
    with pytest.raises(ConfigError) as error:
        options = Namespace(config_dir=None, overrides=["+experiment=gpt_quick", argument], multirun=False)
        launch._plan_jobs(options, PhaseTimes())
    assert any(line.startswith(start) for line in error.value.violations)


@pytest.mark.parametrize("name", ["path/to/my_module.py", "/path/my_module.py", "my_module.py", "no_such_module_here"])
def test_a_module_that_is_not_loaded_is_one_line_and_what_it_would_register_is_not_judged(name):
    typed = ["+experiment=gpt_quick", f"extend=[{name}]", "model.kind=mine", "optimizer.kind=own", "data.kind=rhymes"]
    with pytest.raises(ConfigError) as refused:
        launch.compose_config(typed)
    [line] = refused.value.violations
    ways = ("such as my_module for my_module.py in a folder of PYTHONPATH", "cannot be imported (ModuleNotFoundError")
    assert line.startswith(f"extend={name}: ") and any(way in line for way in ways)


@pytest.mark.parametrize(
    "argument", ["checkpoint.url=hdfs://host/path", "run.dir=s3://bucket/run", "checkpoint.resume=no://x"]
)
def test_a_plan_refuses_the_storage_that_a_run_refuses(argument, capsys):
    """The planner used to pass what `platform.launch` refuses by its protocol alone."""
    from platform.plan.__main__ import main as plan

    lines = []
    for command in (launch.main, plan):
        assert command(["+experiment=gpt_quick", argument]) == 2
        lines.append(capsys.readouterr().err)
    assert lines[0] == lines[1] and lines[0].startswith(f"config: {argument}: ")
