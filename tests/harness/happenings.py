"""An invented event of every kind."""

from typing import Any

from platform.monitor import events

EXAMPLES: dict[str, dict[str, Any]] = {  # kind -> its own fields, as they are in the file
    "timing": {
        "composed": 0.4, "planned": 0.6, "starting": 0.7, "first_process": 3.1, "ready": 3.5, "formed": 3.9,
        "running": 4.0, "first_step": 4.5, "last_step": 9.0, "ended": 9.5,
    },
    "starting": {"world_size": 4, "cluster": "processes", "device": "cpu"},
    "took_over": {"step": 7, "steps_lost": 2},
    "examined": {"numbers": [0, 4], "unsound": [4], "reasons": ["worker 4 on n: slow"], "shared": [], "seconds": 0.2},
    "refused": {"reasons": ["checkpoint.resume=x: no"]},
    "changed": {"keys": {"seed": [0, 1], "mesh.t": [None, 2]}},
    "checkpoint_refused": {"directory": "step-00000002-000001-50e40f", "reason": "corrupt"},
    "waiting": {"alive": 1, "reason": "1 of 2 workers there"},
    "hiring": {"count": 1},
    "not_started": {"number": 5, "cause": "no room"},
    "forming": {"world_size": 4, "mesh": {"stage": 1, "data": 2, "t": 2}, "plan": "ab", "reason": "", "alive": 4},
    "not_whole": {"reason": "the last two steps"},
    "not_proven": {"numbers": [4], "reasons": ["run.dir=x: cannot be written to"]},
    "barred": {"numbers": [4], "reasons": ["code of platform: other"]},
    "formed": {"workers": [{"rank": 0, "coordinates": {"data": 0}, "pid": 7, "node": "n", "number": 0}]},
    "initialised": {"weights": "mine/hf", "differences": ["model.length: 12, theirs 16"], "seconds": 0.5},
    "restored": {"step": 8, "source": "memory", "seconds": 0.25},
    "sampled": {"step": 8, "prompt": "A wolf", "text": "A wolf and two sheep"},
    "not_scored": {"step": 8, "reason": "KeyError: 'question'"},
    "learned_out": {"step": 8, "best_step": 4, "best_loss": 2.5},
    "rolled_back": {"step": 8, "steps_lost": 0, "lost_seconds": 0.0},
    "running": {"step": 9, "parameters_per_worker": 1128},
    "first_step": {"step": 1},
    "traffic": {"rows": [{"tier": "inside a node", "messages": 8, "bytes": 4096, "busiest": None}]},
    "predicted_step": {"hardware": "cpu", "seconds": 0.5, "parts": {"computing": 0.5}},
    "profiled": {"file": "runs/a/profile/steps-2-3.json.gz", "steps": [2, 3], "ranks": 2, "bytes": 4096},
    "replanning": {
        "step": 60, "predicted": 0.5, "measured": 1.5, "times": {"device": 1.1, "node": 3.0, "network": 1.0},
        "chosen": "2 workers: data 1 -> 2, t 2 -> 1", "now": 1.45, "then": 0.75,
        "gain": 700.0, "cost": 4.0, "reforms": True,
    },
    "measured_step": {"steps": 29, "seconds": 0.75, "parts": {"computing": 0.5, "rest": 0.25}},
    "injected": {"step": 4, "faults": ["4:kill:1"]},
    "spike": {"step": 4, "loss": "NaN", "grad_norm": "Infinity", "limit": 9.5, "policy": "skip", "attempt": 1},
    "undecided": {"step": 4, "tensors": [[[0, 2], "model.embedding"]]},
    "damaged": {"step": 4, "ranks": [[1, ["model.head"]]]},
    "checkpoint": {"step": 4, "directory": "step-4", "bytes": 49920, "seconds": 0.5, "useful_seconds": 0.25},
    "checkpoint_failed": {"step": 4, "directory": "", "attempt": 1, "reason": "OSError: full", "again": True},
    "checkpoint_prune_failed": {"step": 4, "reason": "OSError: no answer"},
    "superseded": {"step": 4, "reason": "another driver"},
    "slow": {"number": 3, "rank": 1, "node": "n", "ratio": 2.5},
    "notice": {"numbers": [1, 2]},
    "failure": {
        "number": 1, "rank": 3, "coordinates": {"data": 1}, "node": "n", "method": "step(9)", "kind": "died",
        "cause": "x\nby SIGKILL", "log": None, "step": 9,
    },
    "reforming": {"reason": "5 workers are there", "step": 9, "useful_seconds": 4.0},
    "released": {"lost": [3], "alive": 3, "seconds": 0.125},
    "done": {"step": 10},
    "unsaved": {"step": 10, "saved": 8},
    "drained": {"signal": "SIGTERM", "step": 10, "saved": 10, "steps_lost": 0, "lost_seconds": 0.0},
    "stopped": {"signal": "SIGTERM", "step": 10, "saved": 0, "steps_lost": 10, "lost_seconds": 2.5},
    "no_places": {"cause": "waited", "step": 0, "saved": 0},
    "cluster_lost": {"cause": "Ray is silent", "step": 4, "saved": 4},
    "gave_up": {"cause": "boom", "step": 2, "saved": 0},
    "goodput": {
        "failures": 1, "transitions": 0, "steps_lost": 0, "recoveries": [0.5], "seconds": 12.5, "useful_seconds": 1.25,
        "goodput": 0.1, "restarts": 0, "restart_seconds": 0.0,
    },
}  # fmt: skip


def happening(time: float, word: str, **changes: Any) -> events.JournalEvent:
    """Return the event that a journal's line tells of."""
    return events.parse_event({"time": time, "generation": 1, "event": word, **EXAMPLES[word], **changes})
