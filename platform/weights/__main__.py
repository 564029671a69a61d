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

from platform.boundary.local_files import list_missing_directories, refuse_full_disk, remove_empty_directories
from platform.boundary.redaction import strip_url_secrets
from platform.boundary.refusals import ConfigError, build_command_line, refuse_all, run_command
from platform.boundary.storage import Storage, open_storage
from platform.boundary.terminal import escape_terminal_text
from platform.checkpoint import catalogue
from platform.checkpoint.manifest import Manifest, Refused, check_tensors
from platform.config.extensions import import_user_modules
from platform.data.tokenizer_files import has_tokenizer
from platform.weights import model_folder
from platform.weights.exporting import SHARD, TYPES, export_model, open_exportable
from platform.weights.families import FAMILIES
from platform.weights.importing import import_model, open_importable, swap_in_averages
from platform.weights.model_folder import SavedModel, read_companions_and_tokenizer_lack, read_export_files
from platform.weights.peft_format import export_adapters, holds_adapters, import_adapters, is_of_module
from platform.weights.stored_adapters import StoredAdapters, parse_stored_tune, read_base
from platform.weights.tensor_names import parse_stored_model

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line `python -m platform.weights`; return its exit status."""
    parser = build_command_line("weights", __doc__)
    several: dict[str, Any] = {"action": "append", "default": [], "metavar": "MODULE"}
    parser.add_argument("--extend", help="a module that registers families of your own", **several)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("import", help="make a checkpoint of a model that transformers saved")
    command.set_defaults(run=_import_weights)
    command.add_argument("source", help="the folder that save_pretrained wrote, or its URL; or one .safetensors in it")
    command.add_argument("url", help="the storage that gets the checkpoint; then train.init=URL")
    base = "adapters of PEFT: the folder of the model that they are of; default: the one that they name"
    command.add_argument("--base", help=base, default="", metavar="FOLDER")
    drop: dict[str, Any] = {"action": "append", "default": [], "metavar": "PATTERN"}
    command.add_argument("--drop", help="tensors to leave out, such as 'cls.seq_relationship.*'", **drop)
    command = commands.add_parser("export", help="write a checkpoint so that transformers loads it")
    command.set_defaults(run=_export_weights)
    command.add_argument("url", help="a storage or run directory, for its newest checkpoint, or one checkpoint")
    command.add_argument("folder", help="a folder, or its URL")
    command.add_argument("--family", default="", help=f"{', '.join(FAMILIES)}; default: the first that expresses it")
    command.add_argument("--dtype", choices=TYPES, default="", help="element type of all tensors; default: as they are")
    command.add_argument("--shard", default=str(SHARD), metavar="SIZE", help="most bytes of a file, such as 2GB")
    like = "a model whose config.json says what else it is, and whose tokenizer it has"
    command.add_argument("--like", default="", metavar="FOLDER", help=like)
    quantised = "tensors that --like FOLDER has in 8 or 4 bits as there, and all in its types"
    command.add_argument("--as-read", action="store_true", help=quantised)
    stacked = "the experts of a layer in stacks, as transformers computes them; default: a tensor for each of them"
    command.add_argument("--fused", action="store_true", help=stacked)
    command.add_argument("--averaged", action="store_true", help="the averages that train.ema kept of the weights")
    command.add_argument("--adapters", action="store_true", help="the adapters of tune=lora alone, as PEFT saves them")
    tokenizer = "a file or folder; default: that of the checkpoint"
    command.add_argument("--tokenizer", default="", metavar="PATH", help=tokenizer)
    return run_command(parser, _extend_and_run, arguments, failures=(Refused, OSError))


def _extend_and_run(arguments: argparse.Namespace) -> int:
    """Import the user's modules, which register families of models, and run the command; return its exit status."""
    refuse_all(import_user_modules(arguments.extend))
    return int(arguments.run(arguments))


