"""A page is one file that loads nothing, and in which nothing that a run wrote can act."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from platform.report.__main__ import main
from platform.report.page import STATIC, content_policy, script_safe_json

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!--\u2028{{}}"
# npm's uplot 1.6.32, unchanged: a new version needs new sums, and a look at a page
UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


class Elements(HTMLParser):
    """Tags of a page with their attributes, and the text of each script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A run directory that was written to harm whoever looks at it."""
    run = tmp_path / "<b>&"
    run.mkdir()
    row = {"step": 1, "loss": 1.0, "seconds": {EVIL: 1.0}, "val_losses": {EVIL: 2.0}, "comm_bytes": {EVIL: 3}}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    head = {"generation": 1, "time": 1.0}
    failed = {"number": 1, "rank": 1, "coordinates": {}, "node": EVIL, "method": EVIL, "kind": EVIL, "cause": EVIL}
    journal = [
        head | {"event": "starting", "world_size": 1, "cluster": EVIL, "device": EVIL},
        head | {"event": "sampled", "step": 1, "prompt": EVIL, "text": EVIL},
        head | failed | {"event": "failure", "log": EVIL, "step": 1},
        head | {"event": "gave_up", "cause": EVIL, "step": 1},
        head | {"event": "traffic", "rows": [{"tier": EVIL, "messages": EVIL, "bytes": {}}]},
    ]
    (run / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in journal))
    plan = {"mesh": {EVIL: 2}, "regions": {EVIL: {EVIL: [EVIL]}}, "parameter_count": 1, "parameters_per_worker": 1}
    (run / "plan.json").write_text(json.dumps(plan | {"scheme": EVIL}))
    (run / "timeline.svg").write_text(f"<svg onload='alert(1)'>{EVIL}")
    return run


def page_of(*arguments: Path) -> Elements:
    assert main([str(a) for a in arguments]) == 0
    elements = Elements()
    elements.feed((arguments[0] / "report.html").read_text())
    return elements


def test_hostile_text_is_inert(evil: Path) -> None:
    page = page_of(evil)
    data, *scripts = page.scripts
    assert scripts == [(STATIC / name).read_text() for name in ("uPlot.iife.min.js", "charts.js", "page.js")]
    assert not set("<>&\u2028") & set(data)
    [run] = json.loads(data)["runs"]
    assert run["samples"] == [[1, EVIL, EVIL]] and EVIL.split()[0] in run["state"]["line"]
    assert [tag for tag, _ in page.tags if tag not in Elements.CDATA_CONTENT_ELEMENTS] == [
        *("html", "meta", "meta", "meta", "meta", "title", "header", "div", "h1", "p"),
        *("nav", "div", "div", "main", "noscript", "footer", "div", "div"),
    ]


def test_a_page_loads_nothing_and_runs_nothing_else(evil: Path) -> None:
    page = page_of(evil)
    assert not [attrs for _, attrs in page.tags if {"src", "href", "style", "onload", "onerror"} & attrs.keys()]
    [said] = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert said == content_policy(live=False)
    assert "default-src 'none'" in said and "unsafe" not in said and "connect-src 'none'" in said
    assert len(re.findall(r"'sha256-[\w+/]{43}='", said)) == 5
    ours = "".join((STATIC / name).read_text() for name in ("charts.js", "page.js"))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|https?://(?!www\.w3\.org)", ours
    )


def test_what_is_not_ours_is_what_its_authors_made() -> None:
    assert {name: hashlib.sha256((STATIC / name).read_bytes()).hexdigest() for name in UPLOT} == UPLOT


def test_numbers_that_json_lacks_never_reach_a_page() -> None:
    with pytest.raises(ValueError):
        script_safe_json({"x": float("nan")})


def test_command_line(evil: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(evil), str(tmp_path), "--output", str(tmp_path / "both.html")]) == 0
    assert re.fullmatch(r".*both\.html: 0\.\d\d MB\n", capfd.readouterr().out)
    assert main([str(tmp_path / "none")]) == 2
    assert "RUN_DIR=" in capfd.readouterr().err
    assert main([str(evil), "--output", str(tmp_path / "no" / "folder.html")]) == 2
    assert "--output=" in capfd.readouterr().err
    assert main([str(evil), "--output", ""]) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_page_replaces_nothing_that_was_not_named(evil: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("before")
    (evil / "report.html").symlink_to(tmp_path / "mine")  # put there by whoever made the directory
    assert main([str(evil)]) == 2 and (tmp_path / "mine").read_text() == "before"
    assert main([str(evil), "--output", str(evil / "report.html")]) == 0
    assert (evil / "report.html").is_symlink() and (tmp_path / "mine").read_text().startswith("<!")
