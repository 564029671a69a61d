"""Command line for measuring a trained model: `python -m platform.evaluate CHECKPOINT [KEY=VALUE ...]`.

Prints the loss on what its training held out, or on the text that data.path=FILE names, and the perplexity per token,
word and byte. CHECKPOINT and KEY=VALUE are as for platform.generate.
Exit status: 0 done; 1 a worker failed; 2 the command line, the checkpoint or the data is wrong, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platform.boundary import refusals
from platform.boundary.local_files import ReplacedFile
from platform.boundary.refusals import CommandLine, ConfigError, format_violation, refuse_all, rephrase_refusals
from platform.boundary.terminal import print_line, show_phase
from platform.config.fields import PREFERENCE, Config, training_objective_name
from platform.config.groups import Data
from platform.data.tokenizer_files import JSON
from platform.generate import plan_answers, run_model_command, split_words
from platform.plan.layout import format_count

if TYPE_CHECKING:
    from platform.cluster.session import TrainedModel
    from platform.data.corpus import Corpus

SPLITS = ("validation", "train")
SAMPLES = 64  # that a refusal proposes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.evaluate`; return its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return run_model_command(_build_parser(), _evaluate_model, arguments)


def _build_parser() -> CommandLine:
    """Return the parser of the command line `python -m platform.evaluate`."""
    parser = refusals.build_command_line("evaluate", __doc__)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT")
    add("words", nargs="*", metavar="KEY=VALUE", help="as for platform.launch; data=... is what is read")
    add("--split", choices=SPLITS, help="of the data; default: what is held out, all of a data.path=")
    add("--samples", type=int, default=0, help="at most so many of each source; 0 (default): all")
    add("--bleu", action="store_true", help="data=pairs: BLEU of its translations; needs sacrebleu")
    add("--beams", type=int, default=4, help="--bleu: beams of the search (4)")
    add("--tasks", metavar="NAMES", help="tasks of lm-eval, as NAME,NAME, instead of losses")
    add("--include", metavar="FOLDER", default="", help="--tasks: your own are in it")
    add("--shots", type=int, help="--tasks: examples in front of each document; default: as it says")
    add("--json", metavar="FILE", help="write the table to it as well")
    add("--config-dir", metavar="FOLDER", help="your own configuration files, as for platform.launch")
    return parser


def _evaluate_model(arguments: argparse.Namespace) -> int:
    """Run the command that measures a trained model, with its parsed command line; return the exit status."""
    overrides, others = split_words(arguments.words)
    mistakes = [format_violation("argument", word, "is no KEY=VALUE of the configuration") for word in others]
    for flag, least in (("samples", 0), ("beams", 1), ("shots", 0)):
        if (value := getattr(arguments, flag)) is not None and value < least:
            mistakes.append(format_violation(f"--{flag}", value, f"must be >= {least}", [least]))
    for package, flag in (("sacrebleu", "bleu"), ("lm_eval", "tasks")):
        if getattr(arguments, flag) and find_spec(package) is None:
            mistakes.append(f"--{flag}: needs the package {package}: pip install 'elastic-platform[eval]'")
    if arguments.include and not os.path.isdir(arguments.include):
        mistakes.append(format_violation("--include", arguments.include, "there is no such folder"))
    refuse_all(mistakes)
    out = ReplacedFile(arguments.json, "--json") if arguments.json else None
    measurements = _measure_model(arguments, overrides)
    if out:
        out.write(json.dumps(measurements, indent=2) + "\n")
    return 0


def _measure_model(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Measure losses, tasks or BLEU of the model that a command line names; print and return the results."""
    with show_phase("importing torch"):
        from platform.cluster.answer_scores import measure_bleu, measure_losses, print_losses
        from platform.cluster.asked_model import violations_of_memory
        from platform.cluster.session import find_trained_model
        from platform.config.arguments import parse_typed_values
        from platform.data.corpus import open_run_corpus

    trained, typed = find_trained_model(arguments.checkpoint), parse_typed_values(overrides)
    if arguments.tasks:
        return _measure_tasks(arguments, trained, overrides)
    if trained.data is None and not any(key.startswith("data") for key in typed):
        reason = f"{arguments.checkpoint} says nothing of data"
        raise ConfigError("data", "", reason, ["data=text data.path=FILE"])
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tokenizer-")))
        for name, raw in trained.files.items():
            (folder / name).write_bytes(raw)
        apart = trained.model.within_documents and "data.document_mask" not in typed
        tokenizer = str(folder) if JSON in trained.files else ""
        complete = partial(_complete_data, typed=typed, tokenizer=tokenizer, apart=apart, samples=arguments.samples)
        with rephrase_refusals(lambda line: line.replace(str(folder), trained.url)):  # it is the model's own
            planned = plan_answers(trained, overrides, arguments.config_dir, trained.data or Data(), complete)
            if arguments.bleu:
                refuse_all(violations_of_memory(planned.config, planned.plan, 1, 1, arguments.beams))
            corpus = open_run_corpus(planned.config)
        splits = _choose_splits(corpus, arguments.split)
        model = planned.open_model(corpus=str(corpus.entry or ""), writes=arguments.bleu)
        asked = opened.enter_context(model)
        rows = measure_losses(asked, corpus, splits, arguments.samples)
        split, samples = next(iter(splits.values())), rows[0].samples
        translated = measure_bleu(asked, corpus, split, samples, arguments.beams) if arguments.bleu else {}
    data = planned.config.data
    print_losses(rows, print_line, os.path.basename(data.validation_path or data.path) or data.kind)
    if translated:
        pairs = format_count(translated["pairs"], "pair")
        print_line(f"BLEU {translated['bleu']:.2f} of {pairs} ({translated['signature']})")
    return {"sources": [row.table_row() for row in rows], **translated}


