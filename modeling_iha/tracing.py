# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Tell how a call is traced, where PyTorch's own functions do not."""

import torch


def is_exported() -> bool:
    """Return whether `torch.export` traces this call without Dynamo.

    In PyTorch 2.11 `is_exporting` is true for everything that Dynamo traces, `torch.compile` included."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
