# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Hold Triton kernels that no GPU has run yet. They ship in no checkpoint and nothing uses them by default."""
