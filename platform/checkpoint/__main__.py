"""Command line for checkpoints: verify them, show what they hold, convert them to other formats and back.

URL names a storage (a path or any fsspec URL), which stands for its newest checkpoint, or one checkpoint in it.
Exit status: 0 done; 1 a checkpoint is refused, with the reason; 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from platform.boundary.documents import one_line
from platform.boundary.local_files import writing_to
from platform.boundary.redaction import bare_url
from platform.boundary.refusals import ConfigError, closest, command_line, run_command, violation
from platform.boundary.storage import open_storage
from platform.boundary.terminal import one_refusal, visible
from platform.checkpoint import catalogue
from platform.checkpoint.catalogue import read_carried
from platform.checkpoint.interchange import EXPORT, IMPORT, store_tensors
from platform.checkpoint.manifest import Manifest, Meta, Refused
from platform.plan.layout import count_of


def main(arguments: list[str] | None = None) -> int:
    """Run the command line `python -m platform.checkpoint`; return its exit status."""
    parser = command_line("checkpoint", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("verify", help="read every byte; of a storage, of every checkpoint in it")
    command.set_defaults(run=_verify)
    command.add_argument("url")
    command = commands.add_parser("show", help="what a checkpoint holds; of a storage, what lies in it")
    command.set_defaults(run=_show)
    command.add_argument("url")
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command = commands.add_parser("export", help="write its tensors in another format")
    command.set_defaults(run=_export)
    command.add_argument("url")
    command.add_argument("target", help="safetensors: a file, or its URL; dcp: a local directory")
    command.add_argument("--format", choices=EXPORT, default="safetensors")
    command.add_argument("--only", default="", metavar="PREFIX", help="tensors whose names begin with it")
    command = commands.add_parser("import", help="make a checkpoint of what another format holds")
    command.set_defaults(run=_import)
    command.add_argument("source", help="what export writes. A dcp directory can run code: only from who you trust")
    command.add_argument("url")
    command.add_argument("--format", choices=IMPORT, default="safetensors")
    return run_command(parser, lambda given: given.run(given), arguments, failures=(Refused, OSError))


def _verify(given: argparse.Namespace) -> int:
    """Verify every byte of the checkpoints that the URL names, and print a line for each; return exit status 1 if any
    is refused, for `python -m platform.checkpoint verify`."""
    folder, name = catalogue.split_url(given.url)
    storage = open_storage(folder, "url")
    directories = [name] if name else [a.directory for a in catalogue.attempts(storage)]
    if not directories:
        raise Refused(f"{storage.url}: holds no checkpoint")
    bad = 0
    for directory in directories:
        try:
            manifest = catalogue.verify(storage, directory)
            carried = read_carried(storage, directory, manifest)  # answers need them
            beside = f", and {', '.join(sorted(carried))}" if carried else ""
            held = f"{count_of(len(manifest.tensors), 'tensor')}, {_bytes(manifest.nbytes)}"
            print(visible(f"{directory}: good, {held}{beside}"))
        except (Refused, OSError) as error:
            bad += 1
            print(one_refusal(f"{directory}: {error}"))
    return 1 if bad else 0


def _show(given: argparse.Namespace) -> int:
    """Print the metadata and the tensors of the checkpoint that the URL names, as text or JSON."""
    storage, directory, manifest = catalogue.select(given.url)
    found = summary(manifest)
    if given.json:
        print(json.dumps({"directory": directory, **found}))
        return 0
    print(visible(f"{storage.url}/{directory}"))
    for key, value in found.items():
        if key != "tensors":
            print(visible(f"  {key:<14} {value}"))
    for name, t in found["tensors"].items():
        shape = " x ".join(map(str, t["shape"])) or "scalar"
        print(visible(f"  {name:<48} {t['dtype']:<9} {shape:<16} {count_of(t['blocks'], 'block')}"))
    return 0


def summary(manifest: Manifest) -> dict[str, Any]:
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
        "size": f"{_bytes(manifest.nbytes)} in {count_of(len(manifest.files), 'file')}",
        "tensors": {n: {"dtype": t.dtype, "shape": t.shape, "blocks": len(t.blocks)} for n, t in tensors.items()},
    }


def _export(given: argparse.Namespace) -> int:
    """Write the tensors of a checkpoint whose names begin with `--only` in another format. Raises ConfigError if there
    are none."""
    storage, directory, manifest = catalogue.select(given.url)
    names = [n for n in manifest.tensors if n.startswith(given.only)]
    if not names:
        raise ConfigError(violation("--only", given.only, "begins no name", closest(given.only, manifest.tensors)[:3]))
    with writing_to("target", bare_url(given.target)):
        EXPORT[given.format](storage, directory, manifest, given.target, names)
    print(visible(f"{directory}: {count_of(len(names), 'tensor')} in {given.target}"))
    return 0


def _import(given: argparse.Namespace) -> int:
    """Make a checkpoint of a file or directory in another format; without the metadata of an exported checkpoint, it is
    at step 0. Raises Refused if the source does not hold the format."""
    storage = open_storage(given.url)
    try:
        meta, tensors = IMPORT[given.format](given.source)
        meta = meta or Meta(step=0, samples=0, seed=0, corpus="", identity={}, configuration="", plan={})
        with writing_to("url", bare_url(given.url)):
            directory = store_tensors(storage, tensors, replace(meta, plan={}))  # its blocks are whole tensors now
    except (Refused, ConfigError, OSError):
        raise
    except Exception as error:  # the libraries raise their own for what they cannot parse
        reason = one_line(f"{type(error).__name__}: {error}")
        raise Refused(f"{given.source} does not hold {given.format}: {reason}") from None
    print(visible(f"{storage.url}/{directory}"))
    return 0


def _bytes(n: int) -> str:
    """Return a size of a checkpoint as text, such as "1,024 bytes"."""
    return f"{n:,} bytes"


if __name__ == "__main__":
    sys.exit(main())
