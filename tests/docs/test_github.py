"""What strangers meet on GitHub: a pull request runs the two commands of README.md, and an issue asks for what our own
commands say of a run."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
import yaml

from tests.docs.pages import README, ROOT, typed

GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def test_a_pull_request_runs_the_two_commands():
    [path] = (GITHUB / "workflows").glob("*.yml")
    text = path.read_text()
    workflow = yaml.safe_load(re.sub(r"(?m)^on:", "'on':", text))  # YAML 1.1 takes `on` for true
    assert "pull_request" in workflow["on"] and workflow["permissions"] == {"contents": "read"}
    [job] = workflow["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs == [t.command for t in typed(README) if t.command.startswith("make ")] == ["make train", "make test"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_issue_asks_for_what_our_commands_print(form):
    page = yaml.safe_load(form.read_text())
    assert page["name"] and page["description"]
    asked = [field["attributes"]["label"] for field in page["body"] if field["type"] != "markdown"]
    modules = {name for label in asked for name in re.findall(r"`python -m (platform\.\w+)", label)}
    assert modules == {"platform.doctor", "platform.status"} and all(map(find_spec, modules))
    identities = [field["id"] for field in page["body"] if field["type"] != "markdown"]
    assert len({*identities}) == len(identities) == len(asked)
    assert all(field.get("validations", {}).get("required") for field in page["body"] if field["type"] != "markdown")


def test_there_is_a_form():
    assert FORMS
