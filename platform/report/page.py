"""A page: the table of panels that it and W&B's workspace are made from (`panels.yaml`), and its HTML, one file with
its data, style and scripts in it, which loads nothing and runs nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from platform.data.html_head import html_head, policy_hash

STATIC = Path(__file__).parent / "static"
_TABLE = Path(__file__).with_name("panels.yaml")
_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "charts.js", "page.js")
_INERT = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}  # in JSON they stand in texts alone
_PAGE = """{head}<header id="runs">{first}</header>
<nav><div id="contents"></div><div id="tools"></div></nav>
<main id="sections"><noscript>The charts below need JavaScript.</noscript></main>
<footer><div id="live" aria-live="polite"></div><div id="missing"></div>{made} Charts by uPlot (MIT).</footer>
<script type="application/json" id="data">{data}</script>
{scripts}
</html>
"""


@cache
def panel_table() -> dict[str, Any]:
    """Return the table of panels: `sections`, each with its `title` and `panels`, and `not_shown`, name -> reason."""
    import yaml

    return yaml.safe_load(_TABLE.read_text())


def all_panels() -> Iterator[dict[str, Any]]:
    """Yield every panel of a run's page and of its W&B workspace, by section."""
    for section in panel_table()["sections"]:
        yield from section["panels"]


def matches_metric(metrics: list[str], name: str) -> bool:
    """Return True if a panel of these `metrics` (NAME, or NAME/*) shows the metric of that W&B name."""
    return any(name == m or (m.endswith("/*") and name.startswith(m[:-1])) for m in metrics)


@cache
def _read_static_file(name: str) -> str:
    """Return the text of a style or script of the page."""
    return (STATIC / name).read_text()


def content_policy(live: bool) -> str:
    """Return the content security policy of a page, which may ask its server for rows if it is `live`."""
    scripts, styles = (" ".join(policy_hash(_read_static_file(n)) for n in names) for names in (_SCRIPTS, _STYLES))
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def script_safe_json(data: Any) -> str:
    """Return plain data of a page as JSON without a character that could end the script element that it stands in."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_INERT)


def page_html(data: Mapping[str, Any]) -> str:
    """Return the HTML of a page that draws such data (`collect_page_data`). Its first lines, on how each run is, can be
    read without a script."""
    runs = data["runs"]
    first = "".join(
        f'<div class="run"><h1>{escape(run["path"])}</h1>'
        f'<p class="verdict {run["state"]["tone"]}">{escape(run["state"]["line"])}</p></div>'
        for run in runs
    )
    title = ", ".join(run["name"] for run in runs)
    return _PAGE.format(
        head=html_head(title, content_policy(data["live"]), *map(_read_static_file, _STYLES)),
        scripts="\n".join(f"<script>{_read_static_file(name)}</script>" for name in _SCRIPTS),
        first=first,
        made=time.strftime("Written on %Y-%m-%d at %H:%M:%S.", time.localtime(data["made"])),
        data=script_safe_json(data),
    )
