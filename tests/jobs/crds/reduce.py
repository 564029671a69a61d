"""Reduced copies of KubeRay's CRDs for the tests of manifests: `python -m tests.jobs.crds.reduce VERSION FILE` writes
VERSION.json.gz beside this file: the openAPIV3Schema of RayJob ray.io/v1, without descriptions, same parts once.

FILE is helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml of https://github.com/ray-project/kuberay at the tag
vVERSION. KubeRay is Copyright the KubeRay Authors, under the Apache License 2.0; so are the reduced copies.
"""

import gzip
import json
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent


def reduced(schema, definitions):
    """`schema`, strict, as JSON Schema that refers to `definitions` (text -> number) for each of its larger parts."""
    if isinstance(schema, list):
        return [reduced(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: reduced(part, definitions) for name, part in value.items()}
        elif key not in ("description", "default") and not key.startswith("x-kubernetes-"):
            found[key] = reduced(value, definitions)
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-embedded-resource")
    if "properties" in found and not open_ended and "additionalProperties" not in found:
        found["additionalProperties"] = False  # the API server drops such a field, and says so, or not
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("anyOf", None)
        found["type"] = ["integer", "string"]
    text = json.dumps(found, sort_keys=True)
    if len(text) < 120:
        return found
    return {"$ref": f"#/$defs/{definitions.setdefault(text, len(definitions))}"}


def reduce_crd(text):
    """The schema of RayJob ray.io/v1 in the text of a CRD."""
    crd = yaml.load(text, yaml.CSafeLoader)
    [version] = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    definitions = {}
    top = reduced(version["schema"]["openAPIV3Schema"], definitions)
    return {**top, "$defs": {str(number): json.loads(text) for text, number in definitions.items()}}


if __name__ == "__main__":
    data = json.dumps(reduce_crd(Path(sys.argv[2]).read_text()), sort_keys=True, separators=(",", ":"))
    with gzip.GzipFile(HERE / f"{sys.argv[1]}.json.gz", "wb", mtime=0) as out:
        out.write(data.encode())
