"""Valid and invalid requests, generated from /openapi.json."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.http_client import ServerProcess, ask, record

NUM_REQUESTS = 10_000
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_generated_requests_meet_the_document(folders: dict[str, str], tmp_path: Path) -> None:
    """Run all phases of schemathesis with increasing seeds; the server survives without errors."""
    pytest.importorskip("schemathesis")
    server = ServerProcess(*(f"{name}={folder}" for name, folder in folders.items()))
    process, sent, seed, memory_before = server.server_pid, 0.0, 0, 0.0
    while sent < NUM_REQUESTS:
        seed += 1
        command = [
            *(str(Path(sys.executable).parent / "schemathesis"), "run", f"http://127.0.0.1:{server.port}/openapi.json"),
            *("--max-examples", "50", "--seed", str(seed), "--generation-database", "none", "--no-color"),
            *("--checks", ",".join(CHECKS)),
        ]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0 and not re.search("[Nn]etwork error", result.stdout), result.stdout[-6000:]
        memory_before = memory_before or server.memory()
        sent = server.gauge("heedful_requests_total")
        record("generated requests", seed=seed, requests=sent, failed=server.gauge("heedful_failed_inputs_total"))
    failures = [line for line in server.lines if '"status": 500' in line]
    record(
        "generated requests",
        requests=sent,
        status_500=len(failures),
        seeds=seed,
        memory_MB=[memory_before, server.memory()],
    )
    assert not failures and server.gauge("heedful_failed_inputs_total") == 0 and server.server_pid == process
    assert ask(server.port, "/ready").json == {"ready": True} and server.stop() == 0
