# SPDX-License-Identifier: Apache-2.0
"""Starting the server for a person: checks first, progress while it loads, then a summary."""
