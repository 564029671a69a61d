"""An Indexed Job of Kubernetes on this machine: its pods are processes, started as kubelet starts the container of the
manifest, and again as the Job's rules say. The pods' names are all this machine's own address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.harness.process_tree import descendants

ADDRESS = "127.0.0.1"
UID = "0a1b2c3d-0000-4000-8000-000000000001"


class IndexedJob:
    """One Job. `manifest`: the document of its kind; `folder`: of the pods' output; `environment`: of all pods beside
    their own."""

    def __init__(self, manifest: dict[str, Any], folder: Path, **environment: str):
        self.spec, self.folder, self.environment = manifest["spec"], folder, environment
        [self.container] = self.spec["template"]["spec"]["containers"]
        self.name = manifest["metadata"]["name"]
        self.indices = range(self.spec["completions"])
        self.pods: dict[int, subprocess.Popen[bytes]] = {}
        self.statuses: dict[int, list[int]] = {index: [] for index in self.indices}
        self.disrupted: set[int] = set()
        self.failed = False

    def variables(self, index: int) -> dict[str, str]:
        """The environment of a container, as kubelet makes it."""
        labels = {"batch.kubernetes.io/controller-uid": UID, "batch.kubernetes.io/job-completion-index": str(index)}
        fields = {"status.podIP": ADDRESS, **{f"metadata.labels['{name}']": value for name, value in labels.items()}}
        environment = {"JOB_COMPLETION_INDEX": str(index)}
        for variable in self.container["env"]:
            place = variable.get("valueFrom", {}).get("fieldRef")
            if place or "value" in variable:
                environment[variable["name"]] = fields[place["fieldPath"]] if place else variable["value"]
        return environment

    def command(self, index: int) -> list[str]:
        """The command of a container: `$(NAME)` replaced where there is such a variable, `$$` by `$`."""
        own = self.variables(index)

        def expand(match: re.Match[str]) -> str:
            return "$" if match[0] == "$$" else own.get(match[1], match[0])

        words = [
            re.sub(r"\$\$|\$\(([\w.-]+)\)", expand, word) for word in self.container["command"] + self.container["args"]
        ]
        host = f"{self.name}-0.{self.spec['template']['spec']['subdomain']}"
        assert words.count(f"--first={host}") == 1
        return [word.replace(f"--first={host}", f"--first={ADDRESS}") for word in words]  # as its DNS would

    def start(self, index: int) -> None:
        """Start the pod of an index."""
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        own = {**os.environ, **self.variables(index), **self.environment, "PATH": path, "HOME": os.environ["HOME"]}
        with (self.folder / f"pod-{index}").open("ab") as out:
            self.pods[index] = subprocess.Popen(
                self.command(index), cwd=self.folder, env=own, stdout=out, stderr=out, start_new_session=True
            )

    def lose(self, index: int) -> None:
        """Lose a pod with its node: everything in it is killed at once."""
        pod = self.pods[index]
        for pid in [pod.pid, *descendants(pod.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pod.wait(10)
        self.disrupted.add(index)

    def evict(self, index: int) -> None:
        """Tell a pod to go, as kubelet does."""
        self.disrupted.add(index)
        self.pods[index].send_signal(signal.SIGTERM)

    def look(self) -> bool:
        """Do what the Job's controller does once; return True when the Job is over."""
        for index, pod in list(self.pods.items()):
            if (status := pod.poll()) is None:
                continue
            del self.pods[index]
            self.statuses[index].append(status % 256 if status >= 0 else 128 - status)
            self.failed |= bool(status) and self._rule(index, self.statuses[index][-1]) == "FailJob"
        for index in self.indices:
            done = self.statuses[index] and self.statuses[index][-1] == 0
            if not self.failed and not done and index not in self.pods:
                self.disrupted.discard(index)
                self.start(index)
        if self.failed:
            for pod in self.pods.values():
                pod.terminate()
        return not self.pods

    def _rule(self, index: int, status: int) -> str:
        """The action of the first rule of podFailurePolicy that fits a pod's end."""
        for rule in self.spec["podFailurePolicy"]["rules"]:
            condition = rule.get("onPodConditions", [{}])[0].get("type")
            if condition == "DisruptionTarget" and index in self.disrupted:
                return rule["action"]
            if status in rule.get("onExitCodes", {}).get("values", ()):
                return rule["action"]
        return "Count"

    def until(self, met: Callable[[], bool], seconds: float, keep: bool = True) -> None:
        """Let the Job run until something is so. Raises AssertionError, with what the pods have said, if that takes
        longer; or if the Job is over before. `keep`: pods that end are started again."""
        deadline = time.monotonic() + seconds
        while not met():
            assert time.monotonic() < deadline, self.said()
            over = keep and self.look()
            assert not over or met(), self.said()
            time.sleep(0.1)

    def end(self) -> None:
        """End all that is left."""
        for index in [*self.pods]:
            self.lose(index)

    def said(self) -> str:
        """The output of all pods."""
        logs = [self.folder / f"pod-{index}" for index in self.indices]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in logs if path.exists())
