# SPDX-License-Identifier: Apache-2.0
"""What is measured: each module here is a process that runs one job and reports to `child`."""
