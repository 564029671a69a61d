"""Command line for checkpoints: verify them, show what they hold, convert them to other formats and back.

URL names a storage (a path, or a URL of a protocol in docs/checkpoints.md) or a run's directory, which stand for the
newest checkpoint there, or one checkpoint.
Exit status: 0 done; 1 a checkpoint is refused, with the reason; 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from platform.boundary.documents import printable_line
from platform.boundary.local_files import refuse_full_disk
from platform.boundary.redaction import strip_url_secrets
from platform.boundary.refusals import ConfigError, build_command_line, closest_values, run_command
from platform.boundary.storage import open_storage
from platform.boundary.terminal import escape_terminal_text, refusal_line
from platform.checkpoint import catalogue
from platform.checkpoint.catalogue import read_carried_files
from platform.checkpoint.interchange import EXPORTERS, IMPORTERS, store_tensors
from platform.checkpoint.manifest import Manifest, Meta, Refused
from platform.plan.layout import format_count


def main(arguments: list[str] | None = None) -> int:
    """Run the command line `python -m platform.checkpoint`; return its exit status."""
    parser = build_command_line("checkpoint", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("verify", help="read every byte; of a storage, of every checkpoint in it")
    command.set_defaults(run=_verify_checkpoints)
    command.add_argument("url")
    command = commands.add_parser("show", help="what a checkpoint holds; of a storage, what lies in it")
    command.set_defaults(run=_show_checkpoint)
    command.add_argument("url")
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command = commands.add_parser("export", help="write its tensors in another format")
    command.set_defaults(run=_export_tensors)
    command.add_argument("url")
    command.add_argument("target", help="safetensors: a file, or its URL; dcp: a local directory")
    command.add_argument("--format", choices=EXPORTERS, default="safetensors")
    command.add_argument("--only", default="", metavar="PREFIX", help="tensors whose names begin with it")
    command = commands.add_parser("import", help="make a checkpoint of what another format holds")
    command.set_defaults(run=_import_checkpoint)
    command.add_argument("source", help="what export writes. A dcp directory can run code: only from who you trust")
    command.add_argument("url")
    command.add_argument("--format", choices=IMPORTERS, default="safetensors")
    return run_command(parser, lambda options: options.run(options), arguments, failures=(Refused, OSError))


def _verify_checkpoints(options: argparse.Namespace) -> int:
    """Verify every byte of the checkpoints that the URL names, and print a line for each; return exit status 1 if any
    is refused, for `python -m platform.checkpoint verify`."""
    folder, name = catalogue.split_url(options.url)
    storage = open_storage(folder, "url")
    directories = [name] if name else [a.directory_name for a in catalogue.list_attempts(storage)]
    if not directories:
        raise Refused(f"{storage.url}: holds no checkpoint")
    refused = 0
    for directory in directories:
        try:
            manifest = catalogue.verify_checkpoint(storage, directory)
            carried = read_carried_files(storage, directory, manifest)  # answers need them
            carried_note = f", and {', '.join(sorted(carried))}" if carried else ""
            contents = f"{format_count(len(manifest.tensors), 'tensor')}, {_format_bytes(manifest.nbytes)}"
            print(escape_terminal_text(f"{directory}: good, {contents}{carried_note}"))
        except (Refused, OSError) as error:
            refused += 1
            print(refusal_line(f"{directory}: {error}"))
    return 1 if refused else 0


def _show_checkpoint(options: argparse.Namespace) -> int:
    """Print the metadata and the tensors of the checkpoint that the URL names, as text or JSON."""
    storage, directory, manifest = catalogue.select_checkpoint(options.url)
    contents = summarize_manifest(manifest)
    if options.json:
        print(json.dumps({"directory": directory, **contents}))
        return 0
    print(escape_terminal_text(f"{storage.url}/{directory}"))
    for key, value in contents.items():
        if key != "tensors":
            print(escape_terminal_text(f"  {key:<14} {value}"))
    for name, t in contents["tensors"].items():
        shape = " x ".join(map(str, t["shape"])) or "scalar"
        print(escape_terminal_text(f"  {name:<48} {t['dtype']:<9} {shape:<16} {format_count(t['blocks'], 'block')}"))
    return 0


def summarize_manifest(manifest: Manifest) -> dict[str, Any]:
    """Return the contents of a checkpoint as the plain data that `python -m platform.checkpoint show` prints."""
    meta, tensors = manifest.meta, manifest.tensors
    return {
        "step": meta.step,
        "samples": meta.samples,
        "seed": meta.seed,
        "corpus": meta.corpus,
        "configuration": meta.configuration,
        "mesh": " x ".join(f"{a}={n}" for a, n in meta.plan.get("mesh", {}).items()) or "one worker",
        "scheme": meta.plan.get("scheme", ""),
        "versions": ", ".join(f"{library} {v}" for library, v in meta.versions.items()),
        "values": json.dumps(meta.values),
        "size": f"{_format_bytes(manifest.nbytes)} in {format_count(len(manifest.files), 'file')}",
        "tensors": {n: {"dtype": t.dtype, "shape": t.shape, "blocks": len(t.blocks)} for n, t in tensors.items()},
    }


def _export_tensors(options: argparse.Namespace) -> int:
    """Write the tensors of a checkpoint whose names begin with `--only` in another format. Raises ConfigError if there
    are none."""
    storage, directory, manifest = catalogue.select_checkpoint(options.url)
    names = [n for n in manifest.tensors if n.startswith(options.only)]
    if not names:
        raise ConfigError("--only", options.only, "begins no name", closest_values(options.only, manifest.tensors)[:3])
    with refuse_full_disk("target", strip_url_secrets(options.target)):
        EXPORTERS[options.format](storage, directory, manifest, options.target, names)
    print(escape_terminal_text(f"{directory}: {format_count(len(names), 'tensor')} in {options.target}"))
    return 0


def _import_checkpoint(options: argparse.Namespace) -> int:
    """Make a checkpoint of a file or directory in another format; without the metadata of an exported checkpoint, it is
    at step 0. Raises Refused if the source does not hold the format."""
    storage = open_storage(options.url)
    try:
        meta, tensors = IMPORTERS[options.format](options.source)
        meta = meta or Meta(step=0, samples=0, seed=0, corpus="", identity={}, configuration="", plan={})
        with refuse_full_disk("url", strip_url_secrets(options.url)):
            directory = store_tensors(storage, tensors, replace(meta, plan={}))  # its blocks are whole tensors now
    except (Refused, ConfigError, OSError):
        raise
    except Exception as error:  # the libraries raise their own for what they cannot parse
        reason = printable_line(f"{type(error).__name__}: {error}")
        raise Refused(f"{options.source} does not hold {options.format}: {reason}") from None
    print(escape_terminal_text(f"{storage.url}/{directory}"))
    return 0


def _format_bytes(n: int) -> str:
    """Return a size of a checkpoint as text, such as "1,024 bytes"."""
    return f"{n:,} bytes"


if __name__ == "__main__":
    sys.exit(main())
