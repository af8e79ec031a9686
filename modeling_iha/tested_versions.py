# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Name the versions of Transformers that this code was tested with. `setup.py` reads them too."""

import warnings
from importlib import metadata

from packaging.version import Version
from transformers.utils.versions import require_version


OLDEST = "5.17"
# A minor version may rename an argument, as 5.24 did, so pip takes none that the tests have not seen. A checkpoint
# keeps this code for years and may be run on later versions: there it only warns.
FIRST_UNTESTED = "5.25"


def check_transformers() -> None:
    """Raise an ImportError for a Transformers that cannot run this code, and warn of one newer than the tests."""
    require_version(f"transformers>={OLDEST},<6")
    installed = metadata.version("transformers")
    if Version(installed) >= Version(FIRST_UNTESTED):
        warnings.warn(
            f"This model's code was tested with Transformers before {FIRST_UNTESTED}, and {installed} is installed: "
            f'if it fails, pip install "transformers<{FIRST_UNTESTED}".'
        )
