"""What `pip install elastic-platform` brings is enough to train; whatever else a run asks for is refused in a line that
names the extra with it, here with the packages of all extras hidden."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from platform import evaluate, launch
from platform.boundary.schema import Malformed
from platform.checkpoint.__main__ import main as inspect_checkpoint
from platform.data.tokenizer_files import read_sentencepiece_model
from tests.house.language import parsed
from tests.house.rooms import PACKAGE, ROOT
from tests.house.test_contracts import MODULE_OF, PROJECT, imported

EXTRAS = PROJECT["project"]["optional-dependencies"]
NO_FEATURE = {
    "dev",
    "dashboards",
    "gpu-rules",
    "kubernetes",
    "peft",
    "trl",
}  # of tests, of a script, and of the nodes of a cluster
HARNESS = PACKAGE / "cluster" / "harness_tasks.py"  # is imported where lm-eval is there


def packages(lines: list[str]) -> set[str]:
    """Return the names of the packages in a list of pyproject.toml or in requirements.txt."""
    return {re.split(r"[\[<>=~! ]", line)[0].lower() for line in lines}


def modules(lines: list[str]) -> set[str]:
    """Return the modules of the packages in a list of pyproject.toml."""
    return {MODULE_OF.get(name, name) for name in packages(lines)}


ALWAYS = modules(PROJECT["project"]["dependencies"])
OPTIONAL = {name: modules(lines) - ALWAYS for name, lines in EXTRAS.items() if name not in NO_FEATURE}
HIDDEN = set().union(*OPTIONAL.values())


def at_the_top(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the packages that a module imports as it is imported itself."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(ast.unparse(node))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
                for inner in ("body", "orelse", "handlers", "finalbody"):
                    yield from at_the_top(getattr(node, inner, []))


def test_an_import_at_the_top_is_seen():
    source = "try:\n import a.b\nexcept ImportError:\n from c import d\nclass E:\n import e\ndef f():\n import f"
    assert [*at_the_top(ast.parse(source).body)] == ["a", "c", "e"]


def test_no_module_needs_an_extra_to_be_imported():
    early = {path for path in PACKAGE.rglob("*.py") if HIDDEN & {*at_the_top(parsed(path.read_text()).body)}}
    assert early <= {HARNESS}
    above = [path for path in PACKAGE.rglob("*.py") if "platform.cluster.harness_tasks" in path.read_text()]
    tops = "\n".join(ast.unparse(node) for path in above for node in parsed(path.read_text()).body
                     if isinstance(node, ast.Import | ast.ImportFrom))  # fmt: skip
    assert above and "harness_tasks" not in tops


def test_what_trains_is_pinned_first():
    """requirements.txt has every package of `make train`, then those of the extras and of `make test`: no others."""
    text = (ROOT / "requirements.txt").read_text()
    first, extras, tools = (packages(re.findall(r"^\w.*==.*$", part, re.M)) for part in re.split(r"\n\n# For ", text))
    assert first == packages(PROJECT["project"]["dependencies"])
    assert extras | tools == packages(EXTRAS["dev"]) and not extras & tools
    assert extras <= packages([line for name in EXTRAS if name != "dev" for line in EXTRAS[name]])


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with files that need an extra, while no package of an extra can be imported or found."""
    for name in [*HIDDEN, *(name for name in sys.modules if name.partition(".")[0] in HIDDEN)]:
        if name != "google":  # a namespace, which other packages have too
            monkeypatch.setitem(sys.modules, name, None)
    from fsspec.registry import _registry  # type: ignore[attr-defined]

    monkeypatch.delitem(_registry, "s3", raising=False)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "x.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    monkeypatch.chdir(tmp_path)
    return tmp_path


QUICK = ["+experiment=gpt_quick", "run.dir=run"]
REFUSED = {  # what is asked for -> the packages without which it is refused
    "monitor=[wandb,tensorboard,mlflow,trackio] eval.tasks=[arc_easy]":
        ["wandb", "tensorboard", "mlflow", "trackio", "lm_eval"],
    "data=text data.path=x.parquet": ["pyarrow"],
    "data=text data.path=x.jsonl.zst": ["pyarrow"],
    "checkpoint.url=s3://bucket/run": ["s3fs"],
}  # fmt: skip
COMMANDS = {"evaluate run --bleu --tasks a": ["sacrebleu", "lm_eval"], "checkpoint show s3://bucket/run": ["s3fs"]}


def names_extras(lines: list[str], lacking: list[str]) -> None:
    """Check that each package is named in a line of its own, with an extra that has it, and nothing else is said."""
    assert len(lines) == len(lacking), lines
    for package in lacking:
        [line] = [line for line in lines if package in line.partition("pip install")[0]]
        [extra] = re.findall(r"pip install .*'elastic-platform\[(\w+)\]'", line)
        assert package in OPTIONAL[extra], line


@pytest.mark.parametrize("asked", REFUSED)
def test_a_run_is_refused_by_the_extra_that_it_lacks(asked: str, hidden: Path, capfd: pytest.CaptureFixture[str]):
    assert launch.main([*QUICK, *asked.split()]) == launch.REFUSED
    names_extras(capfd.readouterr().err.splitlines(), REFUSED[asked])
    assert not (hidden / "run").exists()


@pytest.mark.parametrize("typed", COMMANDS)
def test_a_command_is_refused_by_the_extra_that_it_lacks(typed: str, hidden: Path, capfd: pytest.CaptureFixture[str]):
    name, *words = typed.split()
    assert {"evaluate": evaluate.main, "checkpoint": inspect_checkpoint}[name](words) == launch.REFUSED
    names_extras(capfd.readouterr().err.splitlines(), COMMANDS[typed])


def test_a_tokenizer_is_refused_by_the_extra_that_it_lacks(hidden: Path):
    """A run reads it in a process that hides nothing: here is what that one does."""
    with pytest.raises(Malformed) as error:
        read_sentencepiece_model(b"")
    names_extras([str(error.value)], ["sentencepiece"])


def test_every_package_of_an_extra_is_tried():
    tried = {name for names in (*REFUSED.values(), *COMMANDS.values()) for name in names}
    assert tried | {"sentencepiece"} == HIDDEN - {"google"}  # which comes with sentencepiece
