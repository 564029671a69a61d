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

from platform.boundary.local_files import replace_text, writing_to
from platform.boundary.refusals import DONE, CommandLine, ConfigError, command_line, run_command, violation
from platform.boundary.terminal import print_line, write_text
from platform.config.fields import Config
from platform.config.ramps import samples_before
from platform.data.cache_entries import StreamedTokens
from platform.data.corpus import Corpus, corpus_of
from platform.data.step_listing import listed, page_of, table_of_tokens
from platform.data.step_view import StepView, TakenStep
from platform.data.streams import PairStream, documents
from platform.data.token_files import WRITERS
from platform.data.tokenizer_files import JSON
from platform.launch import compose
from platform.plan.layout import count_of
from platform.status.seen_run import run_directory
from platform.status.step_facts import configured_step, taken_step


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.data`; return its exit status."""
    parser = command_line("data", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("show", help="print what a step learns from, of a configuration or of a run")
    command.add_argument("words", nargs="*", metavar="RUN_DIR|KEY=VALUE", help="step=N, and as for platform.launch")
    command.add_argument("--all", action="store_true", help="all of it, not a screen")
    command.add_argument("--sample", type=int, metavar="N", help="the sequence at position N of the global batch alone")
    command.add_argument("--tokens", action="store_true", help="a table of the tokens, a line each (with --sample N)")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    command.add_argument("--config-dir", help="the user's own configuration files")
    command.set_defaults(run=_show)
    command = commands.add_parser("prepare", help="tokenise data into data.cache, and tell what is in it")
    command.set_defaults(run=_prepare)
    _overrides(command)
    command = commands.add_parser("convert", help="write the tokens of data as .bin files")
    command.add_argument("format", choices=WRITERS, help="megatron: .bin with .idx; nanogpt: .bin alone")
    command.add_argument("prefix", type=Path, help="the files are PREFIX-train.bin, PREFIX-validation.bin, ...")
    command.set_defaults(run=_convert)
    _overrides(command)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return run_command(parser, _answer, arguments, subject="config", failures=(OSError,))


def _overrides(command: CommandLine) -> None:
    """Add arguments KEY=VALUE and --config-dir, by which a user names the data, to a command of `platform.data`."""
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for platform.launch")
    command.add_argument("--config-dir", help="the user's own configuration files")


def _answer(given: argparse.Namespace) -> int:
    """Run a `platform.data` command on the tokenised corpus that the user's KEY=VALUE name; return its exit status."""
    if given.run is _show:
        _show(given)
    else:
        config = compose(given.overrides, given.config_dir)
        given.run(given, config, corpus_of(config))
    return DONE


def _show(given: argparse.Namespace) -> None:
    """Print, or write as a page, what a step of a configuration or of a run learns from."""
    words, step = _step_in(given.words)
    if given.html and not given.html.parent.is_dir():
        raise ConfigError(violation("--html", given.html, f"there is no folder {given.html.parent}"))
    taken = _taken(words, step, given.config_dir)
    corpus = corpus_of(taken.config)
    if taken.corpus and taken.corpus != corpus.digest:
        reason = f"its corpus is {corpus.digest} now, and the run trained on {taken.corpus}: the files have changed"
        raise ConfigError(violation("data", taken.config.data.kind, reason, ["the data as it was"]))
    view = StepView(taken, corpus)
    if given.sample is not None and not 0 <= given.sample < view.count:
        near = min(max(0, given.sample), view.count - 1)
        raise ConfigError(violation("--sample", given.sample, f"must be from 0 to {view.count - 1}", [near]))
    first = given.sample or 0
    if given.html:
        with writing_to("--html", given.html):
            replace_text(given.html, "".join(page_of(view, given.all)))
        print_line(str(given.html))
    elif given.tokens:
        for line in table_of_tokens(view, range(view.count) if given.all else range(first, first + 1)):
            print_line(line)
    else:
        for line in listed(view, sys.stdout, given.all, given.sample):
            write_text(sys.stdout, f"{line}\n")


def _step_in(words: Sequence[str]) -> tuple[list[str], int | None]:
    """Return the words of a command line without step=N, and N; None without it. Raises ConfigError if N is none."""
    given = [word.removeprefix("step=") for word in words if word.startswith("step=")]
    for text in given:
        if not re.fullmatch(r"-?\d{1,15}", text):
            raise ConfigError(violation("step", text, "must be the number of a training step", [1]))
    return [word for word in words if not word.startswith("step=")], int(given[-1]) if given else None


def _taken(words: Sequence[str], step: int | None, config_dir: str | None) -> TakenStep:
    """Return a step of the run in the directory that `words` name, or of the configuration that they make. Raises
    ConfigError."""
    directories = [word for word in words if "=" not in word]
    if not directories:
        return configured_step(compose(words, config_dir), 1 if step is None else step)
    if len(words) > 1:
        other = next(word for word in words if word != directories[0])
        reason = f"{directories[0]} says all but the step"
        raise ConfigError(violation("argument", other, reason, [f"{directories[0]} step=N"]))
    with run_directory(words[0]) as directory:
        return taken_step(directory, step, words[0])


def _prepare(given: argparse.Namespace, config: Config, corpus: Corpus) -> None:
    """Print what a tokenised corpus has: of each data source the number of samples per split, and how many times the
    training steps of `config` read it."""
    needed = samples_before(config.train, config.train.steps + 1)
    for part, share in zip(corpus.parts, corpus.shares, strict=True):
        name = f"{part.name}: " if part.name else ""
        if isinstance(streamed := part.streams["train"], StreamedTokens):
            first = corpus.objective.samples(streamed.first())
            print_line(
                f"{name}read and tokenised while it is trained on: {count_of(first, 'sample', ',')} in the first block"
            )
            continue
        of_part = {split: max(0, corpus.objective.samples(stream)) for split, stream in part.streams.items()}
        read = needed * share / sum(corpus.shares) / max(1, of_part["train"])
        counts = ", ".join(count_of(count, f"{split} sample", ",") for split, count in of_part.items())
        print_line(f"{name}{counts}; {count_of(config.train.steps, 'step')} read it {read:.3g} times")
    print_line(f"in {corpus.entry or 'no file'}")


def _convert(given: argparse.Namespace, config: Config, corpus: Corpus) -> None:
    """Write every split of every source of a corpus as .bin files in the format of Megatron-LM or nanoGPT
    (`given.format`, at `given.prefix`), and its tokenizer, if it has one. Raises ConfigError for data without an end,
    pairs or a streamed source."""
    prefix: Path = given.prefix
    if config.data.kind == "synthetic":
        raise ConfigError(violation("data", "synthetic", "its tokens have no end", ["data=stdlib"]))
    if any(isinstance(stream, PairStream) for part in corpus.parts for stream in part.streams.values()):
        raise ConfigError(violation("data", config.data.kind, "pairs are no stream of tokens", ["data=text"]))
    if any(isinstance(stream, StreamedTokens) for part in corpus.parts for stream in part.streams.values()):
        raise ConfigError(violation("data.streaming", True, "its tokens are never there as a whole", [False]))
    if not prefix.parent.is_dir():
        raise ConfigError(f"{prefix}: there is no folder {prefix.parent}")
    written = []
    with writing_to("PREFIX", prefix), TemporaryDirectory(dir=prefix.parent, prefix=".converting-") as workshop:
        for part in corpus.parts:
            for split, stream in part.streams.items():
                if len(stream):
                    name = "-".join(filter(None, [prefix.name, part.name, split]))
                    place = Path(workshop, name)
                    WRITERS[given.format](place, documents(stream, corpus.special.begin), corpus.vocab)
                    written.append(f"{prefix.with_name(name)}.bin: {count_of(len(stream), 'token', ',')}")
        if JSON in corpus.files:
            own = prefix.with_name(f"{prefix.name}-{JSON}")
            Path(workshop, own.name).write_bytes(corpus.files[JSON])
            written.append(f"{own}: its tokenizer; documents begin with token {corpus.special.begin}")
        for file in Path(workshop).iterdir():  # all of them, or none
            file.replace(prefix.with_name(file.name))
    for line in written:
        print_line(line)


if __name__ == "__main__":
    sys.exit(main())
