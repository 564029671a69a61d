"""Command line for answers: `python -m platform.generate CHECKPOINT "prompt" [KEY=VALUE ...]`.

CHECKPOINT is the directory of a run, a storage of checkpoints (its newest), one checkpoint, or a folder that
transformers saved. KEY=VALUE are as for platform.launch: under which plan and on which workers it is computed;
without any, in one process. A prompt is continued until the tokenizer's end of text.
Exit status: 0 done; 1 a worker failed; 2 the command line, the checkpoint or a prompt is wrong, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from platform.boundary.refusals import (
    NEAREST,
    CommandLine,
    ConfigError,
    command_line,
    in_words,
    refuse_all,
    rephrasing,
    run_command,
    violation,
)
from platform.boundary.terminal import phase, print_line, printable, write_text
from platform.config.fields import Config, Model
from platform.config.groups import Data

if TYPE_CHECKING:
    from platform.cluster.session import TrainedModel
    from platform.data.tokenizer import Vocabulary
    from platform.plan.plan import Plan

TOKENS = 64  # of an answer, where nothing else is said and they fit
AT_ONCE = 8  # sequences of a replica in a pass that measures a loss, if the layout's axes divide them
OVERRIDE = re.compile(r"[+~]{0,2}([a-z_]+)([./][\w./-]+)*(@[\w.]+)?=.*", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.generate`; return its exit status."""
    return answered(_parser(), _generate, arguments)


def _parser() -> CommandLine:
    """Return the parser of the command line `python -m platform.generate`."""
    parser = command_line("generate", __doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("words", nargs="*", metavar="PROMPT | KEY=VALUE")
    parser.add_argument("--prompts", metavar="FILE", help="a prompt per line; .jsonl: one of prompt, messages and ids")
    parser.add_argument(
        "--out", metavar="FILE", help="write answers to it, a line of .jsonl each; else they are printed"
    )
    parser.add_argument("--tokens", type=int, help=f"the most of an answer (as many as fit, up to {TOKENS})")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): the likeliest token each time")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest; 0 (default): all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw among the fewest that are so likely together (1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--beams", type=int, default=1, help="texts that a beam search keeps; 1 (default): no search")
    parser.add_argument("--length-penalty", type=float, default=1.0, help="beams: log-probability / length^this (1)")
    parser.add_argument("--batch", type=int, default=16, help="prompts at a time (16)")
    parser.add_argument("--chat", action="store_true", help="a prompt is a user's message, in the tokenizer's template")
    parser.add_argument("--bare", action="store_true", help="do not put in front of a prompt what begins a document")
    parser.add_argument("--config-dir", metavar="FOLDER", help="your own configuration files, as for platform.launch")
    return parser


def answered(parser: CommandLine, run: Callable[[argparse.Namespace], int], arguments: Sequence[str] | None) -> int:
    """Run a command that asks a trained model, such as generate or evaluate; return its exit status."""
    from platform.cluster.crew.failures import NoPlaces, WorkerFailed

    return run_command(parser, run, arguments, failures=(WorkerFailed, NoPlaces, OSError))


