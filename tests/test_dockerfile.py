"""The instructions of the Dockerfile, tried without Docker: its user, its command line and its health check."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support.http_client import ServerProcess

ROOT = Path(__file__).parents[1]


def instructions() -> dict[str, str]:
    """Return the last argument of each instruction."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [line.partition(" ") for line in lines]
    return {name: argument for name, _, argument in pairs}


def test_the_image_has_what_an_index_needs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (names,) = re.findall(r"\$wheel\[(.*?)\]", instructions()["RUN"])
    installed = {re.split(r"[^\w]", line)[0] for name in names.split(",") for line in extras[name]}
    assert {"tantivy", "starlette", "uvicorn"} <= installed


def test_the_server_of_the_image_has_no_privileges_and_becomes_healthy(tmp_path: Path) -> None:
    image = instructions()
    assert image["USER"] == "heedful"
    entry, command = json.loads(image["ENTRYPOINT"]), json.loads(image["CMD"])
    assert entry == ["heedful", "serve"]
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef-0123456789abcdef\n")
    keys.chmod(0o600)
    here = {"/model": str(ROOT / "heedful" / "assets" / "heedful-mini-en"), "/keys": str(keys)}
    server = ServerProcess(*(here.get(argument, argument) for argument in command))
    try:
        check = json.loads(image["HEALTHCHECK"].partition("CMD ")[2])
        assert check[0] == "python" and ":8080/" in check[-1]
        code = check[-1].replace(":8080/", f":{server.port}/")
        assert subprocess.run([sys.executable, *check[1:-1], code], timeout=30, check=False).returncode == 0
    finally:
        server.process.terminate()
        assert server.wait(40) == 0
    ended = subprocess.run([sys.executable, *check[1:-1], code], capture_output=True, timeout=30, check=False)
    assert ended.returncode != 0, "a server that has ended is not healthy"
