"""The walks of docs/walks.md: the page shows the files through which a traced run hands a value on, in order."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from platform.data.tokenizer import train_tokenizer
from platform.generate import main as generate
from platform.launch import main as launch
from tests.conftest import ROOT
from tests.data.tokenizers.texts import sources
from tests.house import trace
from tests.weights.written import written

PAGE = (ROOT / "docs" / "walks.md").read_text()
LONGEST = 12  # files
LONGER: dict[str, int] = {"A sample, from file to metrics": 14}  # walks that are longer still, and may only shrink
# A walk that goes on where a value is read that was kept as data: the entry of an operation in the plan. The driver has
# made the plan, a rank reads it; it has made the same one by the same function, else `Worker.join_mesh` fails.
FROM_DATA = {
    "A layout, from YAML to the collective": [
        "platform/plan/operations/lookup.py:LookupOp.run_on_blocks",
        "platform/runtime/process_groups.py:ProcessGroups._start_collective",
    ]
}
TYPED = "platform/config/composition.py:Composer.compose_arguments"
POINTS = {  # walk -> the calls that it leads through
    "A layout, from YAML to the collective": [TYPED, "platform/plan/rule.py:contract_layouts"],
    "A sample, from file to metrics": [
        "platform/data/objectives.py:Causal.batch",
        "platform/train/step_report.py:Combiner.combine_reports",
        "platform/cluster/control/evaluations.py:build_metrics_row",
        "platform/monitor/metrics.py:MetricsLog.write_row",
    ],
    "A failure, from SIGKILL to the next step": [
        "platform/cluster/crew/failures.py:WorkerFailed.__init__",
        "platform/train/state_recovery.py:find_source",
        "platform/train/worker.py:Worker.recover_state",
        "platform/train/trainer.py:Trainer.step",
    ],
    "A typed key, to the update": [TYPED, "platform/optimizer/learning_rate.py:learning_rate"],
    "A prompt, to the first token": [
        "platform/cluster/asked_model.py:Reader.encode_prompt",
        "platform/plan/operations/attention.py:RememberOp.run_on_blocks",
        "platform/train/generator.py:choose_tokens",
    ],
    "`model=from_hf`, to weights on ranks": [
        "platform/weights/importing.py:complete_model",
        "platform/weights/importing.py:open_importable",
        "platform/weights/model_folder.py:SavedModel.fetch_pieces",
    ],
}


def pages_walks() -> dict[str, list[tuple[str, str]]]:
    """Return the walks of the page: title -> (file, a name in it, "" for none) per hop."""
    parts = re.split(r"^\*\*(.+?)\.\*\*.*$", PAGE, flags=re.M)[1:]
    hop = re.compile(r"^\d+\. `(platform/[\w/]+\.py)`(?: `([\w.]+)`)?", re.M)
    return {title: hop.findall(text) for title, text in zip(parts[::2], parts[1::2], strict=True)}


def defined(path: str) -> set[str]:
    """Return the functions, classes and `Class.method`s of a file."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {node.name} | {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def model_in(folder: Path) -> Path:
    """Write a small Llama with its tokenizer, as transformers does."""
    written(folder, "llama", ours={"vocab": 320})
    made = Tokenizer.from_str(train_tokenizer(sources(0, 2), 318).to_str())
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    return folder


@pytest.fixture(scope="module")
def moments(tmp_path_factory) -> list[trace.Moment]:
    """The moments of a run of two workers, of which one is killed in step 2, and of a prompt that is continued."""
    folder = tmp_path_factory.mktemp("walks")
    model, notes, text = model_in(folder / "hf"), folder / "notes", folder / "text.txt"
    notes.mkdir()
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    points = {trace.CREW, *(point for walk in (*POINTS.values(), *FROM_DATA.values()) for point in walk)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(trace.POINTS, " ".join(points))
        patch.setenv(trace.FOLDER, str(notes))
        with trace.Tracer(points, notes):
            assert launch([
                "+experiment=gpt_quick", "extend=[tests.house.trace]", "model=from_hf", f"model.source={model}",
                "cluster=processes", "cluster.device=cpu", "tensor=1d", "tensor.axes.t=2", "parallel.data=1",
                "data=text", f"data.path={text}", f"data.cache={folder}/cache", "train.steps=3", "train.global_batch=2",
                "train.microbatch=2", "eval.every=0", "monitor.sample=0", "elastic.faults=[2:kill:1]",
                "elastic.min_workers=1", "elastic.spares=0", f"run.dir={folder}/run",
            ]) == 0  # fmt: skip
            assert generate([str(model), "the quick", "--tokens", "1"]) == 0
    return trace.moments_in(notes)


@pytest.mark.full  # it starts a run, which takes 20 seconds
@pytest.mark.parametrize("walk", POINTS)
def test_the_page_shows_the_walk_that_a_run_takes(walk, moments):
    legs = [POINTS[walk], FROM_DATA[walk]] if walk in FROM_DATA else [POINTS[walk]]
    found = list(dict.fromkeys(file for points in legs for file in trace.hops(points, moments)))
    print(f"{walk}: {len(found)} files\n  " + "\n  ".join(found), file=sys.stderr)
    assert [file for file, _ in pages_walks()[walk]] == found


def test_the_page_has_these_walks_and_none_becomes_longer():
    walks = pages_walks()
    assert list(walks) == list(POINTS)
    assert {title for title, walk in walks.items() if len(walk) > LONGER.get(title, LONGEST)} == set()
    assert all(len(walks[title]) == count > LONGEST for title, count in LONGER.items())


@pytest.mark.parametrize(("path", "name"), sorted({hop for walk in pages_walks().values() for hop in walk}))
def test_a_hop_is_there(path, name):
    assert (ROOT / path).exists()
    assert not name or name in defined(path)
