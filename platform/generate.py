"""Command line for answers: `python -m platform.generate CHECKPOINT "prompt" [KEY=VALUE ...]`.

CHECKPOINT is the directory of a run, a storage of checkpoints (its newest), one checkpoint, or a folder that
transformers saved. KEY=VALUE are as for platform.launch: under which plan and on which workers it is computed;
without any, in one process. A prompt is continued until the tokenizer's end of text.
Exit status: 0 done; 1 a worker failed; 2 the command line, the checkpoint or a prompt is wrong, and nothing is written.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from platform.boundary import refusals
from platform.boundary.refusals import NEAREST, CommandLine, ConfigError, format_violation, refuse_all, run_command
from platform.boundary.terminal import escape_unprintable, print_line, show_phase, write_text
from platform.config.fields import Config, Model
from platform.config.groups import Data

if TYPE_CHECKING:
    from platform.cluster.asked_model import AskedModel
    from platform.cluster.session import TrainedModel
    from platform.data.tokenizer import Vocabulary
    from platform.plan.plan import Plan

TOKENS = 64  # of an answer, where nothing else is said and they fit
AT_ONCE = 8  # sequences of a replica in a pass that measures a loss, if the layout's axes divide them
OVERRIDE = re.compile(r"[+~]{0,2}([a-z_]+)([./][\w./-]+)*(@[\w.]+)?=.*", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.generate`; return its exit status."""
    return run_model_command(_build_parser(), _generate_answers, arguments)


def _build_parser() -> CommandLine:
    """Return the parser of the command line `python -m platform.generate`."""
    parser = refusals.build_command_line("generate", __doc__)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT")
    add("words", nargs="*", metavar="PROMPT | KEY=VALUE")
    add("--prompts", metavar="FILE", help="a prompt per line; .jsonl: one of prompt, messages and ids")
    add("--out", metavar="FILE", help="write answers to it, a line of .jsonl each; else they are printed")
    add("--tokens", type=int, help=f"the most of an answer (as many as fit, up to {TOKENS})")
    add("--temperature", type=float, default=0.0, help="0 (default): the likeliest token each time")
    add("--top-k", type=int, default=0, help="draw among the k likeliest; 0 (default): all")
    add("--top-p", type=float, default=1.0, help="draw among the fewest that are so likely together (1)")
    add("--seed", type=int, default=0, help="of the draws (0)")
    add("--beams", type=int, default=1, help="texts that a beam search keeps; 1 (default): no search")
    add("--length-penalty", type=float, default=1.0, help="beams: log-probability / length^this (1)")
    add("--batch", type=int, default=16, help="prompts at a time (16)")
    add("--chat", action="store_true", help="a prompt is a user's message, in the tokenizer's template")
    add("--bare", action="store_true", help="do not put in front of a prompt what begins a document")
    add("--config-dir", metavar="FOLDER", help="your own configuration files, as for platform.launch")
    return parser


