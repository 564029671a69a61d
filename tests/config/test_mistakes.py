"""What is refused, and how: a line per mistake."""

import subprocess
import sys

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import KEYS, Branch, Config, Tensor, flatten_config
from platform.config.validation import violations_of_configuration
from platform.launch import compose_config
from tests.conftest import ROOT
from tests.harness.commands import QUICK, mistakes

WRONG = [
    ("train.stepz=5", "train.stepz=5: unknown key; nearest legal: train.steps"),
    ("+train.stepz=5", "train.stepz=5: unknown key; nearest legal: train.steps"),
    ("++model.widht=5", "model.widht=5: unknown key"),
    ("lr=1", "lr=1: unknown key; nearest legal: optimizer.lr"),
    ("tensr=1d", "tensr=1d: unknown key; nearest legal: tensor"),
    ("model=gpt_tinny", "model=gpt_tinny: unknown; nearest legal: gpt_tiny"),
    ("cluster=slurm", "cluster=slurm: unknown; nearest legal: "),
    ("train.steps=many", "train.steps=many: must be an integer"),
    ("train.steps=1.5", "train.steps=1.5: must be an integer"),
    ("train.steps=1e3", "train.steps=1e3: must be an integer; nearest legal: 1000"),
    ("train.steps=inf", "train.steps=inf: must be an integer"),
    ("train.steps=null", "train.steps=null: "),
    ("train.steps=[1]", "train.steps=[1]: must be an integer"),
    ("train.steps=1,2", "train.steps=1,2: several values: a sweep needs -m"),
    ("train.steps=${nope}", "train.steps=${nope}: "),
    ("optimizer.lr=fast", "optimizer.lr=fast: must be a number"),
    ("model.bias=maybe", "model.bias=maybe: must be true or false"),
    ("train=5", "train=5: "),
    ("train.steps", "train.steps: must be KEY=VALUE"),
    ("~train.steps", "~train.steps: must be KEY=VALUE"),
    ("tensor.axes=x:2", "tensor.axes=x:2: "),
    ("tensor.axes.t=two", "tensor.axes.t=two: must be an integer"),
    ("seed=-1", "seed=-1: must be >= 0; nearest legal: 0"),
    ("train.steps=-3", "train.steps=-3: must be >= 1; nearest legal: 1"),
    ("train.steps=0", "train.steps=0: must be >= 1; nearest legal: 1"),
    ("train.microbatch=0", "train.microbatch=0: must be >= 1; nearest legal: 1"),
    ("model.dropout=1", "model.dropout=1.0: must be >= 0 and < 1"),
    ("optimizer.lr=-1", "optimizer.lr=-1.0: must be >= 0 and < inf; nearest legal: 0"),
    ("optimizer.lr=nan", "optimizer.lr=nan: must be >= 0 and < inf"),
    ("optimizer.betas=[0.9,1]", "optimizer.betas.1=1.0: must be >= 0 and < 1"),
    ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: must be two numbers"),
    ("optimizer.warmup_steps=400", "optimizer.warmup_steps=400: must be <= train.steps=300; nearest legal: 300"),
    ("optimizer.schedule=stairs", "optimizer.schedule=stairs: unknown; nearest legal: "),
    ("precision=fp9", "precision=fp9: unknown; nearest legal: "),
    ("loss_scale.backoff=1", "loss_scale.backoff=1.0: must be > 0 and < 1"),
    ("loss_scale.initial=0.5", "loss_scale.least=1.0: must be <= loss_scale.initial=0.5; nearest legal: 0.5"),
    ("recompute=some", "recompute=some: unknown; nearest legal: "),
    ("recompute_every=0", "recompute_every=0: must be >= 1"),
    ("model.norm=batchnorm", "model.norm=batchnorm: unknown; nearest legal: "),
    ("train.compile=sometimes", "train.compile=sometimes: unknown; nearest legal: "),
    ("train.attention_kernel=flush", "train.attention_kernel=flush: unknown; nearest legal: flash"),
    ("train.deterministic=maybe", "train.deterministic=maybe: must be true or false"),
    ("parallel.data=0", "parallel.data=0: must be >= 1, or -1"),
    ("parallel.zero=4", "parallel.zero=4: unknown; nearest legal: 3, 2, 1"),
    ("pipeline.file=/mine.csv", "pipeline.file=/mine.csv: only for pipeline=file"),
    ("pipeline.kind=1f1c", "pipeline.kind=1f1c: unknown; nearest legal: 1f1b"),
    ("pipeline=2f2b", "pipeline=2f2b: unknown; nearest legal: "),
    ("pipeline.stages=4", "pipeline.stages=4: pipeline=none has one; nearest legal: 1"),
    ("branch.slice_via=all_gather", "branch.slice_via=all_gather: branch=none has no all-to-all that it would replace"),
    ("branch.slice_via=p2p", "branch.slice_via=p2p: unknown; nearest legal: all_to_all, all_gather"),
    ("branch.axes.g=2", "branch.axes.g=2: branch=none has no axes"),
    ("checkpoint.every=-1", "checkpoint.every=-1: must be >= 0; nearest legal: 0"),
    ("checkpoint.every=30min", "checkpoint.every=30min: must be a number of steps, or a duration like 45s, 30m or "
     "1h30m, or auto; nearest legal: 30, 30m"),
    ("checkpoint.every=-30m", "checkpoint.every=-30m: must be a number of steps, or a duration"),
    ("elastic.snapshot_every=often", "elastic.snapshot_every=often: must be a number of steps >= 0, or auto; nearest "
     "legal: 1, auto"),
    ("elastic.snapshot_every=2.5", "elastic.snapshot_every=2.5: must be a number of steps >= 0, or auto; nearest "
     "legal: 1, auto"),
    ("checkpoint.every=0m", "checkpoint.every=0m: must be a number of steps, or a duration"),
    ("checkpoint.every=2.5", "checkpoint.every=2.5: must be a number of steps, or a duration"),
    ("checkpoint.every=1h30", "checkpoint.every=1h30: must be a number of steps, or a duration"),
    ("checkpoint.keep=0", "checkpoint.keep=0: must be >= 1; nearest legal: 1"),
    ("train.stop_at=-1", "train.stop_at=-1: must be >= 0; nearest legal: 0"),
    ("train.stop_at=301", "train.stop_at=301: must be <= train.steps=300; nearest legal: 300"),
    ("elastic.spares=-1", "elastic.spares=-1: must be >= 0; nearest legal: 0"),
    ("elastic.min_workers=-1", "elastic.min_workers=-1: must be >= 0; nearest legal: 0"),
    ("elastic.max_workers=-1", "elastic.max_workers=-1: must be >= 0; nearest legal: 0"),
    ("elastic.hang_seconds=0", "elastic.hang_seconds=0.0: must be > 0"),
    ("elastic.faults=[3:burn:1]", "elastic.faults=3:burn:1: must be STEP:KIND:RANK[:SECTION], KIND kill|"),
    ("run.time_limit=soon", "run.time_limit=soon: must be seconds or H:MM:SS; nearest legal: 3600, 1:00:00"),
    ("train.on_spike=pray", "train.on_spike=pray: unknown; nearest legal: "),
    ("model.heads=5", "model.heads=5: must divide model.d_model=128"),
    ("model.kv_heads=3", "model.kv_heads=3: must divide model.heads=4; nearest legal: 2, 4, 1"),
    ("train.global_batch=0", "train.global_batch=0: must be >= 1"),
    ("tensor.axes.q=2", "tensor.axes.q=2: tensor=1d has no such axis; nearest legal: tensor.axes.t=2, 1"),
    ("tensor.axes.t=0", "tensor.axes.t=0: must be >= 1; nearest legal: 1"),
    ("tensor.layout=batch:t", "tensor.layout=batch:t: only for tensor=layout"),
    ("data=text", "data.path=: data=text needs a file, a folder or a glob"),
    ("data.validation=0", "data.validation=0: eval.every=50 needs a held-out split"),
]  # fmt: skip


