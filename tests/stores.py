"""Stores that tests write traces to: fsspec's memory, and an S3 server in this process."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest

_COUNT = itertools.count()
BUCKET = "traces"


def memory_store() -> str:
    """An address below which nothing is yet."""
    return f"memory://detdiff-{next(_COUNT)}"


@pytest.fixture(scope="session")
def s3_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bucket of a server on the loopback interface; s3fs finds it by the environment, as a user's does."""
    pytest.importorskip("s3fs", reason="needs the extra s3-server: s3fs")
    server_of = pytest.importorskip(
        "moto.server", reason="needs the extra s3-server: moto[s3], flask, flask-cors"
    )
    import s3fs

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("FSSPEC_S3_ENDPOINT_URL", f"http://{host}:{port}"),
        ):
            patch.setenv(name, value)
        import fsspec.config

        fsspec.config.set_conf_env(fsspec.config.conf)
        s3fs.S3FileSystem().mkdir(BUCKET)
        yield f"s3://{BUCKET}"
        fsspec.config.conf.pop("s3", None)
    server.stop()


@pytest.fixture(params=("memory", "s3"))
def store(request: pytest.FixtureRequest) -> str:
    """An empty folder of each store."""
    if request.param == "memory":
        return memory_store()
    return f"{request.getfixturevalue('s3_store')}/detdiff-{next(_COUNT)}"
