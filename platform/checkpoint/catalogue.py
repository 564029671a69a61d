"""The checkpoints on a storage: making new ones, finding the newest that can be trusted, and deleting old ones.

- `Lease`: only the newest driver of a run may write.
- `read_pieces`: stored blocks, each verified by its SHA-256, read in large contiguous ranges.
- `write_carried_files`: files that a checkpoint carries beside its tensors, such as the tokenizer of its model. They
  lie in its directory, and its manifest has their hashes among the values that are no tensors. A run goes on without
  them, so that damage to them does not make a checkpoint corrupt; a reader of them gets Refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, NamedTuple

from platform.boundary import documents, schema
from platform.boundary.local_files import UNKNOWN
from platform.boundary.redaction import redact_secrets, strip_url_secrets
from platform.boundary.schema import EntryBounds, Malformed, Text
from platform.boundary.sealed_blocks import FileRange, hash_blocks
from platform.boundary.storage import Storage, open_storage, read_note, write_note
from platform.boundary.terminal import show_phase
from platform.checkpoint import manifest as manifests
from platform.checkpoint.blocks import Piece, Shapes
from platform.checkpoint.manifest import NAME, Corrupt, FileReport, Manifest, Meta, OtherFormat, Refused, StoredBlock
from platform.config.fields import Config
from platform.config.groups import RESUME
from platform.config.identity import find_checkpoint_url

# The lease on a storage: only the newest driver of a run may write, not an older one that is still alive.
#
# A driver that starts writes `lease-EPOCH-TOKEN`, with an epoch above all that it finds there. The highest name holds
# the lease, at any moment and for everybody who looks, so neither clocks nor renaming are needed. An older driver
# notices when it is about to commit, and stops. At that moment it may still write an attempt directory of its own,
# which harms no other: see `platform.checkpoint.catalogue`.

_NAME = r"lease-([0-9]{6,18})-([0-9a-f]{8})"


class Superseded(Exception):
    """Signals that another driver has taken the lease on the run's checkpoints: this one may write no more."""


class Lease:
    """Lease of one driver on one storage, from `take` on. `epoch` rises with every driver."""

    def __init__(self, storage: Storage, name: str, epoch: int, owner: str):
        """Construct the lease that the file `name` on a storage of checkpoints stands for; `take` writes that file."""
        self._storage, self._name, self.epoch, self._owner = storage, name, epoch, owner

    @classmethod
    def take(cls, storage: Storage, owner: str) -> Lease:
        """Take the lease on a storage of checkpoints, superseding its holder. `owner`: text for people that names this
        driver. Raises OSError."""
        older = _match_lease_files(storage)
        epoch = max((int(match[1]) for match in older), default=0) + 1
        lease = cls(storage, f"lease-{epoch:06d}-{secrets.token_hex(4)}", epoch, owner)
        if not re.fullmatch(_NAME, lease._name):
            raise OSError(f"{storage.url}: no lease is above {max(m[0] for m in older)}, which no driver wrote")
        write_note(storage, lease._name, owner)
        for match in older:
            with suppress(OSError):
                read_note(storage, match[0])  # raises unless it is a file; else it is no lease
                storage.delete(match[0])
        return lease

    def check_held(self) -> None:
        """Raise Superseded if another driver holds the lease on the storage of checkpoints now, OSError if the storage
        does not say. If its file was removed, take it again."""
        if not _match_lease_files(self._storage):
            write_note(self._storage, self._name, self._owner)
        newest = max(_match_lease_files(self._storage), key=lambda match: (int(match[1]), match[2]), default=None)
        if newest is None or newest[0] != self._name:
            holder = "nobody" if newest is None else self._describe_holder(newest[0])
            raise Superseded(f"this driver's lease (epoch {self.epoch}) on {self._storage.url} is held by {holder} now")

    def _describe_holder(self, name: str) -> str:
        """Return the driver that a lease file on the checkpoints' storage names, with the file, or the file alone."""
        with suppress(OSError):
            return f"{read_note(self._storage, name)} ({name})"
        return name


def _match_lease_files(storage: Storage) -> list[re.Match[str]]:
    """Return the matches of all names of lease files on a storage of checkpoints: (epoch, token) each."""
    matches = (re.fullmatch(_NAME, name) for name in storage.list_sizes(""))
    return [match for match in matches if match and match[1] == f"{int(match[1]):06d}"]