def test_a_byte_that_the_locale_does_not_read_is_refused_with_the_locale_s_cure():
    """As Python hands it on under LC_ALL=C, or one that is no UTF-8."""
    [line] = mistakes("run.dir=h\udcc3\udca9", "data=synthetic")
    assert line.startswith("run.dir=") and line.endswith(
        "U+DCC3, which no text may have; leave it out, or set LANG=C.UTF-8"
    )


@pytest.mark.parametrize(("argument", "line"), WRONG, ids=[argument for argument, _ in WRONG])
def test_one_mistake_is_one_line(argument, line):
    violations = mistakes(argument)
    assert len(violations) == 1 and violations[0].startswith(line) and "\n" not in violations[0], violations


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["tensor=serial", "tensor.axes.t=2"], "tensor.axes.t=2: tensor=serial has no such axis; nearest legal: 1"),
        (["tensor=3d", "tensor.axes.t=2"], "tensor.axes.t=2: tensor=3d has no such axis; nearest legal: tensor.axes"),
        (["branch=dsp", "branch.axes.t=2"], "branch.axes.t=2: tensor=1d has an axis t already"),
        (["branch=dsp", "branch.axes.data=2"], "branch.axes.data=2: the names stage, data, zero, expert, context,"),
        (["tensor=layout", "tensor.axes.zero=2"], "tensor.axes.zero=2: the names stage, data, zero, expert, context,"),
        (["tensor=layout", "tensor.axes={a-b: 2}"], "tensor.axes.a-b=2: an axis is named by letters"),
        (["model.positions=rope", "model.d_kv=17"], "model.d_kv=17: model.positions=rope needs an even d_kv"),
        (["model.positions=rope", "model.heads=128"], "model.heads=128: model.positions=rope needs an even"),
        (["train.deterministic=true", "cluster=ray"], "cluster.threads=0: train.deterministic=true needs one"),
        (["branch=dsp_csub", "branch.slice_via=all_gather"], "branch.slice_via=all_gather: branch=dsp_csub has no all"),
    ],
)  # fmt: skip
def test_one_mistake_in_context_is_one_line(arguments, line):
    violations = mistakes(*arguments)
    assert len(violations) == 1 and violations[0].startswith(line), violations


