# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels that no GPU has run yet. They ship in no checkpoint; set `model.model.attention_form` to use one."""