VALUE = "files"  # of `Meta.values`: name of a file -> its SHA-256
_LARGEST = 1 << 30  # bytes of a file that is read
_File = Annotated[str, Text(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", "the name of a carried file")]
_Hash = Annotated[str, Text(r"[0-9a-f]{64}", "a SHA-256")]

CarriedFiles = Mapping[str, bytes]


def hash_carried_files(files: CarriedFiles) -> dict[str, dict[str, str]]:
    """Return {"files": {name: SHA-256}} of the files that a checkpoint carries, for its metadata; {} for none."""
    return {VALUE: {name: sha256(raw).hexdigest() for name, raw in files.items()}} if files else {}


def write_carried_files(storage: Storage, directory: str, files: CarriedFiles) -> None:
    """Write the files that the checkpoint in `directory` carries. Raises OSError."""
    for name, raw in files.items():
        storage.write(f"{directory}/{name}", [memoryview(raw)])


def read_carried_files(storage: Storage, directory: str, manifest: Manifest) -> dict[str, bytes]:
    """Read the files that a checkpoint carries, by name. Raises Refused if one has changed, OSError."""
    try:
        kind = Annotated[dict[_File, _Hash], EntryBounds(0, 100)]
        expected_hashes = schema.parse_value(kind, manifest.meta.values.get(VALUE, {}))
    except Malformed as error:
        raise Refused(f"{directory}: its {VALUE}: {error}") from None
    sizes, contents = storage.list_sizes(directory) if expected_hashes else {}, {}
    for name, digest in expected_hashes.items():
        if sizes.get(name, 0) > _LARGEST:
            raise Refused(f"{directory}/{name} has {sizes[name]} bytes, more than any that is written")
        contents[name] = bytes(storage.read(f"{directory}/{name}", 0, _LARGEST))
        if sha256(contents[name]).hexdigest() != digest:
            raise Refused(f"{directory}/{name} is not what was written")
    return contents


def list_stored_pieces(manifest: Manifest, names: Iterable[str] | None = None) -> list[Piece[StoredBlock]]:
    """Return the stored blocks of the tensors `names` of a checkpoint (default: of all) as pieces to read, each as a
    whole, ordered by file and by place in it."""
    stored_tensors = [manifest.tensors[name] for name in (manifest.tensors if names is None else names)]
    pieces = [Piece(t.name, t.dtype, block.box, block) for t in stored_tensors for block in t.blocks]
    return sorted(pieces, key=lambda piece: (piece.source.file, piece.source.at, piece.nbytes))


def read_pieces(
    storage: Storage,
    directory: str,
    pieces: Sequence[Piece[StoredBlock]],
    into: Sequence[memoryview] = (),
    count: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Read stored blocks of a checkpoint, in the order of `list_stored_pieces`, into the memory given for each, and
    verify them; without memory nothing is kept. `count`: function that gets the bytes of each block once it is read.
    Raises Corrupt if they are not the written bytes, Refused if the checkpoint is deleted meanwhile, OSError if the
    storage fails; the memory is then undefined."""
    spans = [FileRange(f"{directory}/{piece.source.file}", piece.source.at, piece.nbytes) for piece in pieces]
    done = 0
    try:
        with closing(hash_blocks(storage, spans, into)) as digests:
            for piece, digest in zip(pieces, digests, strict=True):
                block, done = piece.source, done + 1
                if digest != block.sha256:
                    byte_range = f"bytes {block.at} to {block.at + piece.nbytes}"
                    raise Corrupt(f"{block.file}: {byte_range} ({piece.name} {piece.box}) are not what was written")
                count(piece.nbytes)
    except FileNotFoundError:
        if NAME not in storage.list_sizes(directory):
            raise Refused("it was deleted while it was read") from None
        raise Corrupt(f"{pieces[done].source.file} is missing") from None


_DIRECTORY = r"step-([0-9]{8,15})-([0-9]{6,15})-([0-9a-f]{6})"
_LOOKS = 5  # times that a storage is listed if it changes while it is read
SAVED = "; a run saves its last step, and others with checkpoint.every=STEPS"
BAD = "BAD.txt"  # holds the reason in a quarantined checkpoint. Removing it by hand lifts the quarantine


class Attempt(NamedTuple):
    """Directory `step-STEP-NUMBER-TOKEN` of one attempt at a checkpoint. Numbers only grow, so they order attempts
    independently of clocks and of the step from which a run resumed; the token distinguishes two writers at once."""

    number: int
    step: int
    token: str

    @property
    def directory_name(self) -> str:
        """Return the name of the directory of this attempt at a checkpoint: step-STEP-NUMBER-TOKEN."""
        return f"step-{self.step:08d}-{self.number:06d}-{self.token}"


def list_attempts(storage: Storage) -> list[Attempt]:
    """List the attempts at a checkpoint on the storage, complete or not, newest first; skip other names."""
    matches = (re.fullmatch(_DIRECTORY, name) for name in storage.list_sizes(""))
    named = ((m[0], Attempt(int(m[2]), int(m[1]), m[3])) for m in matches if m)
    return sorted((attempt for name, attempt in named if attempt.directory_name == name), reverse=True)


def split_url(url: str) -> tuple[str, str | None]:
    """Split a checkpoint's URL into (URL of its storage, directory); for a storage or a run, directory is None."""
    folder, _, name = url.rstrip("/").rpartition("/")
    return (folder or ".", name) if re.fullmatch(_DIRECTORY, name) else (_find_storage_of_run(url) or url, None)


def find_resume_source(config: Config) -> tuple[str, str | None]:
    """Return which checkpoint a run resumes from: the URL of the checkpoint storage, by default the one that it saves
    to, and the checkpoint's name in it, None for the newest."""
    resume = config.checkpoint.resume
    return (find_checkpoint_url(config), None) if resume in RESUME else split_url(resume)


def _find_storage_of_run(directory: str) -> str:
    """Return the URL of the storage of checkpoints that the run in a directory saves to, "" if there is none in it."""
    path = Path(directory).expanduser()
    with suppress(Malformed, OSError):
        config = schema.parse_value(Config, documents.parse_yaml(documents.read_bytes(path / "config.yaml")))
        return config.checkpoint.url or str(path / "checkpoints")
    return ""


def select_checkpoint(url: str, key: str = "url", none_reason: str = "") -> tuple[Storage, str, Manifest]:
    """Return the storage, directory and manifest of the checkpoint that a URL names, or of the newest good one in the
    storage that it names. Quarantines nothing. Raises ConfigError, naming the configuration key `key`, for a URL that
    no storage has; Refused where there is no checkpoint, with the reason `none_reason`, by default that the URL holds
    none; OSError."""
    storage_url, name = split_url(url)
    storage = open_storage(storage_url, key)
    if name:
        return storage, name, load_manifest(storage, name)
    selection = find_newest_checkpoint(storage, verifies_bytes=False, quarantines=False)
    if selection.directory is None or selection.manifest is None:
        reasons = "; ".join(f"{directory}: {reason}" for directory, reason in selection.refused)
        none_reason = none_reason or f"{strip_url_secrets(url)}: holds no checkpoint"
        raise Refused(f"{none_reason}{f' that can be read: {reasons}' if reasons else SAVED}")
    return storage, selection.directory, selection.manifest


def choose_attempt_directory(storage: Storage, step: int) -> str:
    """Choose the name of the directory for a new attempt at a checkpoint of training step `step`, numbered above all
    that the storage has. Writes nothing. Raises OSError if no number is left."""
    newest = next(iter(list_attempts(storage)), Attempt(0, 0, ""))
    name = Attempt(newest.number + 1, step, secrets.token_hex(3)).directory_name
    if not re.fullmatch(_DIRECTORY, name):
        raise OSError(f"{storage.url}: no number is above that of {newest.directory_name}, which no driver wrote")
    return name


def commit_checkpoint(
    storage: Storage,
    directory: str,
    tensors: Shapes,
    reports: Sequence[FileReport],
    meta: Meta,
    guard: Callable[[], None] = lambda: None,
) -> Manifest:
    """Make a checkpoint of what the workers wrote, if it is complete: the manifest is written last.

    `tensors`: name -> global shape of everything that belongs in it; `reports`: the results of `FileImage.write_file`.
    `guard` is called just before the manifest is written, and raises if it must not be. Raises Refused with the reason
    (a hole, an overlap, a file that differs from its report), OSError.
    """
    manifest = Manifest.build_from_reports(meta, reports)
    manifests.check_tensors(manifest, tensors)
    if extra := sorted(manifest.tensors.keys() - tensors.keys()):
        raise Refused(f"the workers wrote {extra[0]}, which is no part of the state")
    manifest = replace(manifest, tensors={name: manifest.tensors[name] for name in tensors})  # in the model's order
    encoded = manifest.encode()
    Manifest.decode(encoded)  # refuse now what no reader would accept, while an older checkpoint still exists
    _check_files(storage, directory, manifest)
    guard()
    storage.write(f"{directory}/{manifests.NAME}", [memoryview(encoded)])
    return manifest


def load_manifest(storage: Storage, directory: str) -> Manifest:
    """Read the manifest of the checkpoint in `directory`, and check everything about the checkpoint that can be checked
    without reading its blocks.

    Raises Refused if it cannot be used, and its subclass Corrupt only if it was not being deleted meanwhile; OSError if
    the storage fails.
    """
    names = storage.list_sizes(directory)
    if BAD in names:
        raise Refused(f"quarantined: {read_note(storage, f'{directory}/{BAD}')}")
    if manifests.NAME not in names:
        raise Refused(f"incomplete, or not a checkpoint: it has no {manifests.NAME}")
    if names[manifests.NAME] > manifests.LARGEST:
        raise Corrupt(f"{manifests.NAME} has {names[manifests.NAME]} bytes, more than any that is written")
    manifest = Manifest.decode(bytes(storage.read(f"{directory}/{manifests.NAME}", 0, manifests.LARGEST + 1)))
    try:
        _check_files(storage, directory, manifest)
        if (named := re.fullmatch(_DIRECTORY, directory)) and int(named[1]) != manifest.meta.step:
            raise Refused(f"{manifests.NAME} is of step {manifest.meta.step}, its directory of another")
    except Refused as error:
        if manifests.NAME not in storage.list_sizes(directory):  # `delete_checkpoint` deletes it first
            raise Refused("it was deleted while it was read") from None
        raise Corrupt(str(error)) from None
    return manifest


def verify_checkpoint(storage: Storage, directory: str) -> Manifest:
    """Verify every byte of the checkpoint in `directory`, after the checks of `load_manifest`; return its manifest."""
    manifest = load_manifest(storage, directory)
    with show_phase(f"verifying {directory}", manifest.nbytes, "B") as shown:
        read_pieces(storage, directory, list_stored_pieces(manifest), count=shown.count_done)
    return manifest


def _check_files(storage: Storage, directory: str, manifest: Manifest) -> None:
    """Raise Refused if a manifest contradicts itself, or a block file that it lists is missing or of another size;
    OSError if a file cannot be inspected."""
    manifests.refuse_faults(manifest.list_faults())
    file_sizes = storage.list_sizes(directory)
    for name, size in manifest.files.items():
        if file_sizes.get(name) != size:
            if file_sizes.get(name) == UNKNOWN:
                raise OSError(f"{directory}/{name} cannot be looked at")
            fault = f"has {file_sizes[name]} bytes instead of {size}" if name in file_sizes else "is missing"
            raise Refused(f"{name} {fault}")


def quarantine_checkpoint(storage: Storage, directory: str, reason: str) -> None:
    """Mark a checkpoint as unusable, for `reason`. Deletes nothing: people may want to look at it."""
    write_note(storage, f"{directory}/{BAD}", redact_secrets(reason))


@dataclass(frozen=True)
class Selection:
    """Checkpoint of a storage that can be trusted, or none; and the newer ones that were refused: (directory, reason).

    `sound`: the refused directories that may be undamaged: they are of another format, or the storage failed.
    """

    storage: Storage
    directory: str | None
    manifest: Manifest | None
    refused: tuple[tuple[str, str], ...] = ()
    sound: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Return the step of the selected checkpoint, the number of updates in it, 0 if none is selected."""
        return self.manifest.meta.step if self.manifest else 0

    @property
    def url(self) -> str:
        """Return the URL of the selected checkpoint: its directory in the storage."""
        return f"{self.storage.url}/{self.directory}"


def find_newest_checkpoint(storage: Storage, *, verifies_bytes: bool = True, quarantines: bool = True) -> Selection:
    """Find the newest intact checkpoint; quarantine newer ones that are corrupt.

    `verifies_bytes`: read and verify every byte now; else that is left to `restore`, which verifies what it reads.
    `quarantines`: quarantine, which only the driver with the lease may do. Checkpoints that are incomplete, of another
    format or unreadable today are skipped and not marked. Raises OSError if the storage cannot be listed."""
    for _ in range(_LOOKS):
        listed = list_attempts(storage)
        selection = _select_first_trusted(storage, listed, verifies_bytes, quarantines)
        if selection.manifest or list_attempts(storage) == listed:
            break  # else the listed ones were superseded and deleted while they were read: look again
    return selection


def _select_first_trusted(
    storage: Storage, candidates: Sequence[Attempt], verifies_bytes: bool, quarantines: bool
) -> Selection:
    """Select the first of the attempts `candidates` whose checkpoint can be trusted, with the reasons against earlier
    ones. `verifies_bytes`: read and verify every byte; `quarantines`: quarantine corrupt checkpoints."""
    refused: list[tuple[str, str]] = []
    sound: list[str] = []
    for attempt in candidates:
        directory = attempt.directory_name
        try:
            manifest = (verify_checkpoint if verifies_bytes else load_manifest)(storage, directory)
            return Selection(storage, directory, manifest, tuple(refused), tuple(sound))
        except Corrupt as error:
            refused.append((directory, str(error)))
            if quarantines:
                with suppress(OSError):  # the storage may be read-only
                    quarantine_checkpoint(storage, directory, str(error))
        except (Refused, OSError) as error:
            refused.append((directory, str(error)))
            sound += [directory] if isinstance(error, OtherFormat | OSError) else []
    return Selection(storage, None, None, tuple(refused), tuple(sound))


def find_lowest_loss(complete: Sequence[Attempt], losses: Mapping[int, float]) -> list[Attempt]:
    """Return the complete checkpoint at the lowest validation loss, as a list; `losses`: step -> loss; [] for none."""
    evaluated = [attempt for attempt in complete if attempt.step in losses]
    return sorted(evaluated, key=lambda attempt: (losses[attempt.step], attempt.step))[:1]


def list_dispensable(
    complete: Sequence[Attempt], last: int, every: int, losses: Mapping[int, float] | None = None
) -> list[Attempt]:
    """Return the complete checkpoints (newest first) that may be deleted: all but the `last` newest (at least one), the
    newest at every step that is a multiple of `every` (0: none), and the checkpoint that is the `find_lowest_loss` by
    `losses`.
    """
    keep = {*complete[: max(1, last)], *find_lowest_loss(complete, losses or {})}
    if every:
        keep |= set({a.step: a for a in reversed(complete) if a.step % every == 0}.values())
    return [a for a in complete if a not in keep]


def prune_checkpoints(
    storage: Storage, last: int, every: int = 0, losses: Mapping[int, float] | None = None
) -> list[str]:
    """Delete the storage's checkpoints that are neither among the newest `last` nor at a step that is a multiple of
    `every` (0: no such step) nor the `find_lowest_loss` by `losses`, and the remains of attempts that never became
    one; return their names.

    Only checkpoints that `load_manifest` accepts are counted, so that a damaged one never displaces a good one.
    Quarantined ones stay, and attempts newer than the newest complete one, which may be under way. Raises OSError,
    having deleted nothing, if any cannot be inspected.
    """
    complete, torn = [], []
    for attempt in list_attempts(storage):
        names = storage.list_sizes(attempt.directory_name)
        if BAD in names:
            continue
        if manifests.NAME not in names:
            torn.append(attempt)
            continue
        try:
            load_manifest(storage, attempt.directory_name)
            complete.append(attempt)
        except Refused:
            continue
    old = [a for a in torn if complete and a < complete[0]] + list_dispensable(complete, last, every, losses)
    for attempt in old:
        delete_checkpoint(storage, attempt.directory_name)
    return [a.directory_name for a in old]


def delete_checkpoint(storage: Storage, directory: str) -> None:
    """Delete a checkpoint from its storage, manifest first: a crash in between leaves an incomplete one."""
    storage.delete(f"{directory}/{manifests.NAME}")
    storage.delete(directory)
