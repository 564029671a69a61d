"""What keys are declared to be, against the sets that earlier versions listed beside the keys."""

import pytest

from platform.config.fields import KEYS, Config, list_key_fields
from platform.config.groups import RESUME
from platform.config.identity import FREE, FREE_GROUPS, run_identity
from platform.config.layout_rules import OPEN_KEYS, mark_open_keys

OPTIMIZER = """lr betas eps nesterov newton_schulz matrix_lr beta2_decay update_clip relative_step scale_by_weight
least_scale groups weight_decay clip early
moments masters offload schedule warmup_steps min_lr cycles decay_steps settings schedule_settings"""
MODEL = """dropout fused_dropout label_smoothing predict_ahead_weight capacity_factor balance_loss balance_rate z_loss
router_jitter"""
TRAIN = (
    "global_batch ramp_from ramp_by ramp_samples length_ramp loss loss_settings teacher init init_averaged freeze ema"
)
TUNE = "kind rank alpha rslora targets double dropout"
PLANNED = ("tune.", "model.", "tensor.", "branch.", "pipeline.", "parallel.", "quantise.", "train.global_batch",
           "train.microbatch")  # fmt: skip
PATHS = "run.dir data.cache pipeline.file checkpoint.url model.source eval.task_folder train.teacher"
SOURCE_PATHS = "data.path data.target_path data.validation_path"
MARKED = """tensor pipeline pipeline.stages pipeline.chunks parallel.context parallel.experts parallel.zero
train.microbatch recompute parallel.tensor_experts recompute_every tensor.gathered train.mlp_chunks
optimizer.offload parallel.data"""


def test_which_may_change_on_resume():
    free = {
        "optimizer": OPTIMIZER, "model": f"{MODEL} position_rows",
        "data": "kind path target_path sources tokenizer chat_template date settings",
        "train": "init init_averaged length_ramp loss loss_settings teacher", "tune": "dropout",
    }  # fmt: skip
    assert {*FREE} == {f"{group}.{name}" for group, names in free.items() for name in names.split()}
    assert {*FREE_GROUPS} == {*free} and len(FREE) == len({*FREE})


def test_which_are_of_the_identity_of_a_run():
    identity, values = run_identity(Config()), Config().to_dict()
    names = {f"train.{name}" for name in TRAIN.split()} | {f"tune.{name}" for name in TUNE.split()}
    assert identity.keys() == {"model", "data", "seed", "optimizer", *names}
    assert values["data"].keys() - identity["data"].keys() == {"cache", "foreign_tokenizer", "unread"}
    assert {key for key in KEYS if KEYS[key].identity == "share"} == {"data.validation", "data.streaming"}


def test_which_planning_reads():
    assert {key for key in KEYS if KEYS[key].planned} == {k for k in KEYS if k.startswith((*PLANNED, "recompute"))}


def test_which_are_paths():
    words = dict.fromkeys(f"{PATHS} {SOURCE_PATHS}".split(), ())
    words |= {"checkpoint.resume": RESUME, "train.init": ("random",), "data.tokenizer": ("train",)}
    assert {k: KEYS[k].path for k in KEYS if KEYS[k].path is not None} == {**words, "data.chat_template": ("chatml",)}


@pytest.mark.parametrize(
    "key, readers",
    [
        ("tensor.layout", {"tensor.scheme": "layout", "tensor.layout": "batch: t"}),
        ("branch.slice_via", {"branch.append": {"core": ["heads"], "attention": ["batch"]}}),
        ("parallel.zero", {"branch.kind": "none"}), ("pipeline.stages", {"pipeline.kind": "gpipe"}),
        ("pipeline.chunks", {"pipeline.kind": "interleaved"}), ("pipeline.file", {"pipeline.kind": "file"}),
        *((f"cluster.{name}", {"cluster.kind": "ray"}) for name in ("placement", "labels", "runtime_env", "autoscale")),
    ],
)  # fmt: skip
def test_which_are_read_in_some_configurations_alone(key, readers):
    config = Config()
    config.branch.kind = "dsp_csub"
    assert not KEYS[key].read_if(config)
    for name, value in readers.items():
        group, _, name = name.partition(".")
        setattr(getattr(config, group), name, value)
    assert KEYS[key].read_if(config)


def test_no_others_are_read_in_some_configurations_alone():
    assert sum(legal.read_if is not None for legal in KEYS.values()) == 10


def test_which_the_planner_may_choose_and_what_stands_there_until_then():
    names = MARKED.split()
    assert [key for key in OPEN_KEYS if key != "tensor.axes"] == names and OPEN_KEYS[1] == "tensor.axes"
    config = Config()
    config.tensor.scheme = config.pipeline.kind = config.recompute = config.parallel.tensor_experts = "auto"
    config.train.microbatch = config.parallel.zero = config.parallel.data = -1
    config.parallel.context = config.parallel.experts = config.recompute_every = -1
    config.tensor.gathered = config.optimizer.offload = "auto"
    config.train.mlp_chunks = -1
    mark_open_keys(config)
    assert config.plan.search == names
    config.plan.search, config.train.microbatch, config.parallel.data = [], 4, 1
    assert config == Config()


def test_a_group_declares_for_its_keys_what_they_do_not_declare_themselves():
    assert KEYS["optimizer.lr"].identity == "free" and KEYS["optimizer.kind"].identity == "fixed"
    assert list(KEYS) == list(list_key_fields())