def run_model_command(parser: CommandLine, run: Callable[[Namespace], int], arguments: Sequence[str] | None) -> int:
    """Run the command `platform.generate`, or another that asks a trained model; return its exit status."""
    from platform.cluster.crew.failures import NoPlaces, WorkerFailed

    return run_command(parser, run, arguments, failures=(WorkerFailed, NoPlaces, OSError))


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a generate command line into its KEY=VALUE arguments and the others, which are prompts; a text
    with an equals sign is no KEY=VALUE unless it begins with a key or group of the configuration."""
    from platform.config.composition import CONF

    known = {*Config.__dataclass_fields__, *(path.name for path in CONF.iterdir())}
    overrides = [word for word in words if (key_match := OVERRIDE.fullmatch(word)) and key_match[1] in known]
    return overrides, [word for word in words if word not in overrides]


def _generate_answers(arguments: Namespace) -> int:
    """Continue the prompts of a command line by a trained model, and print the texts; return the exit status."""
    overrides, words = split_words(arguments.words)
    refuse_all(_violations_of_prompt_options(arguments, words))
    with show_phase("importing torch"):
        from platform.cluster import asked_model, session
        from platform.cluster.answer_scores import Lines
    from platform.train.replies import Choice

    prompts = [asked_model.Prompt({"prompt": word}, repr(word)) for word in words]
    prompts = asked_model.read_prompts(arguments.prompts) if arguments.prompts else prompts
    trained = session.find_trained_model(arguments.checkpoint)
    planned = plan_answers(trained, overrides, arguments.config_dir)
    model, vocabulary = planned.config.model, planned.vocabulary
    rows = asked_model.PromptReader(model, vocabulary, arguments.chat, arguments.bare).encode_prompts(prompts)
    room = asked_model.answer_room(rows, model)
    tokens = min(TOKENS, room) if arguments.tokens is None else arguments.tokens
    longest = tokens + (max(map(len, rows)) if model.kind != "encoder_decoder" else 1)
    needed = min(arguments.batch, len(rows)), longest, arguments.beams
    refuse_all(asked_model.violations_of_length(prompts, rows, model, tokens))
    refuse_all(asked_model.violations_of_memory(planned.config, planned.plan, *needed))
    drawn = arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed
    rule = Choice(vocabulary.size if vocabulary else model.vocab, *drawn, arguments.beams, arguments.length_penalty)
    with ExitStack() as opened:
        out = opened.enter_context(Lines(arguments.out, "--out")) if arguments.out else None
        asked = opened.enter_context(planned.open_model(arguments.batch))
        ends = asked_model.find_end_ids(vocabulary, trained.generation_config)
        for number, answer in asked.continue_prompts(rows, tokens, rule, ends):
            text = _decode_answer(vocabulary, [] if asked.pairs else rows[number], answer.ids)
            _print_answer(out, prompts[number].fields, text, answer, alone=len(rows) == 1)
    return 0


@dataclass(frozen=True)
class PlannedAnswers:
    """Configuration and plan under which a model answers, and its vocabulary, None if it has no tokenizer."""

    config: Config
    plan: Plan
    vocabulary: Vocabulary | None

    @contextmanager
    def open_model(self, batch: int = 16, *, corpus: str = "", writes: bool = True) -> Iterator[AskedModel]:
        """Open the model that a command asks, for `batch` texts at a time; `corpus`, `writes` as in `open_session`."""
        from platform.cluster.asked_model import AskedModel
        from platform.cluster.session import open_session

        with open_session(self.config, self.plan, print_note, corpus=corpus, generates_texts=writes) as crew:
            yield AskedModel(crew.call_ranks, self.config.model, self.vocabulary, batch)


def plan_answers(
    trained: TrainedModel,
    arguments: Sequence[str],
    config_dir: str | None = None,
    data: Data | None = None,
    change: Callable[[Config], None] = lambda config: None,
) -> PlannedAnswers:
    """Compose, for `platform.generate` or `platform.evaluate`, the configuration of a trained model with the command's
    `arguments` on top, and plan it: without any, one process computes everything. `data`: data that it reads, by
    default none; `change`: completes the configuration in place. Raises ConfigError with all mistakes."""
    from platform.config.arguments import parse_typed_values
    from platform.data.tokenizer import load_named_vocabulary
    from platform.launch import compose_config, prepare_plan
    from platform.weights.model_folder import build_vocabulary_if_readable, check_tokenizer

    typed = parse_typed_values(arguments)
    # of texts that are continued, and else what the data says; modules of multi-token prediction write none
    model = replace(trained.model, within_documents=False, predict_ahead=0)
    stored = Config(model=model, data=data or replace(Data(), kind="synthetic"), seed=trained.seed)
    stored.train.init, stored.cluster.kind = trained.url, "inline"
    stored.elastic.snapshot_every = 0
    stored.checkpoint.on_stop = stored.checkpoint.last = False
    with refusals.rephrase_refusals(lambda line: _fit_refusal_to_model(line, model)):
        config = compose_config(arguments, config_dir, stored=asdict(stored))
    replicas = max(1, config.parallel.data)
    if "train.microbatch" not in typed:  # as many sequences as any layout may divide
        unit = prod([*config.tensor.axes.values(), *config.branch.axes.values()])
        config.train.microbatch = unit * max(1, AT_ONCE // unit)
    if "train.global_batch" not in typed:
        config.train.global_batch = config.train.microbatch * replicas
    change(config)
    plan, mistakes = prepare_plan(config, [])
    if mistakes or not plan:
        raise ConfigError([_fit_refusal_to_model(line, model) for line in mistakes])
    if config.cluster.kind == "inline" and plan.mesh.world_size > 1 and not typed.keys() & {"cluster", "cluster.kind"}:
        config.cluster.kind = "processes"
    typed_one = load_named_vocabulary(config.data) if "data.tokenizer" in typed else None
    check_tokenizer(config.data, typed_one, trained.url, trained.files)
    vocabulary = typed_one or build_vocabulary_if_readable(trained.files)
    if vocabulary and vocabulary.size > (known := config.model.vocab):
        reason = f"has {vocabulary.size} tokens, and the model has model.vocab={known}: it is another model's"
        raise ConfigError("data.tokenizer", config.data.tokenizer or trained.url, reason)
    return PlannedAnswers(config, plan, vocabulary)


def _fit_refusal_to_model(line: str, model: Model) -> str:
    """Return a generate command's refusal with hints that keep the trained model: its own values, and other keys."""
    refusal, legal, hint = line.partition(NEAREST)
    key = refusal.partition("=")[0].removeprefix("model.")
    items = [item for item in re.split(", or |, ", hint) if not item.startswith("model.")]
    if refusal.startswith("model.") and key in vars(model) and any("=" not in item for item in items):
        items = [refusals.format_value(getattr(model, key)), *(item for item in items if "=" in item)]
    return refusal + (f"{legal}{', or '.join(items)}" if legal and items else "")


