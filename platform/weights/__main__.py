"""Command line for weights: make a checkpoint of a model that transformers saved, or export one for transformers.

Exit status: 0 done; 1 a file cannot be read, or is refused; 2 the command line is wrong, or our words do not express
the model: nothing is written then.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from platform.boundary.local_files import missing_directories, remove_empty, writing_to
from platform.boundary.redaction import bare_url
from platform.boundary.refusals import ConfigError, command_line, run_command, violation
from platform.boundary.storage import open_storage
from platform.boundary.terminal import visible
from platform.checkpoint import catalogue
from platform.checkpoint.manifest import Refused
from platform.data.tokenizer_files import has_tokenizer
from platform.weights.exporting import SHARD, TYPES, export_model, exportable
from platform.weights.families import FAMILIES
from platform.weights.importing import import_model, importable, with_averages
from platform.weights.model_folder import SavedModel, beside, to_export, vocabulary_in
from platform.weights.tensor_names import stored_model

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line `python -m platform.weights`; return its exit status."""
    parser = command_line("weights", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("import", help="make a checkpoint of a model that transformers saved")
    command.set_defaults(run=_import)
    command.add_argument("source", help="the folder that save_pretrained wrote, or its URL; or one .safetensors in it")
    command.add_argument("url", help="the storage that gets the checkpoint; then train.init=URL")
    drop: dict[str, Any] = {"action": "append", "default": [], "metavar": "PATTERN"}
    command.add_argument("--drop", help="tensors to leave out, such as 'cls.seq_relationship.*'", **drop)
    command = commands.add_parser("export", help="write a checkpoint so that transformers loads it")
    command.set_defaults(run=_export)
    command.add_argument("url", help="a storage, which stands for its newest checkpoint, or one checkpoint in it")
    command.add_argument("folder", help="a folder, or its URL")
    command.add_argument("--family", default="", help=f"{', '.join(FAMILIES)}; default: the first that expresses it")
    command.add_argument("--dtype", choices=TYPES, default="", help="element type of all tensors; default: as they are")
    command.add_argument("--shard", default=str(SHARD), metavar="SIZE", help="most bytes of a file, such as 2GB")
    command.add_argument(
        "--like",
        default="",
        metavar="FOLDER",
        help="a model whose config.json says what else it is, and whose tokenizer it has",
    )
    stacked = "the experts of a layer in stacks, as transformers computes them; default: a tensor for each of them"
    command.add_argument("--fused", action="store_true", help=stacked)
    command.add_argument("--averaged", action="store_true", help="the averages that train.ema kept of the weights")
    command.add_argument(
        "--tokenizer", default="", metavar="PATH", help="a file or folder; default: that of the checkpoint"
    )
    return run_command(parser, lambda given: given.run(given), arguments, failures=(Refused, OSError))


def _import(given: argparse.Namespace) -> int:
    """Make a checkpoint of a model that transformers saved, with its tokenizer's files, for `python -m platform.weights
    import`; return exit status 0. Raises ConfigError unless all of the model is known."""
    found = importable(given.source, "source", drop=given.drop)
    storage = open_storage(given.url, "url")
    files, lacks = beside(found.saved, "source")
    with writing_to("url", bare_url(given.url)):
        directory = import_model(found, storage, files)
    if lacks:
        print(visible(f"without a tokenizer: {lacks}"))
    print(visible(f"{storage.url}/{directory}"))
    return 0


def _export(given: argparse.Namespace) -> int:
    """Write a checkpoint as a model that transformers loads, with the files of its tokenizer if there are any, for
    `python -m platform.weights export`; return exit status 0."""
    most = _bytes(given.shard)
    storage, directory, manifest = catalogue.select(given.url)
    manifest = with_averages(manifest) if given.averaged else manifest
    like = SavedModel(given.like, "--like").config if given.like else None
    length = stored_model(manifest.meta.identity).length
    like_its = given.like if has_tokenizer(given.like) else ""
    more = to_export(given.tokenizer or like_its, storage, directory, manifest, length)
    vocabulary = vocabulary_in(more)
    found = exportable(storage, directory, manifest, given.family, given.dtype, like, vocabulary, given.fused)
    folder = open_storage(given.folder, "folder")
    made = [] if "://" in given.folder else missing_directories(Path(given.folder).absolute())
    try:
        with writing_to("folder", bare_url(given.folder)):
            names = export_model(found, folder, most, more)
    except BaseException:
        remove_empty(made)
        raise
    if not vocabulary:
        print("without a tokenizer: --tokenizer PATH or --like FOLDER takes one along")
    print(visible(f"{directory}: {found.family.architecture} in {bare_url(given.folder)}: {', '.join(names)}"))
    return 0


def _bytes(text: str) -> int:
    """Convert a size such as 5GB, of a file of exported weights, to bytes. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,15})(|KB|MB|GB)", text, re.ASCII)
    if not found or not int(found[1]):
        raise ConfigError(violation("--shard", text, "must be a number of bytes, KB, MB or GB", ["5GB", "500MB"]))
    return int(found[1]) * _UNITS[found[2]]


if __name__ == "__main__":
    sys.exit(main())
