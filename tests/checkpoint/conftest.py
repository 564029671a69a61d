"""An S3 server on loopback, over HTTP."""

import logging

import pytest


@pytest.fixture(scope="session")
def s3_endpoint():
    """URL of moto's server with an empty bucket `bucket`; skips where the development dependencies are not there."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket="bucket")
    yield url
    server.stop()


@pytest.fixture(params=["local", "memory", "s3"])
def url(request, tmp_path, monkeypatch) -> str:
    """An empty place on each kind of storage."""
    if request.param == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_endpoint"))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        return f"s3://bucket/{tmp_path.name}"
    return f"memory://{tmp_path.name}" if request.param == "memory" else str(tmp_path / "new" / "directory")