def _violations_of_prompt_options(arguments: Namespace, words: Sequence[str]) -> Iterator[str]:
    """Yield a refusal line per mistake in the flags of a generate command line, whose prompts are `words`."""
    if bool(words) == bool(arguments.prompts):
        yield 'a prompt is needed: "TEXT" or --prompts FILE, one of them'
    if not (arguments.temperature >= 0 and math.isfinite(arguments.temperature)):
        yield format_violation("--temperature", arguments.temperature, "must be >= 0", [0])
    if not 0 < arguments.top_p <= 1:
        yield format_violation("--top-p", arguments.top_p, "must be > 0 and <= 1", [1])
    if not -10 <= arguments.length_penalty <= 10:  # a length to such a power is a number
        yield format_violation("--length-penalty", arguments.length_penalty, "must be >= -10 and <= 10", [1])
    if arguments.tokens is not None and arguments.tokens < 1:
        yield format_violation("--tokens", arguments.tokens, "must be >= 1", [1])
    for flag, least in (("top_k", 0), ("seed", 0), ("beams", 1), ("batch", 1)):
        value, most = getattr(arguments, flag), 1 << 53
        if not least <= value <= most:
            constraint, nearest = f"must be >= {least} and <= {most}", max(least, min(value, most))
            yield format_violation(f"--{flag.replace('_', '-')}", value, constraint, [nearest])
    if arguments.beams > 1 and arguments.temperature > 0:
        yield format_violation("--beams", arguments.beams, "a search draws nothing: --temperature=0", [1])
    if arguments.out and os.path.exists(arguments.out):
        yield format_violation("--out", arguments.out, "there is a file already", ["another name"])
    elif arguments.out and not os.path.isdir(os.path.dirname(arguments.out) or "."):
        yield format_violation("--out", arguments.out, "there is no such folder")


def _decode_answer(vocabulary: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that `platform.generate` shows of `ids`, generated after `before`: the first may differ there."""
    if vocabulary is None:
        return " ".join(map(str, ids))
    start, whole_text = vocabulary.decode(before), vocabulary.decode([*before, *ids])
    return whole_text[len(start) :] if whole_text.startswith(start) else vocabulary.decode(ids)


def _print_answer(out: Any, prompt_values: Any, text: str, answer: Any, *, alone: bool) -> None:
    """Write a generated text to the file `out`, as a line of JSON with its prompt `prompt_values`, or print it."""
    if out:
        more = {} if answer.log_probability is None else {"log_probability": answer.log_probability}
        answer_values = {"answer": text, "answer_ids": answer.ids, "ended": answer.ended, **more}
        out.append_line(json.dumps({**prompt_values, **answer_values}))
        return
    if not alone:
        prompt = next((str(prompt_values[k]) for k in ("prompt", "messages", "ids") if k in prompt_values), "")
        print_line(f"> {escape_unprintable(prompt[:100])}")
    print_line(text) if sys.stdout.isatty() else write_text(sys.stdout, f"{text}\n")


def print_note(line: str) -> None:
    """Print to stderr a line of the generate command that is no generated text."""
    print_line(line, sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
