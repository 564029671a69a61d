"""The checkpoint that a run resumes from, and the check that it can save; both happen before any worker starts.
`find_changed_keys` compares a resumed run's configuration with the last one: differences go to the journal and to the
user."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from platform.boundary.documents import error_line
from platform.boundary.local_files import LocalStorage, list_missing_directories, remove_empty_directories
from platform.boundary.redaction import redact_secrets, strip_url_secrets
from platform.boundary.refusals import ConfigError, refuse_all, refuse_failures
from platform.boundary.schema import Malformed
from platform.boundary.storage import Storage, open_storage
from platform.boundary.terminal import Say
from platform.checkpoint.catalogue import Selection, find_newest_checkpoint, find_resume_source, load_manifest
from platform.checkpoint.manifest import Meta, Refused
from platform.cluster import run_directory
from platform.config.fields import Config
from platform.config.groups import RESUME
from platform.config.identity import (
    HORIZON,
    complete_identity,
    find_checkpoint_url,
    find_differences,
    run_identity,
    saves_checkpoints,
    violations_of_identity,
)
from platform.monitor import Journal, events
from platform.optimizer.learning_rate import learning_rate
from platform.optimizer.optimizers import NOT_OF_FACTORED
from platform.plan.plan import Plan

ANSWER_SECONDS = 10.0  # for the first request to a storage


def find_resume_checkpoint(
    config: Config, plan: Plan | None = None, *, holds_lease: bool = False, may_start_over: bool = False
) -> Selection | None:
    """Find, as a driver starts, the checkpoint that its run is to resume from, by checkpoint.resume; return None if it
    is `never`. Only manifests are read, not the tensors. `holds_lease`: this driver holds the lease of the checkpoint
    storage, and so quarantines corrupt checkpoints; without it nothing is written. `may_start_over`: the run may start
    over at step 1 although its directory shows steps as done; `plan`: the run's, whose moments it is to have.

    Raises ConfigError if there is no checkpoint to resume from but there must be one, and if it is of a run of another
    identity.
    """
    c = config.checkpoint
    if c.resume == "never":
        return None
    url, name = find_resume_source(config)
    key = "checkpoint.url" if c.resume in RESUME else "checkpoint.resume"
    storage = open_reachable_storage(url, key)
    where = os.path.join(storage.url, name) if name else storage.url
    with refuse_failures(key, where, Refused, OSError, why="cannot be resumed from: {}"):
        if name:
            selection = Selection(storage, name, load_manifest(storage, name))
        else:
            selection = find_newest_checkpoint(storage, verifies_bytes=False, quarantines=holds_lease)
    done = 0 if selection.manifest or c.resume != "auto" or may_start_over else last_recorded_step(config)
    if selection.manifest is None and (c.resume != "auto" or selection.sound or done):  # starting over would lose them
        reasons = "".join(f"; {directory}: {reason}" for directory, reason in selection.refused)
        legal = ["checkpoint.resume=never"] if c.resume in RESUME else RESUME
        if done:
            reasons = f", though step {done} was done in run.dir={config.run.dir}{reasons}"
            legal = [*legal, "run.dir=DIRECTORY", "checkpoint.resume=CHECKPOINT"]
        raise ConfigError(key, where, f"holds no checkpoint to resume from{reasons}", legal)
    if selection.manifest:
        what = f"{selection.directory} is of another run; name another"
        refuse_all(violations_of_identity(selection.manifest.meta.identity, config, key, where, what))
        factored = plan.factored if plan else ()  # to an older version a router was no matrix
        if whole := [name for name in factored if f"{NOT_OF_FACTORED}.{name}" in selection.manifest.tensors]:
            reason = f"keeps whole second moments of {whole[0]}, and this version keeps them by row and column"
            weights = f"train.init={storage.url}/{selection.directory}"
            raise ConfigError(key, where, reason, [f"a run of its own from these weights, run.dir=DIRECTORY {weights}"])
    return selection


def last_recorded_step(config: Config) -> int:
    """Return the highest training step that the journal and metrics in the run directory show as done, 0 if none: a run
    that has steps and no checkpoint must not start over unnoticed. Raises ConfigError if the directory cannot be
    read."""
    with refuse_failures("run.dir", config.run.dir, OSError, Malformed, why="cannot be read: {}"):
        return run_directory.find_last_step(Path(config.run.dir))


def check_storage_writable(config: Config) -> None:
    """Raise ConfigError if the run, which saves checkpoints, could not write them: write a probe file to its checkpoint
    storage and delete it again."""
    if not saves_checkpoints(config):
        return
    storage = open_reachable_storage(find_checkpoint_url(config), "checkpoint.url")
    missing_folders = list_missing_directories(storage.root) if isinstance(storage, LocalStorage) else []
    name = f".probe-{secrets.token_hex(4)}"
    try:
        with refuse_failures("checkpoint.url", storage.url, OSError, why="cannot be written to: {}"):
            storage.write(name, [memoryview(b"x")])
            storage.delete(name)
    finally:
        remove_empty_directories(missing_folders)


def open_reachable_storage(url: str, key: str) -> Storage:
    """Open, as a driver starts, the storage at `url` of its run's checkpoints, list it once and return it. Raises
    ConfigError, naming the configuration key `key` that the URL is from, if it cannot be reached or has not answered
    after ANSWER_SECONDS: client libraries alone would retry for minutes."""
    outcomes: list[Storage | BaseException] = []

    def open_and_list() -> None:
        """Open and list the storage in a thread of a starting driver; keep it, or the error, for the caller."""
        try:
            storage = open_storage(url, key)
            storage.list_sizes("")
            outcomes.append(storage)
        except BaseException as error:
            outcomes.append(error)

    thread = threading.Thread(target=open_and_list, name="storage", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    outcome = outcomes[0] if outcomes else TimeoutError(f"no answer for {ANSWER_SECONDS:g} s")
    if isinstance(outcome, ConfigError):
        raise outcome
    if isinstance(outcome, BaseException):
        reason = f"cannot be reached: {outcome}"
        raise ConfigError(key, strip_url_secrets(url), reason, ["a path"]) from outcome
    return outcome


# Key -> prefixes of the keys that are composed along with it: once the key itself differs, their differences are noise.
_TABLES = {
    "tensor.scheme": ("tensor.order", "tensor.regions.", "tensor.parameters."),
    "tensor.layout": ("tensor.order", "tensor.regions.", "tensor.parameters."),
    "branch.kind": ("branch.append.", "branch.prepend.", "branch.only"),
}
_OF_ONE_COMMAND = ("run.dir", "resume.allow", "checkpoint.resume")  # choices of one launch, not properties of the run


def find_changed_keys(
    previous_config: Mapping[str, Any] | None, meta: Meta | None, config: Config, mesh: Mapping[str, int]
) -> dict[str, tuple[Any, Any]]:
    """Return the configuration keys whose values differ from the run's last launch: key -> (value there, value here).

    `previous_config`: the configuration in the run directory, None if it is new; `meta`: metadata of the checkpoint
    that the run resumes from, which holds the run's identity and its mesh (compared as mesh.AXIS, only if
    `previous_config` is None); `mesh`: axis -> size in today's plan.
    """
    differing = find_differences(complete_identity(meta.identity), run_identity(config)) if meta else {}
    if meta and not previous_config:
        differing |= find_differences({"mesh": meta.plan.get("mesh", mesh)}, {"mesh": mesh})
    if previous_config:
        differing |= find_differences(redact_secrets(previous_config), redact_secrets(config.to_dict()))
    came_along = tuple(part for key, parts in _TABLES.items() if key in differing for part in parts)
    return {key: pair for key, pair in differing.items() if not key.startswith((*came_along, *_OF_ONE_COMMAND))}


def report_code_changes(now: Mapping[str, str], journal: Journal, say: Say) -> None:
    """Report how the code of this driver, `now`, differs from the last driver's: a `changed` event in the journal and
    one line per name to the user. Nothing is refused: a run may continue with another version of the code."""
    starts = [event.code for event in journal.read_events() if isinstance(event, events.Starting) and event.code]
    before = starts[-1] if starts else now
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        journal.write(events.Changed(keys={f"code.{name}": (before.get(name), now.get(name)) for name in names}))
    for name in names:
        say(f"changed  code of {name}: {before.get(name, 'none')} before, {now.get(name, 'none')} here")


def report_changed_keys(
    changed_keys: Mapping[str, tuple[Any, Any]], journal: Journal, say: Say, effects: Sequence[str] = ()
) -> None:
    """Report a resumed run's changes of keys, from `find_changed_keys`, in the journal and to the user, with lines on
    their `effects`, from `describe_changed_schedule`."""
    if changed_keys:
        journal.write(events.Changed(keys=dict(changed_keys)))
    for key, (old_value, new_value) in changed_keys.items():
        say(f"changed  {key}: {old_value} there, {new_value} here")
    for line in effects:
        say(line)


JUMP = 0.1  # share by which the learning rate may differ at the step where a run goes on, unless resume.allow says so


def describe_changed_schedule(
    previous_config: Mapping[str, Any] | None, meta: Meta | None, config: Config
) -> list[str]:
    """Describe what the changes of keys since a resumed run's last launch do to its learning rate, its end and the
    order of its data, in lines for the user; [] if it is new or nothing of these changes. Arguments as of
    `find_changed_keys`. Raises ConfigError if another `train.steps` lifts or lowers the learning rate of the next step
    by more than JUMP, unless `resume.allow` has it."""
    if not (meta and previous_config):
        return []
    previous, step = Config.from_dict(dict(previous_config)), meta.step + 1
    steps, previous_steps = config.train.steps, previous.train.steps
    try:
        planned_rate = learning_rate(previous.optimizer, step, previous_steps)
        rate, uncut_rate = (learning_rate(config.optimizer, step, n) for n in (steps, previous_steps))
    except Exception as error:  # of a schedule that today's modules do not register, or with other settings
        return [f"the learning rate of step {step} is not compared with the schedule before ({error_line(error)})"]
    if abs(rate - uncut_rate) > JUMP * abs(uncut_rate) and not {"train", HORIZON} & {*config.resume.allow}:
        reason = f"the learning rate of step {step} would be {rate:.1e}, and was to be {uncut_rate:.1e}"
        legal = [previous_steps, f"resume.allow=[{','.join([*config.resume.allow, HORIZON])}]"]
        raise ConfigError(HORIZON, steps, reason, legal)
    lines = []
    if rate != planned_rate:
        was = f"by the schedule it began with it was to be {planned_rate:.1e}"
        lines.append(f"the learning rate of step {step} is {rate:.1e}; {was}")
    if steps != previous_steps:
        samples = f"step {step} goes on with sample {meta.samples} in the same order of the data"
        lines.append(f"the run ends after step {steps}, and was to end after step {previous_steps}; {samples}")
    return lines
