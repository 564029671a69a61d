"""Command line for data: show what a step learns from; tokenise data before a run; write its tokens as .bin files.

Takes the arguments of platform.launch: data=, data.KEY=, model.vocab= and so on; an experiment if there is one.
Exit status: 0 done; 1 a file cannot be written; 2 the data or the command line is wrong, and nothing is written.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from platform.boundary.local_files import ReplacedFile, may_be_replaced, refuse_full_disk
from platform.boundary.refusals import DONE, CommandLine, ConfigError, build_command_line, run_command
from platform.boundary.terminal import print_line, write_text
from platform.config.fields import Config
from platform.config.ramps import count_earlier_samples
from platform.data.cache_entries import StreamedTokens
from platform.data.corpus import Corpus, open_run_corpus
from platform.data.step_listing import format_token_table, list_sequences, render_step_page
from platform.data.step_view import StepView, TakenStep
from platform.data.streams import PairStream, split_documents
from platform.data.token_files import WRITERS
from platform.data.tokenizer_files import JSON
from platform.launch import compose_config
from platform.plan.layout import format_count
from platform.status.seen_run import open_run_directory
from platform.status.step_facts import step_facts_from_config, step_of_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.data`; return its exit status."""
    parser = build_command_line("data", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("show", help="print what a step learns from, of a configuration or of a run")
    command.add_argument("words", nargs="*", metavar="RUN_DIR|KEY=VALUE", help="step=N, and as for platform.launch")
    command.add_argument("--all", action="store_true", help="all of it, not a screen")
    command.add_argument("--sample", type=int, metavar="N", help="the sequence at position N of the global batch alone")
    command.add_argument("--tokens", action="store_true", help="a table of the tokens, a line each (with --sample N)")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    command.add_argument("--config-dir", help="the user's own configuration files")
    command.set_defaults(run=_show_step)
    command = commands.add_parser("prepare", help="tokenise data into data.cache, and tell what is in it")
    command.set_defaults(run=_print_sample_counts)
    _add_override_arguments(command)
    command = commands.add_parser("convert", help="write the tokens of data as .bin files")
    command.add_argument("format", choices=WRITERS, help="megatron: .bin with .idx; nanogpt: .bin alone")
    command.add_argument("prefix", type=Path, help="the files are PREFIX-train.bin, PREFIX-validation.bin, ...")
    command.set_defaults(run=_write_bin_files)
    _add_override_arguments(command)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return run_command(parser, _run_data_command, arguments, subject="config", failures=(OSError,))


def _add_override_arguments(command: CommandLine) -> None:
    """Add arguments KEY=VALUE and --config-dir, by which a user names the data, to a command of `platform.data`."""
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for platform.launch")
    command.add_argument("--config-dir", help="the user's own configuration files")


def _run_data_command(arguments: argparse.Namespace) -> int:
    """Run a `platform.data` command on the tokenised corpus that the user's KEY=VALUE name; return its exit status."""
    if arguments.run is _show_step:
        _show_step(arguments)
    else:
        config = compose_config(arguments.overrides, arguments.config_dir)
        arguments.run(arguments, config, open_run_corpus(config))
    return DONE


def _show_step(arguments: argparse.Namespace) -> None:
    """Print, or write as a page, what a step of a configuration or of a run learns from."""
    words, step = _split_off_step(arguments.words)
    if arguments.html and not arguments.html.parent.is_dir():
        raise ConfigError("--html", arguments.html, f"there is no folder {arguments.html.parent}")
    shown_step = _resolve_shown_step(words, step, arguments.config_dir)
    corpus = open_run_corpus(shown_step.config)
    if shown_step.corpus and shown_step.corpus != corpus.digest:
        trained = f"the run trained on {shown_step.corpus}: the files have changed"
        reason = f"its corpus is {corpus.digest} now, and {trained}"
        raise ConfigError("data", shown_step.config.data.kind, reason, ["the data as it was"])
    view = StepView(shown_step, corpus)
    if arguments.sample is not None and not 0 <= arguments.sample < view.num_sequences:
        near = min(max(0, arguments.sample), view.num_sequences - 1)
        raise ConfigError("--sample", arguments.sample, f"must be from 0 to {view.num_sequences - 1}", [near])
    first = arguments.sample or 0
    if arguments.html:
        ReplacedFile(arguments.html, "--html").write("".join(render_step_page(view, arguments.all)))
        print_line(str(arguments.html))
    elif arguments.tokens:
        for line in format_token_table(view, range(view.num_sequences) if arguments.all else range(first, first + 1)):
            print_line(line)
    else:
        for line in list_sequences(view, sys.stdout, arguments.all, arguments.sample):
            write_text(sys.stdout, f"{line}\n")


def _split_off_step(words: Sequence[str]) -> tuple[list[str], int | None]:
    """Return a data command's words without step=N, and N; None without it. Raises ConfigError if N is none."""
    step_texts = [word.removeprefix("step=") for word in words if word.startswith("step=")]
    for text in step_texts:
        if not re.fullmatch(r"-?\d{1,15}", text):
            raise ConfigError("step", text, "must be the number of a training step", [1])
    return [word for word in words if not word.startswith("step=")], int(step_texts[-1]) if step_texts else None


def _resolve_shown_step(words: Sequence[str], step: int | None, config_dir: str | None) -> TakenStep:
    """Return a step of the run in the directory that `words` name, or of the configuration that they make. Raises
    ConfigError."""
    directories = [word for word in words if "=" not in word]
    if not directories:
        return step_facts_from_config(compose_config(words, config_dir), 1 if step is None else step)
    if len(words) > 1:
        extra_word = next(word for word in words if word != directories[0])
        reason = f"{directories[0]} says all but the step"
        raise ConfigError("argument", extra_word, reason, [f"{directories[0]} step=N"])
    with open_run_directory(words[0]) as directory:
        return step_of_run(directory, step, words[0])


def _print_sample_counts(arguments: argparse.Namespace, config: Config, corpus: Corpus) -> None:
    """Print what a tokenised corpus has: of each data source the number of samples per split, and how many times the
    training steps of `config` read it."""
    epochs = corpus.count_epochs(count_earlier_samples(config.train, config.train.steps + 1))
    for part in corpus.parts:
        name = f"{part.name}: " if part.name else ""
        if isinstance(streamed := part.streams["train"], StreamedTokens):
            first = corpus.objective.samples(streamed.open_first_block())
            samples = format_count(first, "sample", ",")
            print_line(f"{name}read and tokenised while it is trained on: {samples} in the first block")
            continue
        sample_counts = {split: max(0, corpus.objective.samples(stream)) for split, stream in part.streams.items()}
        counts = ", ".join(format_count(count, f"{split} sample", ",") for split, count in sample_counts.items())
        print_line(f"{name}{counts}; {format_count(config.train.steps, 'step')} read it {epochs[part.name]:.3g} times")
    print_line(f"in {corpus.entry or 'no file'}")


def _write_bin_files(arguments: argparse.Namespace, config: Config, corpus: Corpus) -> None:
    """Write every split of every source of a corpus as .bin files in the format of Megatron-LM or nanoGPT
    (`given.format`, at `given.prefix`), and its tokenizer, if it has one. Raises ConfigError for data without an end,
    pairs or a streamed source."""
    prefix: Path = arguments.prefix
    if config.data.kind == "synthetic":
        raise ConfigError("data", "synthetic", "its tokens have no end", ["data=stdlib"])
    if any(isinstance(stream, PairStream) for part in corpus.parts for stream in part.streams.values()):
        raise ConfigError("data", config.data.kind, "pairs are no stream of tokens", ["data=text"])
    if any(isinstance(stream, StreamedTokens) for part in corpus.parts for stream in part.streams.values()):
        raise ConfigError("data.streaming", True, "its tokens are never there as a whole", [False])
    if not prefix.parent.is_dir():
        raise ConfigError(f"{prefix}: there is no folder {prefix.parent}")
    written = []
    with (
        refuse_full_disk("PREFIX", prefix),
        TemporaryDirectory(dir=prefix.parent, prefix=".converting-") as draft_folder,
    ):
        for part in corpus.parts:
            for split, stream in part.streams.items():
                if len(stream):
                    name = "-".join(filter(None, [prefix.name, part.name, split]))
                    draft_path = Path(draft_folder, name)
                    WRITERS[arguments.format](draft_path, split_documents(stream, corpus.special.begin), corpus.vocab)
                    written.append(f"{prefix.with_name(name)}.bin: {format_count(len(stream), 'token', ',')}")
        if JSON in corpus.tokenizer_files:
            tokenizer_path = prefix.with_name(f"{prefix.name}-{JSON}")
            Path(draft_folder, tokenizer_path.name).write_bytes(corpus.tokenizer_files[JSON])
            written.append(f"{tokenizer_path}: its tokenizer; documents begin with token {corpus.special.begin}")
        files = {file: prefix.with_name(file.name) for file in Path(draft_folder).iterdir()}
        if special := [str(target) for target in files.values() if not may_be_replaced(target)]:
            raise ConfigError("PREFIX", prefix, f"is to be {', '.join(special)}, which is no regular file")
        for file, target in files.items():  # all of them, or none
            file.replace(target)
    for line in written:
        print_line(line)


if __name__ == "__main__":
    sys.exit(main())