@pytest.mark.parametrize(("name", "near"), [("gpt_quik", "gpt_quick"), ("gpt176b", "gpt175b"), ("", "cluster_check")])
def test_an_unknown_experiment(name, near):
    with pytest.raises(ConfigError) as error:
        compose_config([f"+experiment={name}", "train.steps=0", "tensor.axes.t=2"])
    first, *others = error.value.violations
    assert first.startswith(f"experiment={name}: unknown; nearest legal: {near}, ")
    assert others == ["train.steps=0: must be >= 1; nearest legal: 1"]  # the axes hang on the experiment


def test_all_mistakes_at_once():
    wrong = ["train.stepz=1", "model=nope", "optimizer.lr=fast", "~seed.x", "train.steps=-3", "precision=fp9"]
    assert [line.split("=")[0].split(":")[0] for line in mistakes(*wrong)] == [
        "train.stepz",
        "model",
        "optimizer.lr",
        "~seed.x",
        "precision",
        "train.steps",
    ]
    related = mistakes("train.stepz=1", "train.global_batch=0", "model.heads=5", "tensor.axes.q=2", "parallel.zero=4")
    assert len(related) == 5


NEUTRAL = """
parallel.zero=0 pipeline=none pipeline.stages=1 pipeline.chunks=1 branch=none branch.axes.g=1 recompute=none
checkpoint.every=0 checkpoint.resume=auto elastic.spares=0 elastic.min_workers=0 elastic.max_workers=0 train.stop_at=0
model.fused_dropout=false tensor=serial tensor.axes.t=1 eval.every=0 pipeline.scatter_gather=true
elastic.snapshot_every=0
""".split()


def test_neutral_values_are_accepted():
    assert compose_config([QUICK, *NEUTRAL]).tensor.axes == {}


def test_every_key_declares_what_it_means_and_its_default_is_legal():
    assert list(KEYS) == list(flatten_config(Config()))
    assert all(key.guidance and "\n" not in key.guidance for key in KEYS.values())
    assert violations_of_configuration(Config()) == []


def test_the_page_of_all_keys_is_what_is_declared():
    done = subprocess.run([sys.executable, "-m", "platform.config.reference"], capture_output=True, text=True)
    assert done.stdout == (ROOT / "docs" / "configuration.md").read_text(), done.stderr


def test_violations_knows_schemes_by_their_tables():
    assert violations_of_configuration(Config(tensor=Tensor(scheme="foo")))[0].startswith("tensor.scheme=foo: ")
    assert violations_of_configuration(Config(branch=Branch(kind="dsp_csub")))[0].startswith(
        "branch.kind=dsp_csub: a branch's name with"
    )
    mine = Tensor(scheme="foo", axes={"u": 2}, regions={"mlp": {"d_ff": ["u"]}})
    assert violations_of_configuration(Config(tensor=mine)) == []
    mine.order = ["v"]
    assert violations_of_configuration(Config(tensor=mine))[-1:] == [
        "tensor.order=[v]: lacks u, an axis of tensor.regions.mlp.d_ff; nearest legal: tensor.regions.mlp.d_ff=[v], [u]"
    ]
