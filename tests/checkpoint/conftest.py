"""An S3 server on loopback, over HTTP."""

import logging

import boto3
import pytest
from moto.server import ThreadedMotoServer

KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


@pytest.fixture(scope="session")
def s3_endpoint():
    """URL of moto's server with an empty bucket `bucket`."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {name.lower(): value for name, value in KEYS.items()}
    boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys).create_bucket(Bucket="bucket")
    yield url
    server.stop()


@pytest.fixture
def s3(s3_endpoint, monkeypatch, tmp_path) -> str:
    """An empty place in the bucket. Child processes reach it too."""
    for name, value in {"AWS_ENDPOINT_URL": s3_endpoint, **KEYS}.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture(params=["local", "memory", "s3"])
def url(request, tmp_path) -> str:
    """An empty place on each kind of storage."""
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return f"memory://{tmp_path.name}" if request.param == "memory" else str(tmp_path / "new" / "directory")
