"""HTTPS, and what cannot be used for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from serving import running

from waiting import HUNG_SECONDS

pytestmark = pytest.mark.pure


def test_over_tls(tmp_path: Path) -> None:
    """A certificate of its own, made by openssl where there is one."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run([*command, "-subj", "/CN=localhost", "-keyout", key, "-out", cert], check=True, capture_output=True)
    with running(tls_cert=cert, tls_key=key) as server:
        url = server.url.replace("http://", "https://")
        assert httpx.get(f"{url}/health", verify=False, timeout=HUNG_SECONDS).status_code == 200
