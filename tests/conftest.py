import os


# The test models are tiny: more threads than one cost more than they give, most of all with several processes at a time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402


torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """In a module that lists its `EXPECTED_SKIPS`, a test skipped for another reason fails."""
    report = yield
    expected = getattr(item.module, "EXPECTED_SKIPS", None)
    if expected is not None and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if not any(known in reason for known in expected):
            report.outcome, report.longrepr = "failed", f"{reason!r} is not among the module's EXPECTED_SKIPS"
    return report