def _measure_tasks(arguments: argparse.Namespace, trained: TrainedModel, overrides: Sequence[str]) -> dict[str, Any]:
    """Run tasks of lm-eval on a trained model; return their results, task -> metric -> value."""
    from platform.cluster.harness_tasks import HarnessTasks

    planned = plan_answers(trained, overrides, arguments.config_dir)
    if planned.vocabulary is None:
        reason = "there is none beside the model, and tasks are texts"
        raise ConfigError("data.tokenizer", "", reason, ["data.tokenizer=PATH"])
    tasks = HarnessTasks([name for name in arguments.tasks.split(",") if name], arguments.include, arguments.shots)
    with planned.open_model() as asked:
        task_results = tasks.score_model(asked, arguments.samples)
    for task, values in task_results.items():
        for metric, value in values.items():
            print_line(f"{task:<30} {metric:<20} {value:.4f}")
    return {"tasks": task_results}


def _complete_data(config: Config, typed: dict[str, Any], tokenizer: str, apart: bool, samples: int) -> None:
    """Complete in place the keys of the data on which `platform.evaluate` measures a trained model: the tokenizer is
    the model's, in the folder `tokenizer`, a typed path is read as a whole, and if the model keeps documents `apart`,
    so does the data. Raises ConfigError if the model has no tokenizer, and text needs one; for pairs of answers; and
    for random tokens without a number of `samples`, as there is no end of them."""
    data = config.data
    if data.kind == "synthetic" and not samples:
        raise ConfigError("--samples", samples, "data=synthetic has no end", [SAMPLES])
    if training_objective_name(config) == PREFERENCE:
        reason = "has pairs of answers, and a loss per token is measured on text"
        legal = [f"data={kind} data.path=FILE" for kind in ("instructions", "text")]
        raise ConfigError("data.kind", data.kind, reason, legal)
    if "data.tokenizer" not in typed and data.kind != "synthetic":
        if not tokenizer and data.kind != "tokens":
            reason = "there is none beside the model, and one that is trained gives other tokens than it knows"
            raise ConfigError("data.tokenizer", "", reason, ["data.tokenizer=PATH"])
        data.tokenizer, data.tokenizer_words, data.chat_template = tokenizer or data.tokenizer, "", ""
        data.end_token = data.begin_token = ""
        data.special_tokens = []
    if data.kind == "instructions" and "data.document_mask" not in typed:
        data.document_mask = config.model.within_documents = apart
    elif apart and data.kind in ("stdlib", "text", "mixture"):
        data.document_mask = config.model.within_documents = True
    is_whole = not typed.keys() & {"data.validation", "data.validation_path"}
    if "data.path" in typed and is_whole and data.kind in ("text", "tokens"):
        from platform.data.data_checks import violations_of_sources

        if not violations_of_sources(data, vocab=config.model.vocab):  # it is refused once
            data.validation_path = data.path


def _choose_splits(corpus: Corpus, asked: str | None) -> dict[str, str]:
    """Return the splits of a corpus on which evaluate measures a model, by source. Raises ConfigError without any."""
    if asked == "train":
        return {"": "train"}
    splits_by_source = {name: split for name, (split, _) in corpus.validation_splits.items()}
    if not splits_by_source:
        raise ConfigError("--split", asked or "validation", "the data holds nothing out", ["train"])
    return splits_by_source


if __name__ == "__main__":
    sys.exit(main())
