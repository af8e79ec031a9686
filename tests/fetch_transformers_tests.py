"""Install the common tests of the installed Transformers as the package `transformers_tests`.

They come from its source distribution.
`make test` runs this once, in the environment that the tests run in: python tests/fetch_transformers_tests.py
"""

import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import transformers


PACKAGE = Path(sysconfig.get_path("purelib")) / "transformers_tests"
STAND_INS = Path(__file__).resolve().parent / "stand_ins"


def main() -> None:
    version = transformers.__version__
    with tempfile.TemporaryDirectory() as directory:
        command = ["download", "--quiet", "--no-deps", "--no-binary", "transformers", "--dest", directory]
        subprocess.run([sys.executable, "-m", "pip", *command, f"transformers=={version}"], check=True)
        PACKAGE.mkdir(exist_ok=True)
        with tarfile.open(next(Path(directory).glob("*.tar.gz"))) as archive:
            for member in archive.getmembers():
                path = Path(member.name)
                if len(path.parts) == 3 and path.parts[1] == "tests" and path.suffix == ".py":
                    (PACKAGE / path.name).write_bytes(archive.extractfile(member).read())
    # What the source distribution leaves out is looked up among the stand-ins.
    (PACKAGE / "__init__.py").write_text(f"__path__.append({str(STAND_INS)!r})\n")
    print(f"Common tests of transformers {version}: {PACKAGE}")


if __name__ == "__main__":
    main()
