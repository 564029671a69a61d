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

from platform.boundary.refusals import CommandLine, ConfigError, command_line, refuse_all, rephrasing, violation
from platform.boundary.terminal import phase, print_line
from platform.config.fields import Config
from platform.config.groups import Data
from platform.data.tokenizer_files import JSON
from platform.generate import answered, note, plan_answers, sorted_words
from platform.plan.layout import count_of

if TYPE_CHECKING:
    from platform.cluster.session import TrainedModel
    from platform.data.corpus import Corpus

SPLITS = ("validation", "train")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.evaluate`; return its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return answered(_parser(), _evaluate, arguments)


def _parser() -> CommandLine:
    """Return the parser of the command line `python -m platform.evaluate`."""
    parser = command_line("evaluate", __doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument(
        "words", nargs="*", metavar="KEY=VALUE", help="as for platform.launch; data=... is what is read"
    )
    parser.add_argument("--split", choices=SPLITS, help="of the data; default: what is held out, all of a data.path=")
    parser.add_argument("--samples", type=int, default=0, help="at most so many of each source; 0 (default): all")
    parser.add_argument("--bleu", action="store_true", help="data=pairs: BLEU of its translations; needs sacrebleu")
    parser.add_argument("--beams", type=int, default=4, help="--bleu: beams of the search (4)")
    parser.add_argument("--tasks", metavar="NAMES", help="tasks of lm-eval, as NAME,NAME, instead of losses")
    parser.add_argument("--include", metavar="FOLDER", default="", help="--tasks: your own are in it")
    parser.add_argument("--shots", type=int, help="--tasks: examples in front of each document; default: as it says")
    parser.add_argument("--json", metavar="FILE", help="write the table to it as well")
    parser.add_argument("--config-dir", metavar="FOLDER", help="your own configuration files, as for platform.launch")
    return parser


def _evaluate(given: argparse.Namespace) -> int:
    """Run the command that measures a trained model, with its parsed command line; return the exit status."""
    overrides, others = sorted_words(given.words)
    wrong = [violation("argument", word, "is no KEY=VALUE of the configuration") for word in others]
    for flag, least in (("samples", 0), ("beams", 1), ("shots", 0)):
        if (value := getattr(given, flag)) is not None and value < least:
            wrong.append(violation(f"--{flag}", value, f"must be >= {least}", [least]))
    for package, flag in (("sacrebleu", "bleu"), ("lm_eval", "tasks")):
        if getattr(given, flag) and find_spec(package) is None:
            wrong.append(f"--{flag}: needs the package {package}: pip install 'elastic-platform[eval]'")
    if given.include and not os.path.isdir(given.include):
        wrong.append(violation("--include", given.include, "there is no such folder"))
    refuse_all(wrong)
    from platform.cluster.answer_scores import WholeFile

    out = WholeFile(given.json, "--json") if given.json else None
    found = _measured_model(given, overrides)
    if out:
        out.write(json.dumps(found, indent=2) + "\n")
    return 0


def _measured_model(given: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Measure losses, tasks or BLEU of the model that a command line names; print and return the results."""
    with phase("importing torch"):
        from platform.cluster.answer_scores import measure_losses, print_losses
        from platform.cluster.asked_model import violations_of_memory
        from platform.cluster.session import find_trained, open_session
        from platform.config.arguments import typed_values
        from platform.data.corpus import corpus_of

    trained, typed = find_trained(given.checkpoint), typed_values(overrides)
    if given.tasks:
        return _tasks(given, trained, overrides)
    if trained.data is None and not any(key.startswith("data") for key in typed):
        reason = f"{given.checkpoint} says nothing of data"
        raise ConfigError(violation("data", "", reason, ["data=text data.path=FILE"]))
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tokenizer-")))
        for name, raw in trained.files.items():
            (folder / name).write_bytes(raw)
        apart = trained.model.within_documents and "data.document_mask" not in typed
        complete = partial(_complete, typed=typed, tokenizer=str(folder) if JSON in trained.files else "", apart=apart)
        with rephrasing(lambda line: line.replace(str(folder), trained.url)):  # it is the model's own
            planned = plan_answers(trained, overrides, given.config_dir, trained.data or Data(), complete)
            if given.bleu:
                refuse_all(violations_of_memory(planned.config, planned.plan, 1, 1, given.beams))
            corpus = corpus_of(planned.config)
        splits = _splits(corpus, given.split)
        session = open_session(planned.config, planned.plan, note, corpus=str(corpus.entry or ""), writes=given.bleu)
        crew = opened.enter_context(session)
        rows = measure_losses(crew.call, corpus, splits, given.samples)
        translated = {}
        if given.bleu:
            from platform.cluster.answer_scores import bleu
            from platform.cluster.asked_model import AskedModel

            split, row = next(iter(splits.values())), rows[0]
            asked = AskedModel(crew.call, planned.config.model, planned.vocabulary)
            translated = bleu(asked, corpus, split, row.samples, given.beams)
    print_losses(rows, print_line)
    if translated:
        print_line(
            f"BLEU {translated['bleu']:.2f} of {count_of(translated['pairs'], 'pair')} ({translated['signature']})"
        )
    return {"sources": [row.plain() for row in rows], **translated}


def _tasks(given: argparse.Namespace, trained: TrainedModel, overrides: Sequence[str]) -> dict[str, Any]:
    """Run tasks of lm-eval on a trained model; return their results, task -> metric -> value."""
    from platform.cluster.asked_model import AskedModel
    from platform.cluster.harness_tasks import HarnessTasks
    from platform.cluster.session import open_session

    planned = plan_answers(trained, overrides, given.config_dir)
    if planned.vocabulary is None:
        reason = "there is none beside the model, and tasks are texts"
        raise ConfigError(violation("data.tokenizer", "", reason, ["data.tokenizer=PATH"]))
    tasks = HarnessTasks([name for name in given.tasks.split(",") if name], given.include, given.shots)
    with open_session(planned.config, planned.plan, note) as crew:
        found = tasks.results(AskedModel(crew.call, planned.config.model, planned.vocabulary), given.samples)
    for task, values in found.items():
        for metric, value in values.items():
            print_line(f"{task:<30} {metric:<20} {value:.4f}")
    return {"tasks": found}


def _complete(config: Config, typed: dict[str, Any], tokenizer: str, apart: bool) -> None:
    """Complete the keys of the data on which a trained model is measured, in place: the tokenizer is the model's, in
    the folder `tokenizer`, a typed path is read as a whole, and if the model keeps documents `apart`, so does the data.
    Raises ConfigError if the model has no tokenizer, and text needs one."""
    data = config.data
    if "data.tokenizer" not in typed and data.kind != "synthetic":
        if not tokenizer and data.kind != "tokens":
            reason = "there is none beside the model, and one that is trained gives other tokens than it knows"
            raise ConfigError(violation("data.tokenizer", "", reason, ["data.tokenizer=PATH"]))
        data.tokenizer, data.tokenizer_words, data.chat_template = tokenizer or data.tokenizer, "", ""
        data.end_token = data.begin_token = ""
        data.special_tokens = []
    if apart and data.kind in ("stdlib", "text", "mixture"):
        data.document_mask = config.model.within_documents = True
    whole = not typed.keys() & {"data.validation", "data.validation_path"}
    if "data.path" in typed and whole and data.kind in ("text", "tokens"):
        from platform.data.data_checks import violations_of_sources

        if not violations_of_sources(data, vocab=config.model.vocab):  # it is refused once
            data.validation_path = data.path


def _splits(corpus: Corpus, asked: str | None) -> dict[str, str]:
    """Return the splits of a corpus on which to measure a trained model, by source. Raises ConfigError without any."""
    if asked == "train":
        return {"": "train"}
    found = {name: split for name, (split, _) in corpus.validations.items()}
    if not found:
        raise ConfigError(violation("--split", asked or "validation", "the data holds nothing out", ["train"]))
    return found


if __name__ == "__main__":
    sys.exit(main())
