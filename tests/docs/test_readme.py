"""What README.md, docs/ and jobs/ tell people to type does what they say, up to the start of the workers."""

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs import figure
from platform import launch
from platform.cluster import driver
from platform.cluster.run import resources
from platform.launch import compose
from platform.plan.__main__ import main as explain_plan
from platform.plan.core.plan_data import plan_summary
from platform.planning.make_plan import make_plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
JOBS = [file for file in sorted((ROOT / "jobs").rglob("*")) if file.is_file()]
ROOMS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(arguments of `python -m platform.launch`, the `config:` lines shown below them); NAME stands for any name."""
    text = text.replace("\\\n", " ")
    found = re.findall(r"-m platform\.launch +([^\n`&]+)((?:\nconfig: .*)*)", text)
    return [(line, refusal.splitlines()[1:]) for line, refusal in found]


COMMANDS = [
    pytest.param(line, shown, id=f"{file.name}: {line}")
    for file in [*PAGES, *JOBS]
    for line, shown in commands(file.read_text())
    if "NAME" not in line
]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A directory with the files that README.md shows, on a machine without GPUs where nothing is started."""

    def run(config, plan, *, command):
        if config.cluster.kind != "ray":
            resources.reserve_workers(config.cluster, plan.mesh.size, print)
        return launch.DONE

    for block, path in re.findall(r"```yaml\n(# @package _global_\n# ([\w/.]+)\n.*?)```", README, re.S):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(block)
    for folder in ("docs", "platform"):  # which commands name as text
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resources, "gpu_count", lambda: 0)
    monkeypatch.setattr(driver, "run", run)
    return tmp_path


@pytest.mark.parametrize(("line", "shown"), COMMANDS)
def test_a_command_starts_or_is_refused_as_shown(here, capfd, line, shown):
    if "$" in line:  # a batch script's: its variables are numbers and names
        line = re.sub(r'"\$@"|\$\w+', lambda m: "" if "@" in m[0] else "2", line)
    status = launch.main(shlex.split(line))
    assert capfd.readouterr().err.splitlines() == shown
    assert status == (launch.REFUSED if shown else launch.DONE)


def test_there_are_commands():
    assert len(COMMANDS) > 20 and sum(bool(p.values[1]) for p in COMMANDS) >= 4


@pytest.mark.parametrize("group", ["tensor", "branch", "cluster", "experiment"])
def test_every_option_has_its_row(group):
    _, _, table = re.split(rf"^\| `(\+?){group}=` \|", README, maxsplit=1, flags=re.M)
    first_cells = re.findall(r"^\| ([^|]+)\|", table.partition("\n\n")[0], re.M)
    options = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(options) == sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


@pytest.mark.parametrize("line", re.findall(r"-m platform\.plan (.+)", README))
def test_a_plan_is_explained(line, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["platform.plan", *shlex.split(line)])
    assert explain_plan() == launch.DONE
    shown = capsys.readouterr().out
    assert (shown.rstrip() in README) if "--shrink" in line else "bytes per step, all workers" in shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    text = page.read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([a-z-]+)`", text) + re.findall(r"^\$ make ([a-z-]+)$", text, re.M)) <= set(targets)
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / path).exists(), path
    for path in re.findall(r"`([\w.-]+/[\w./-]+)`", text):
        assert path.split("/")[0] not in ROOMS - {"runs"} or (ROOT / path).exists(), path


def test_the_picture_shows_the_plan_of_the_quick_run():
    picture = (ROOT / "docs" / "gpt_quick.svg").read_text()
    plan = json.loads(json.dumps(plan_summary(make_plan(compose(["+experiment=gpt_quick"])))))
    assert "\n".join(figure.mesh(plan)) in picture
    assert "docs/gpt_quick.svg" in README


def test_a_picture_is_well_formed_and_shows_every_loss():
    plan = plan_summary(make_plan(compose(["+experiment=gpt_quick"])))
    rows = [{"step": k, "loss": 8 - 0.01 * k} | ({"val_loss": 7.5} if k % 50 == 0 else {}) for k in range(1, 101)]
    svg = ElementTree.fromstring(figure.draw(rows, plan))
    [train] = [e for e in svg.iter() if e.get("class") == "train"]
    assert train.get("d").count(",") == 100
    assert len([e for e in svg.iter() if e.get("class") == "val" and e.tag.endswith("circle")]) == 2
