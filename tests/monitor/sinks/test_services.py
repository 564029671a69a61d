"""What each service's own package reads back of a run that was rewound and restarted: one curve, without a gap, of the
steps as they were trained last. The packages are optional; where one is missing its tests are skipped."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from platform.monitor.sinks.other_sinks import MlflowSink, TensorboardSink
from tests.monitor.sinks.a_run import ONCE, ARun, rewound_twice, rounded


def read_tensorboard(run: ARun, part: str = "steps"):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.path / "tensorboard" / part), size_guidance={"tensors": 0})
    accumulator.Reload()
    return accumulator


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = pytest.importorskip("mlflow", reason="pip install mlflow")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no store of its own")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return package


@pytest.fixture
def trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = pytest.importorskip("trackio", reason="pip install trackio")
    for module in ("trackio", "trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    return package


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    run = ARun(tmp_path / "run")
    rewound_twice(run, "tensorboard")
    accumulator = read_tensorboard(run)
    assert rounded([(e.step, e.value) for e in accumulator.Scalars("train/loss")]) == ONCE
    assert "comm/all_reduce/data+t" in accumulator.Tags()["scalars"] and "step" not in accumulator.Tags()["scalars"]
    texts = read_tensorboard(run, "texts")
    assert {"alerts/failure", "alerts/recovery"} <= set(texts.Tags()["tensors"])


def test_tensorboard_without_a_mark_at_a_rewind_draws_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    own = TensorboardSink.send_steps
    monkeypatch.setattr(TensorboardSink, "send_steps", lambda self, rows: [setattr(self, "_next", 1), own(self, rows)])
    run = ARun(tmp_path / "run")
    rewound_twice(run, "tensorboard")
    assert rounded([(e.step, e.value) for e in read_tensorboard(run).Scalars("train/loss")]) != ONCE


def test_tensorboard_has_a_bucket_for_each_expert_and_texts_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    run = ARun(tmp_path / "run")
    follower = run.followed("tensorboard")
    run.train(1, expert_load=[5, 0, 7])
    run.happen("sampled", step=1, prompt="A wolf", text="<script>\n# and sheep")
    follower.close(0)
    [event] = read_tensorboard(run).Histograms("experts/load")
    assert event.histogram_value.bucket == [5, 0, 7]
    [event] = read_tensorboard(run, "texts").Tensors("samples/A wolf")
    assert event.tensor_proto.string_val[0].decode() == "    A wolf\n    \n    <script>\n    # and sheep"


@pytest.mark.full
def test_mlflow(tmp_path: Path, mlflow) -> None:
    run = ARun(tmp_path / "run", tags=["first", "long"], notes="as it is", group="mine")
    rewound_twice(run, "mlflow")
    client, name = mlflow.MlflowClient(), run.state("mlflow")["run"]
    assert rounded([(m.step, m.value) for m in client.get_metric_history(name, "train/loss")]) == ONCE
    assert len(client.get_metric_history(name, "comm/all_reduce/data_t")) == 9
    stored = client.get_run(name)
    assert stored.info.status == "FINISHED" and stored.data.params["optimizer.lr"]
    assert {"first", "long", "alert.failure"} <= stored.data.tags.keys()
    assert stored.data.tags["group"] == "mine" and stored.data.tags["mlflow.note.content"] == "as it is"
    assert [file.path for file in client.list_artifacts(name)] == ["journal.jsonl"]


@pytest.mark.full
def test_mlflow_gets_by_its_client_the_newest_numbers_alone(tmp_path: Path, mlflow, monkeypatch) -> None:
    run, sent = ARun(tmp_path / "run"), []
    follower, own = run.followed("mlflow"), mlflow.MlflowClient.log_batch
    run.train(1, 2, 3)
    run.saved(3)
    note = lambda self, name, metrics: [sent.extend(metrics), own(self, name, metrics=metrics)]  # noqa: E731
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", note)
    follower.catch_up()
    assert {metric.step for metric in sent} == {3}
    history = mlflow.MlflowClient().get_metric_history(run.state("mlflow")["run"], "train/loss")
    assert [m.step for m in history] == [1, 2, 3]


@pytest.mark.full
def test_what_mlflow_refuses_is_in_no_table_when_it_is_tried_again(tmp_path: Path, mlflow, monkeypatch) -> None:
    """Numbers have the time at which they were sent in their key, so those sent twice would be there twice."""
    run = ARun(tmp_path / "run")
    sink, own = run.followed("mlflow").sink, mlflow.MlflowClient.log_batch
    name = sink._run
    rows = [{"step": step, "train/loss": 1.0 / step} for step in (1, 2, 3)]

    def refuse(*arguments, **more):
        raise mlflow.exceptions.MlflowException("the database is locked")

    for refused in (True, True, False):
        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", refuse if refused else own)
        with pytest.raises(mlflow.exceptions.MlflowException) if refused else nullcontext():
            sink.send_steps(rows)
    history = mlflow.MlflowClient().get_metric_history(name, "train/loss")
    assert sorted(m.step for m in history) == [1, 2, 3]


@pytest.mark.full
def test_a_table_of_another_form_is_left_to_mlflow(tmp_path: Path, mlflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.monitor.sinks.other_sinks._INSERT", "INSERT INTO metrics (other) VALUES (?)")
    run = ARun(tmp_path / "run")
    rewound_twice(run, "mlflow")
    history = mlflow.MlflowClient().get_metric_history(run.state("mlflow")["run"], "train/loss")
    assert rounded([(m.step, m.value) for m in history]) == ONCE


def test_a_command_sends_a_run_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Once, and no alerts; a reference to the environment stands for its value."""
    from platform.monitor.sinks.__main__ import main

    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    run = ARun(tmp_path / "run")
    run.train(1, 2)
    run.happen("failure")
    run.happen("sampled", step=2, prompt="A wolf", text="a")
    (run.path / "config.yaml").write_text("monitor: {project: '${oc.env:A_PROJECT}'}\nseed: 3\n")
    monkeypatch.setenv("A_PROJECT", "mine")
    for _ in range(2):
        assert main([str(run.path), "tensorboard"]) == 0
        assert capsys.readouterr().out.startswith("TensorBoard: show it with `tensorboard --logdir ")
    assert [e.step for e in read_tensorboard(run).Scalars("train/loss")] == [1, 2]
    assert read_tensorboard(run, "texts").Tags()["tensors"] == ["samples/A wolf"]
    (run.path / "tensorboard" / "steps").rename(run.path / "away")
    (run.path / "tensorboard" / "steps").write_text("no folder")
    assert main([str(run.path), "tensorboard"]) == 1
    assert capsys.readouterr().err.startswith("monitor.sinks: TensorBoard: FileExistsError")


