"""Command lines without their processes: what they refuse, in lines, up to where a command starts its workers."""

from __future__ import annotations

import json
import os
import re
import shutil
from argparse import Namespace
from contextlib import contextmanager
from unittest import mock

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from platform import launch, tune
from platform.boundary.refusals import ConfigError
from platform.cluster import asked_model, resources
from platform.cluster.shown_commands import PhaseTimes
from platform.config import fields
from platform.config.composition import Composer, open_composer
from platform.jobs import planned_run
from tests.commands.test_kept_runs import KEPT
from tests.hints.command_rows import ALWAYS

SHIPPED = dict(fields.KEYS)  # other tests of this process register names of their own
WORDS = "the plan is data and every worker knows its place in mesh".split()
MEMORY = 10e9  # bytes of the machine, whatever runs these tests
REFUSED = 2  # exit status
# one of what is counted, in the plural; not a value, as in data=1, nor the last of several numbers
ONE_OF_MANY = re.compile(
    r"(?<![\w.,=:-])(?<! or )(?<!, )1 (?:workers|nodes|ranks|GPUs|CPUs|cores|pods|steps|updates|samples|sequences|"
    r"tokens|documents|lines|pairs|labels|sources|files|messages|entries|characters|bytes|stages|chunks|units|layers|heads|"
    r"microbatches|batches|passes|retries)\b"
)


class Accepted(Exception):
    """End of a command that nothing refuses."""


@pytest.fixture(scope="session")
def places(tmp_path_factory) -> dict[str, str]:
    """Paths that rows name, but for `new`: an own copy of a kept run, a text, and a tokenizer that knows its words."""
    folder = tmp_path_factory.mktemp("places")
    shutil.copytree(KEPT[0] / "run", folder / "run")
    lines = (json.dumps({"text": " ".join(WORDS[i % 5 :])}) for i in range(60))
    (folder / "text.jsonl").write_text("\n".join(lines))
    (folder / "ids.jsonl").write_text('{"ids": [1, 2, 3]}\n{"ids": [3, 4]}\n')
    (folder / "pairs.jsonl").write_text('{"source": "the plan", "target": "its data"}\n' * 60)
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<s>", "</s>", *WORDS])}, unk_token="</s>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "run": "run",
        "text": "text.jsonl",
        "ids": "ids.jsonl",
        "pairs": "pairs.jsonl",
        "tokenizer": "tokenizer.json",
    }
    return {name: str(folder / file) for name, file in names.items()}


@pytest.fixture(scope="module")  # Hydra is open in one place at a time: other modules open it too
def composers():
    """`open_composer` with Hydra open already, which is most of what a command takes."""
    composers_by_values: dict[str, Composer] = {}

    @contextmanager
    def again(config_dir, stored=None):
        if config_dir is not None:  # no row has files of its own
            with open_composer(config_dir):
                raise AssertionError(config_dir)
        yield composers_by_values.setdefault(json.dumps(stored), Composer([], stored or {}))

    with open_composer(None), mock.patch.dict(fields.KEYS, SHIPPED):
        yield again


@pytest.fixture
def refused(places, composers, tmp_path, monkeypatch, capsys):
    """`refused(typed)`: the lines of a command that is refused, none if it is accepted."""

    def accept(*arguments, **named):
        raise Accepted

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "open_composer", composers)
    monkeypatch.setattr(planned_run, "open_composer", composers)
    monkeypatch.setattr(tune, "open_composer", composers)
    monkeypatch.setattr(resources, "await_worker_places", accept)
    monkeypatch.setattr(asked_model, "machine_memory", lambda: MEMORY)

    def lines(typed):
        new = tmp_path / f"new{len(os.listdir(tmp_path))}"
        new.mkdir()
        name, *arguments = (_filled(argument, {**places, "new": str(new)}) for argument in typed)
        plain = [re.sub("^[A-Z_]+=", "", argument) for argument in arguments]
        capsys.readouterr()
        try:
            status = ALWAYS[name][0]([f"+{a}" if a.startswith("experiment=") else a for a in plain])
        except Accepted:
            return []
        said = capsys.readouterr().err.splitlines()
        assert status in (0, REFUSED) and not any(map(ONE_OF_MANY.search, said)), said
        return [line.partition(": ")[2] for line in said] if status == REFUSED else []

    return lines


@pytest.fixture
def launch_refused(composers, tmp_path, monkeypatch):
    """`launch_refused(arguments)`: the lines of a run that is refused, none if it is planned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "open_composer", composers)

    def lines(arguments):
        chosen = any(argument.startswith("experiment=") for argument in arguments)
        typed = [f"+{a}" if a.startswith("experiment=") else a for a in arguments]
        typed = typed if chosen else ["+experiment=gpt_quick", *typed]
        try:
            launch._plan_jobs(Namespace(config_dir=None, overrides=typed, multirun=False), PhaseTimes())
        except ConfigError as error:
            assert not any(map(ONE_OF_MANY.search, error.violations)), error.violations
            return error.violations
        return []

    return lines


def _filled(argument: str, places: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: places.get(match[1], match[0]), argument)


def typed_of(row: str) -> list[str]:
    """Return the arguments of a row, first those that its command always has."""
    name, *own = row.split()
    named = {_key(argument): argument for argument in own if "=" in argument}
    always = ALWAYS[name][1].split()
    places = [named.pop(_key(a), a) if _key(a).isupper() else a for a in always]  # in their order
    return [name, *(a for a in places if _key(a) not in named), *(a for a in own if a not in places)]


def _key(argument: str) -> str:
    return argument.lstrip("+").partition("=")[0]
