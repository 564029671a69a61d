"""Code of the user's own that exits, raises what is no Exception, or registers what is none: no command ends as if it
had worked."""

import importlib
import sys

import pytest

from tests.harness.commands import in_this_process

RUN = (
    "+experiment=gpt_quick cluster=inline tensor=serial parallel.data=1 model.layers=1 model.d_model=16 model.heads=2 "
    "model.length=8 model.vocab=300 train.steps=2 train.global_batch=2 train.microbatch=2 eval.every=0 "
    "monitor.sample=0 optimizer.warmup_steps=0 data=text data.path=a.txt data.validation=0 data.cache=cache run.dir=run"
).split()
LEAVE = {
    "exit": "import sys; sys.exit(0)",
    "exit with a word": "raise SystemExit('bye')",
    "at once": "import os; os._exit(0)",
    "at once, by a name of its own": "from os import _exit; _exit(0)",
    "generator": "raise GeneratorExit",
    "base": "raise type('Odd', (BaseException,), {})('odd')",
    "unprintable": "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})",
    "interrupt": "raise KeyboardInterrupt",
}
CALLED = {  # what calls leave()
    "data.kind=own_texts": "register_documents('own_texts', lambda data: leave())",
    "data.kind=own_rows": "register_documents('own_rows', lambda data: (leave() for _ in range(3)))",
    "data.kind=own_files": "register_source('own_files', lambda data: leave())",
    "train.loss=own_loss": "register_loss('own_loss', lambda of: leave())",
    "data.objective=own_goal": "register_objective('own_goal', lambda shape: leave())",
    "data.objective=own_samples": "register_objective('own_samples', Own)",
    "pipeline.kind=own_rows": "register_pipeline('own_rows', lambda *numbers: leave())",
    "model.kind=own_model": "register_model('own_model', lambda config: leave())",
    "optimizer.schedule=own_rate": "register_schedule('own_rate', lambda *numbers: leave())",
}
OWN = """
from platform.api import *
from platform.data.objectives import Causal
def leave():
    {leave}
class Own(Causal):
    def __init__(self, shape):
        super().__init__(shape.length, shape.special)
    def batch(self, stream, index, keys):
        leave()
        return super().batch(stream, index, keys)
    def predicted(self, stream, index):
        return len(index) * self.length
{register}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("".join(f"{i} sheep and {i + 1} wolves\n" for i in range(200)))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def ended(place, module, *arguments):
    """What a command with a module of one's own ends with: its status, and what it says."""
    (place / "leaving.py").write_text(module)
    sys.modules.pop("leaving", None)
    importlib.invalidate_caches()
    done = in_this_process(*RUN, "extend=[leaving]", *arguments, cwd=place)
    return done.returncode, done.stderr


@pytest.mark.parametrize("how", LEAVE)
def test_a_module_that_leaves_is_refused(place, how):
    status, said = ended(place, LEAVE[how])
    assert status == 2 and "config: extend=leaving: cannot be imported (" in said and "Traceback" not in said, said
    assert not (place / "run").exists()


@pytest.mark.parametrize("leave", ["raise SystemExit(0)", "import os; os._exit(0)"])
@pytest.mark.parametrize("key", CALLED)
def test_no_function_that_exits_ends_a_run_well(place, key, leave):
    """`os._exit` ended the command itself, with status 0, no word and nothing trained."""
    module = OWN.format(leave=leave, register=CALLED[key])
    status, said = ended(place, module, key, *(["pipeline.stages=2"] if "pipeline" in key else []))
    assert status == (1 if "schedule" in key else 2) and "SystemExit" in said, said  # a rate is asked for in a step


DECLARED = {
    "key(5, 'x', 'foo')": "'foo' are no bounds",
    "key(5, 'x', '>= abc')": "'>= abc' are no bounds",
    "key(5, 'x', '=> 3')": "'=> 3' are no bounds",
    "key(5, 'x', '>= 3 or < 1')": "are no bounds",
    "key(5, 'x', [1, 2])": "[1, 2] are no bounds",
    "key('a', 'x', pattern='(')": "pattern='(': missing )",
    "key('a', 'x', pattern=5)": "pattern=5: ",
    "key(5, 'x', least=3)": "unexpected keyword argument 'least'",
}


@pytest.mark.parametrize("call", DECLARED)
def test_a_setting_that_is_declared_wrong_is_one_line_with_its_place(place, call):
    """It was a traceback, of the first value that was compared with it."""
    status, said = ended(place, f"from platform.api import key\nclass Settings:\n    a: int = {call}\n")
    assert status == 2 and "config: extend=leaving: cannot be imported (" in said and "Traceback" not in said, said
    assert DECLARED[call] in said and ", at leaving.py:3)" in said, said


WRONG = {
    "register_documents('text', len)": "data.kind=text: is built in; register another name",
    "register_source('stdlib', len)": "data.kind=stdlib: is built in",
    "register_documents(5, None)": "data.kind=5: no name to register",
    "register_documents('own', None)": "data.kind=own: is registered with a NoneType",
    "register_source('a b', len)": "data.kind=a b: no name to register",
    "register_objective('causal', len)": "data.objective=causal: is built in",
    "register_objective('own', len, 'decoder')": "which is no list of kinds of models",
    "register_objective('own', 7)": "data.objective=own: is registered with a int",
    "register_loss('cross_entropy', len)": "train.loss=cross_entropy: is built in",
    "register_model('decoder', len)": "model.kind=decoder: is built in",
    "register_model('', len)": "model.kind=: no name to register",
    "register_optimizer('adamw', len, 1)": "optimizer.kind=adamw: is built in",
    "register_optimizer('own', 'adam', 1)": "optimizer.kind=own: is registered with a str",
    "register_schedule('cosine', len)": "optimizer.schedule=cosine: is built in",
    "register_pipeline('1f1b', len)": "pipeline.kind=1f1b: is built in",
    "register_pipeline('own', [])": "pipeline.kind=own: is registered with a list",
}


@pytest.mark.parametrize("call", WRONG)
def test_what_cannot_be_registered_is_refused(place, call):
    status, said = ended(place, f"from platform.api import *\n{call}\n")
    assert status == 2 and "config: extend=leaving: cannot be imported (ConfigError: " in said, said
    assert WRONG[call] in said
