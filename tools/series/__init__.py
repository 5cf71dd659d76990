# SPDX-License-Identifier: Apache-2.0
"""The patch series: semantic edits to upstream's source, located by symbol.

One concept per module: `patch` (what a patch file may say), `source` (upstream's
files, pristine), `syntax` and `scope` (finding a place), `edits` (a place and our
lines become splices), `judge` (the verdict per edit and the rendered files), `lock`
(what was reviewed), `tree` (build/tree), `check`, `capture`, `bump`.
"""
