"""Files that a checkpoint carries beside its tensors, such as the tokenizer of its model.

They lie in its directory, and its manifest has their hashes among the values that are no tensors. A run goes on without
them, so that damage to them does not make a checkpoint corrupt; a reader of them gets Refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated

from platform.boundary import schema
from platform.boundary.files.file_storage import Storage
from platform.boundary.schema import Malformed, Many, Text
from platform.checkpoint.storage.manifest import Manifest, Refused

VALUE = "files"  # of `Meta.values`: name of a file -> its SHA-256
_LARGEST = 1 << 30  # bytes of a file that is read
_File = Annotated[str, Text(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", "the name of a carried file")]
_Hash = Annotated[str, Text(r"[0-9a-f]{64}", "a SHA-256")]

CarriedFiles = Mapping[str, bytes]


def hashes(files: CarriedFiles) -> dict[str, dict[str, str]]:
    """Return {"files": {name: SHA-256}} of the files that a checkpoint carries, for its metadata; {} for none."""
    return {VALUE: {name: sha256(raw).hexdigest() for name, raw in files.items()}} if files else {}


def write_carried(storage: Storage, directory: str, files: CarriedFiles) -> None:
    """Write the files that the checkpoint in `directory` carries. Raises OSError."""
    for name, raw in files.items():
        storage.write(f"{directory}/{name}", [memoryview(raw)])


def read_carried(storage: Storage, directory: str, manifest: Manifest) -> dict[str, bytes]:
    """Read the files that a checkpoint carries, by name. Raises Refused if one has changed, OSError."""
    try:
        kind = Annotated[dict[_File, _Hash], Many(0, 100)]
        wanted = schema.read(kind, manifest.meta.values.get(VALUE, {}))
    except Malformed as error:
        raise Refused(f"{directory}: its {VALUE}: {error}") from None
    sizes, found = storage.list(directory) if wanted else {}, {}
    for name, digest in wanted.items():
        if sizes.get(name, 0) > _LARGEST:
            raise Refused(f"{directory}/{name} has {sizes[name]} bytes, more than any that is written")
        found[name] = bytes(storage.read(f"{directory}/{name}", 0, _LARGEST))
        if sha256(found[name]).hexdigest() != digest:
            raise Refused(f"{directory}/{name} is not what was written")
    return found