@pytest.mark.full
def test_mlflow_that_gets_steps_at_once_has_some_twice(tmp_path: Path, mlflow, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: so it is held back until a checkpoint has them."""
    monkeypatch.setattr(MlflowSink, "replaces", True)
    run = ARun(tmp_path / "run")
    rewound_twice(run, "mlflow")
    history = mlflow.MlflowClient().get_metric_history(run.state("mlflow")["run"], "train/loss")
    assert len(history) == 12


@pytest.mark.full
def test_trackio(tmp_path: Path, trackio) -> None:
    run = ARun(tmp_path / "run", project="mine", group="some")
    rewound_twice(run, "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    name = run.state("trackio")["run"]
    logs = SQLiteStorage.get_logs("mine", name)
    assert rounded([(row["step"], row["train/loss"]) for row in logs]) == ONCE
    assert {alert["title"] for alert in SQLiteStorage.get_alerts("mine", name)} >= {"Worker lost", "Recovered"}
    assert SQLiteStorage.get_run_config("mine", name)["_Group"] == "some"


@pytest.mark.full
@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "trackio"])
def test_a_row_of_any_numbers_is_taken(tmp_path: Path, name: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip(name, reason=f"pip install {name}")
    if name != "tensorboard":
        request.getfixturevalue(name)
    run = ARun(tmp_path / "run")
    follower = run.followed(name)
    run.train(1, val_loss="NaN", grad_norm="Infinity", skipped=True, val_losses={"a b/<c>": 1.0}, expert_load=[1] * 999)
    run.train(2)
    run.happen("done", step=2)
    follower.close(0)
    assert json.loads((run.path / "sinks" / f"{name}.json").read_text())["step"] == 2
