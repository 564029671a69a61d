"""Scores by tasks at evaluations: with failures, stops and tasks that fail in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster import driver
from platform.cluster.answer_scores import RunTasks
from platform.monitor import MetricsLog
from tests.doubles.fake_crew import Dead
from tests.harness.scripted_run import events, once_each


class Questions:
    """In the place of lm-eval: three texts, a batch each, whose score is the number of updates; `broken`: evaluations
    that fail in the task's own code."""

    def __init__(self):
        self.broken, self.done = set(), 0

    def score_model(self, asked, limit):
        self.done += 1
        if self.done in self.broken:
            raise KeyError("answer\nof many lines")
        scores = [asked.score_continuations([([1, 2], [3])])[0].log_probability for _ in range(3)]
        return {"ends": {"acc": sum(scores) / 3, "limit": limit}}


@pytest.fixture
def questions(config, monkeypatch):
    config.eval.every, config.eval.tasks, config.eval.task_samples = 2, ["ends"], 7
    source = Questions()
    monkeypatch.setattr(driver, "open_tasks", lambda config: RunTasks(config, source))
    monkeypatch.setattr(driver, "violations_of_tasks", lambda config: [])
    monkeypatch.setattr(RunTasks, "check_vocabulary", lambda tasks, vocabulary: None)
    return source


def scores(config):
    rows = MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))
    return {row["step"]: row["task_scores"]["ends/acc"] for row in rows if "task_scores" in row}


def test_every_evaluation_has_scores(config, drive, questions):
    assert drive() == 0
    assert scores(config) == {2: 2.0, 4: 4.0, 6: 6.0}
    assert "      4  tasks  ends/acc 4.0000  ends/limit 7.0000" in drive.out


def test_a_worker_that_dies_meanwhile(config, drive, questions):
    """The mesh forms again, does the step again, and answers all questions."""
    assert drive({"score_texts": [{}, {}, {}, {}, {2: Dead}]}) == 0 and once_each(config)
    [failure] = events(config, "failure")
    assert (failure["method"], failure["step"]) == ("score_texts", 4)
    assert scores(config) == {2: 2.0, 4: 4.0, 6: 6.0} and questions.done == 4


def test_a_stop_does_not_wait_for_all_questions(config, drive, questions, stop):
    config.checkpoint.on_stop = True
    assert drive({"score_texts": [{}, {}, {}, stop]}) == 75
    [missing] = events(config, "not_scored")
    assert (missing["step"], missing["reason"]) == (4, "the run is to stop")
    assert [call for call, _ in drive.crew.calls].count("score_texts") == 4
    assert scores(config) == {2: 2.0} and drive() == 0 and scores(config) == {2: 2.0, 6: 6.0}


def test_a_task_that_fails_ends_no_run(config, drive, questions):
    questions.broken = {2}
    assert drive() == 0 and once_each(config)
    assert scores(config) == {2: 2.0, 6: 6.0}
    [missing] = events(config, "not_scored")
    assert missing["step"] == 4 and missing["reason"].startswith("KeyError: ") and "\n" not in missing["reason"]
    assert "after step 4: eval.tasks gives no scores: KeyError" in drive.out


def test_data_without_a_tokenizer_is_refused(config, drive, questions, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(driver, "open_tasks", lambda config: RunTasks(config, questions))
    monkeypatch.setattr(driver, "violations_of_tasks", lambda config: [])
    with pytest.raises(ConfigError, match="eval.tasks=ends: tasks are texts, and the data has no tokenizer"):
        drive()
    assert not Path(config.run.dir).exists()
