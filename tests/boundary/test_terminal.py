"""What a command does with its terminal, and at its end."""

import io
import re
import subprocess
import sys
from pathlib import Path

from platform.boundary import terminal
from platform.boundary.refusals import ConfigError
from platform.boundary.terminal import print_line, print_refusals


def test_a_quick_exit_does_what_is_registered_and_frees_nothing():
    code = """
import atexit, sys
from platform.boundary.terminal import QuickExit
class Loud:
    def __del__(self):
        print("freed")
at_exit, kept = QuickExit(), Loud()
atexit.register(print, "registered")
at_exit.status = STATUS
print("printed", end=" ")
sys.exit(3)
"""
    for status, shown in ((7, "printed registered\n"), (None, "printed registered\nfreed\n")):
        line = [sys.executable, "-c", code.replace("STATUS", str(status))]
        done = subprocess.run(line, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (3 if status is None else status, shown), done.stderr


HOSTILE = "a\x1b[31m\x07b\r\x9b2J\u202e\u2028\ud800"


def test_what_a_terminal_may_have(capsys):
    """Line ends and tabs stay between our own lines, and a refusal is one line, whatever is in it."""
    print_line(f"one {HOSTILE}\n\ttwo")
    print_refusals("config", [ConfigError([f"a: {HOSTILE}", "b\nc\u2028d"]), "e\r\nf"])
    out, err = capsys.readouterr()
    assert out.endswith("\n\ttwo\n") and out.replace("\n", "").replace("\t", "").isprintable()
    assert err.splitlines() == [r"config: a: a\x1b[31m\x07b \x9b2J\u202e \ud800 b c d", "config: e f"]


def test_a_character_that_the_terminal_lacks_does_not_lose_the_line():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_line("caf\xe9", stream)
    assert raw.getvalue() == b"caf\\xe9\n"


def test_nothing_is_printed_past_what_a_terminal_may_have():
    """Every print() of the package shows JSON, text of our own, or what went through `escape_terminal_text`."""
    own = ("json.dumps(", "escape_terminal_text(", "refusal_line(", '"without a tokenizer', "render_page()",
           "render_summary()", "_CLEAR", "text if arguments.json else escape_terminal_text(",
           "OmegaConf.to_yaml", '"\\n".join([*list_option_rows', "text, end", "text, flush=True)")  # fmt: skip
    root = Path(terminal.__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        if path.name != "api.py":
            for match in re.finditer(r"^[ \t]+print\(\s*(.*)", path.read_text(), re.MULTILINE):
                assert match[1].startswith(own), f"{path.relative_to(root)}: {match[0].strip()}"
