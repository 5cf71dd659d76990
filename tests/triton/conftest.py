# SPDX-License-Identifier: Apache-2.0
"""Triton decides at its import whether kernels are interpreted, so those tests have a process of
their own: `test_interpreter.py` runs them."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