def sorted_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a generate command line into its KEY=VALUE arguments and the others, which are prompts; a text
    with an equals sign is no KEY=VALUE unless it begins with a key or group of the configuration."""
    from platform.config.composition import CONF

    known = {*Config.__dataclass_fields__, *(path.name for path in CONF.iterdir())}
    mine = [bool(found := OVERRIDE.fullmatch(word)) and found[1] in known for word in words]  # type: ignore[index]
    pairs = list(zip(words, mine, strict=True))
    return [word for word, is_key in pairs if is_key], [word for word, is_key in pairs if not is_key]


def _generate(given: argparse.Namespace) -> int:
    """Continue the prompts of a command line by a trained model, and print the texts; return the exit status."""
    overrides, words = sorted_words(given.words)
    refuse_all(_violations_of_words(given, words))
    with phase("importing torch"):
        from platform.cluster.answer_scores import Lines
        from platform.cluster.asked_model import (
            AskedModel,
            Prompt,
            Reader,
            ends_of,
            read_prompts,
            room,
            too_long,
            violations_of_memory,
        )
        from platform.cluster.session import find_trained, open_session
    from platform.train.replies import Choice

    prompts = read_prompts(given.prompts) if given.prompts else [Prompt({"prompt": w}, repr(w)) for w in words]
    trained = find_trained(given.checkpoint)
    planned = plan_answers(trained, overrides, given.config_dir)
    model, vocabulary = planned.config.model, planned.vocabulary
    reader = Reader(model, vocabulary, given.chat, given.bare)
    rows = _all(reader.ids, prompts)
    tokens = min(TOKENS, room(rows, model)) if given.tokens is None else given.tokens
    longest = tokens + (max(map(len, rows)) if model.kind != "encoder_decoder" else 1)
    needed = min(given.batch, len(rows)), longest, given.beams
    refuse_all(too_long(prompts, rows, model, tokens))
    refuse_all(violations_of_memory(planned.config, planned.plan, *needed))
    drawn = given.temperature, given.top_k, given.top_p, given.seed
    how = Choice(vocabulary.size if vocabulary else model.vocab, *drawn, given.beams, given.length_penalty)
    with ExitStack() as opened:
        out = opened.enter_context(Lines(given.out, "--out")) if given.out else None
        crew = opened.enter_context(open_session(planned.config, planned.plan, note))
        asked = AskedModel(crew.call, model, vocabulary, given.batch)
        for number, found in asked.write(rows, tokens, how, ends_of(vocabulary, trained.generation)):
            text = _shown(vocabulary, [] if asked.pairs else rows[number], found.ids)
            _print_answer(out, prompts[number].given, text, found, alone=len(rows) == 1)
    return 0


@dataclass(frozen=True)
class PlannedAnswers:
    """Configuration and plan under which a model answers, and its vocabulary, None if it has no tokenizer."""

    config: Config
    plan: Plan
    vocabulary: Vocabulary | None


def plan_answers(
    found: TrainedModel,
    arguments: Sequence[str],
    config_dir: str | None = None,
    data: Data | None = None,
    change: Callable[[Config], None] = lambda config: None,
) -> PlannedAnswers:
    """Compose the configuration of a trained model with the user's `arguments` on top, and plan it: without any, one
    process computes everything. `data`: data that it reads, by default none; `change`: completes the configuration in
    place. Raises ConfigError with all mistakes."""
    from platform.config.arguments import typed_values
    from platform.data.tokenizer import given_vocabulary
    from platform.launch import compose, prepare
    from platform.weights.model_folder import check_tokenizer, vocabulary_in

    typed = typed_values(arguments)
    model = replace(found.model, within_documents=False)  # of texts that are continued, and else what the data says
    stored = Config(model=model, data=data or replace(Data(), kind="synthetic"), seed=found.seed)
    stored.train.init, stored.cluster.kind = found.url, "inline"
    stored.elastic.snapshot_every = 0
    stored.checkpoint.on_stop = False
    with rephrasing(lambda line: _of_trained(line, model)):
        config = compose(arguments, config_dir, stored=asdict(stored))
    replicas = max(1, config.parallel.data)
    if "train.microbatch" not in typed:  # as many sequences as any layout may divide
        unit = prod([*config.tensor.axes.values(), *config.branch.axes.values()])
        config.train.microbatch = unit * max(1, AT_ONCE // unit)
    if "train.global_batch" not in typed:
        config.train.global_batch = config.train.microbatch * replicas
    change(config)
    plan, wrong = prepare(config, [])
    if wrong or not plan:
        raise ConfigError([_of_trained(line, model) for line in wrong])
    if config.cluster.kind == "inline" and plan.mesh.size > 1 and not typed.keys() & {"cluster", "cluster.kind"}:
        config.cluster.kind = "processes"
    typed_one = given_vocabulary(config.data) if "data.tokenizer" in typed else None
    check_tokenizer(config.data, typed_one, found.url, found.files)
    given = typed_one or vocabulary_in(found.files)
    if given and given.size > config.model.vocab:
        reason = f"has {given.size} tokens, and the model has model.vocab={config.model.vocab}: it is another model's"
        raise ConfigError(violation("data.tokenizer", config.data.tokenizer or found.url, reason))
    return PlannedAnswers(config, plan, given)


def _of_trained(line: str, model: Model) -> str:
    """Return a refusal line whose hints do not change the trained model: they name its own values, and other keys."""
    refusal, legal, hint = line.partition(NEAREST)
    key = refusal.partition("=")[0].removeprefix("model.")
    items = [item for item in re.split(", or |, ", hint) if not item.startswith("model.")]
    if refusal.startswith("model.") and key in vars(model) and any("=" not in item for item in items):
        items = [in_words(getattr(model, key)), *(item for item in items if "=" in item)]
    return refusal + (f"{legal}{', or '.join(items)}" if legal and items else "")


def _all(task: Callable[[Any], Any], things: Sequence[Any]) -> list[Any]:
    """Apply `task` to each prompt or other thing of a command, and return the results. Raises ConfigError with the
    mistakes of all."""
    found, wrong = [], []
    for thing in things:
        try:
            found.append(task(thing))
        except ConfigError as error:
            wrong += error.violations
    refuse_all(wrong)
    return found


def _violations_of_words(given: argparse.Namespace, words: Sequence[str]) -> Iterator[str]:
    """Yield a refusal line per mistake in the flags of a generate command line, whose prompts are `words`."""
    if bool(words) == bool(given.prompts):
        yield 'a prompt is needed: "TEXT" or --prompts FILE, one of them'
    if not (given.temperature >= 0 and math.isfinite(given.temperature)):
        yield violation("--temperature", given.temperature, "must be >= 0", [0])
    if not 0 < given.top_p <= 1:
        yield violation("--top-p", given.top_p, "must be > 0 and <= 1", [1])
    if not -10 <= given.length_penalty <= 10:  # a length to such a power is a number
        yield violation("--length-penalty", given.length_penalty, "must be >= -10 and <= 10", [1])
    if given.tokens is not None and given.tokens < 1:
        yield violation("--tokens", given.tokens, "must be >= 1", [1])
    for flag, least in (("top_k", 0), ("seed", 0), ("beams", 1), ("batch", 1)):
        value, most = getattr(given, flag), 1 << 53
        if not least <= value <= most:
            constraint, nearest = f"must be >= {least} and <= {most}", max(least, min(value, most))
            yield violation(f"--{flag.replace('_', '-')}", value, constraint, [nearest])
    if given.beams > 1 and given.temperature > 0:
        yield violation("--beams", given.beams, "a search draws nothing: --temperature=0", [1])
    if given.out and os.path.exists(given.out):
        yield violation("--out", given.out, "there is a file already", ["another name"])
    elif given.out and not os.path.isdir(os.path.dirname(given.out) or "."):
        yield violation("--out", given.out, "there is no such folder")


def _shown(vocabulary: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of the token ids generated after the ids `before`: the first token may differ there."""
    if vocabulary is None:
        return " ".join(map(str, ids))
    start, whole = vocabulary.decode(before), vocabulary.decode([*before, *ids])
    return whole[len(start) :] if whole.startswith(start) else vocabulary.decode(ids)


def _print_answer(out: Any, given: Any, text: str, found: Any, *, alone: bool) -> None:
    """Write a generated text to the file `out`, as a line of JSON with its prompt `given`, or print it."""
    if out:
        more = {} if found.log_probability is None else {"log_probability": found.log_probability}
        out.add(json.dumps({**given, "answer": text, "answer_ids": found.ids, "ended": found.ended, **more}))
        return
    if not alone:
        prompt = next((str(given[k]) for k in ("prompt", "messages", "ids") if k in given), "")
        print_line(f"> {printable(prompt[:100])}")
    print_line(text) if sys.stdout.isatty() else write_text(sys.stdout, f"{text}\n")


def note(line: str) -> None:
    """Print to stderr a line of the generate command that is no generated text."""
    print_line(line, sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
