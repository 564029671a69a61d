"""Reduced copies of the schemas of others for the tests of manifests, without descriptions, same parts once.

`python -m tests.jobs.crds.reduce kuberay VERSION FILE` writes kuberay-VERSION.json.gz beside this file, RayJob
ray.io/v1. FILE is helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml of https://github.com/ray-project/kuberay at
the tag vVERSION. KubeRay is Copyright the KubeRay Authors, under the Apache License 2.0; so are the reduced copies.

`python -m tests.jobs.crds.reduce kubernetes VERSION FILE` writes kubernetes-VERSION.json.gz, Job batch/v1 and Service
v1. FILE is _definitions.json of vVERSION-local-strict in the package kubernetes-validate (PyPI), made of the OpenAPI
definitions of https://github.com/kubernetes/kubernetes: Copyright the Kubernetes Authors, under the same licence.
"""

import gzip
import json
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
KINDS = {"Job": "io.k8s.api.batch.v1.Job", "Service": "io.k8s.api.core.v1.Service"}


def reduced(schema, definitions):
    """`schema`, strict, as JSON Schema that refers to `definitions` (text -> number) for each of its larger parts."""
    if isinstance(schema, list):
        return [reduced(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {}
    for key, value in schema.items():
        if key == "properties":
            strict[key] = {name: reduced(part, definitions) for name, part in value.items()}
        elif key not in ("description", "default") and not key.startswith("x-kubernetes-"):
            strict[key] = reduced(value, definitions)
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-embedded-resource")
    if "properties" in strict and not open_ended and "additionalProperties" not in strict:
        strict["additionalProperties"] = False  # the API server drops such a field, and says so, or not
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("anyOf", None)
        strict["type"] = ["integer", "string"]
    text = json.dumps(strict, sort_keys=True)
    if len(text) < 120:
        return strict
    return {"$ref": f"#/$defs/{definitions.setdefault(text, len(definitions))}"}


def reduce_crd(text):
    """The schema of RayJob ray.io/v1 in the text of a CRD."""
    crd = yaml.load(text, yaml.CSafeLoader)
    [version] = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    definitions = {}
    top = reduced(version["schema"]["openAPIV3Schema"], definitions)
    return {**top, "$defs": {str(number): json.loads(text) for text, number in definitions.items()}}


def reduce_definitions(text):
    """The schema of the KINDS in the text of Kubernetes' definitions, and what they refer to."""
    everything = json.loads(text)["$defs"]
    definitions, todo = {}, [*KINDS.values()]
    while todo:
        if (name := todo.pop()) not in definitions:
            definitions[name] = _bare(everything[name], todo)
    kinds = [{"$ref": f"#/$defs/{name}", "required": ["apiVersion", "kind", "spec"]} for name in KINDS.values()]
    return {"oneOf": kinds, "$defs": definitions}


def _bare(schema, todo):
    """A schema without descriptions; the definitions that it refers to are added to `todo`."""
    if isinstance(schema, list):
        return [_bare(part, todo) for part in schema]
    if not isinstance(schema, dict):
        return schema
    bare = {}
    for key, value in schema.items():
        if key == "properties":
            bare[key] = {name: _bare(part, todo) for name, part in value.items()}
        elif key == "$ref":
            todo.append(value.rpartition("/")[2])
            bare[key] = f"#/$defs/{todo[-1]}"
        elif key not in ("description", "default") and not key.startswith("x-kubernetes-"):
            bare[key] = _bare(value, todo)
    return bare


REDUCE = {"kuberay": reduce_crd, "kubernetes": reduce_definitions}


if __name__ == "__main__":
    whose, version, file = sys.argv[1:]
    data = json.dumps(REDUCE[whose](Path(file).read_text()), sort_keys=True, separators=(",", ":"))
    with gzip.GzipFile(HERE / f"{whose}-{version}.json.gz", "wb", mtime=0) as out:
        out.write(data.encode())