def _import_weights(arguments: argparse.Namespace) -> int:
    """Make a checkpoint of a model that transformers saved, with its tokenizer's files, for `python -m platform.weights
    import`; return exit status 0. Raises ConfigError unless all of the model is known."""
    if holds_adapters(arguments.source):
        storage = open_storage(arguments.url, "url")
        directory = import_adapters(arguments.source, arguments.base, storage)
        print(escape_terminal_text(f"{storage.url}/{directory}"))
        return 0
    source_model = open_importable(arguments.source, "source", drop=arguments.drop)
    storage = open_storage(arguments.url, "url")
    files, why_no_tokenizer = read_companions_and_tokenizer_lack(source_model.saved, "source")
    with refuse_full_disk("url", strip_url_secrets(arguments.url)):
        directory = import_model(source_model, storage, files)
    if why_no_tokenizer:
        print(escape_terminal_text(f"without a tokenizer: {why_no_tokenizer}"))
    print(escape_terminal_text(f"{storage.url}/{directory}"))
    return 0


def _export_weights(arguments: argparse.Namespace) -> int:
    """Write a checkpoint as a model that transformers loads, with the files of its tokenizer if there are any, for
    `python -m platform.weights export`; return exit status 0."""
    max_shard_bytes = _parse_byte_size(arguments.shard)
    storage, directory, manifest = catalogue.select_checkpoint(arguments.url)
    manifest = swap_in_averages(manifest) if arguments.averaged else manifest
    if arguments.adapters:
        return _export_adapters(arguments, storage, directory, manifest)
    like = SavedModel(arguments.like, "--like") if arguments.like else None
    if arguments.as_read and not like:
        raise ConfigError("--as-read: --like FOLDER names the model as it was read")
    length = parse_stored_model(manifest.meta.identity).length
    like_its = arguments.like if has_tokenizer(arguments.like) else ""
    companion_files = read_export_files(arguments.tokenizer or like_its, storage, directory, manifest, length)
    vocabulary = model_folder.build_vocabulary_if_readable(companion_files)
    form = arguments.family, arguments.dtype, like.config if like else None, vocabulary, arguments.fused
    export = open_exportable(storage, directory, manifest, *form, like if arguments.as_read else None)
    folder = open_storage(arguments.folder, "folder")
    new_folders = [] if "://" in arguments.folder else list_missing_directories(Path(arguments.folder).absolute())
    try:
        with refuse_full_disk("folder", strip_url_secrets(arguments.folder)):
            names = export_model(export, folder, max_shard_bytes, companion_files)
    except BaseException:
        remove_empty_directories(new_folders)
        raise
    for note in export.merged.notes if export.merged else ():
        print(escape_terminal_text(note))
    if not vocabulary:
        print("without a tokenizer: --tokenizer PATH or --like FOLDER takes one along")
    place = f"{export.family.architecture} in {strip_url_secrets(arguments.folder)}"
    print(escape_terminal_text(f"{directory}: {place}: {', '.join(names)}"))
    return 0


def _export_adapters(arguments: argparse.Namespace, storage: Storage, directory: str, manifest: Manifest) -> int:
    """Write the adapters of a checkpoint as PEFT saves them, for `export --adapters`; return exit status 0."""
    if (base := read_base(manifest)) is None:
        raise ConfigError("--adapters", directory, "holds whole weights; leave it out")
    identity = manifest.meta.identity
    stored = StoredAdapters(storage, directory, manifest, parse_stored_model(identity), parse_stored_tune(identity))
    check_tensors(manifest, stored.shapes)
    names = export_adapters(stored, base.url, open_storage(arguments.folder, "folder"))
    if left := sum(is_of_module(name, stored.model) for name in stored.adapters):
        line = f"{left} adapters of modules of multi-token prediction left out: transformers has none"
        print(escape_terminal_text(line))
    print(escape_terminal_text(f"{directory}: adapters in {strip_url_secrets(arguments.folder)}: {', '.join(names)}"))
    return 0


def _parse_byte_size(text: str) -> int:
    """Convert a size such as 5GB, of a file of exported weights, to bytes. Raises ConfigError."""
    size_match = re.fullmatch(r"(\d{1,15})(|KB|MB|GB)", text, re.ASCII)
    if not size_match or not int(size_match[1]):
        raise ConfigError("--shard", text, "must be a number of bytes, KB, MB or GB", ["5GB", "500MB"])
    return int(size_match[1]) * _UNITS[size_match[2]]


if __name__ == "__main__":
    sys.exit(main())
