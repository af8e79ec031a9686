"""Install a headless Chromium for the tests of the attention explorer, from the npm package @sparticuz/chromium.

Run once by `make test`, in the environment that the tests run in: python tests/fetch_chromium.py
Elsewhere than on Linux x86-64, and where the package cannot be fetched or lacks a library of the system, it says so
and those tests are skipped.
"""

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

import brotli


PACKAGE = "https://registry.npmjs.org/@sparticuz/chromium/-/chromium-147.0.0.tgz"
SHA256 = "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b"
CHROMIUM = Path(sys.prefix) / "chromium"


def main() -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print(
            f"No Chromium for {platform.system()} {platform.machine()}: the explorer's page is not tried in a browser."
        )
        return
    try:
        with urllib.request.urlopen(PACKAGE, timeout=60) as response:
            package = response.read()
    except OSError as error:
        print(f"No Chromium, so the explorer's page is not tried in a browser: {PACKAGE}: {error}")
        return
    if (found := hashlib.sha256(package).hexdigest()) != SHA256:
        sys.exit(f"{PACKAGE} has the SHA-256 {found}, where {SHA256} was expected. Nothing was installed.")
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        program = brotli.decompress(archive.extractfile("package/bin/chromium.br").read())
    part = CHROMIUM.with_name("chromium.part")
    part.write_bytes(program)
    part.chmod(0o755)
    started = subprocess.run([part, "--version"], capture_output=True, text=True)
    if started.returncode != 0:
        part.unlink()
        print(f"No Chromium, so the explorer's page is not tried in a browser: {started.stderr.strip()}")
        return
    part.replace(CHROMIUM)
    print(f"Chromium of @sparticuz/chromium 147.0.0: {CHROMIUM}")


if __name__ == "__main__":
    main()
