# SPDX-License-Identifier: Apache-2.0
"""The wheel: a published kernel wheel, our patched Python laid over, our native code added.

One concept per module: `archive` (zip members copied raw, bytes reproducible),
`metadata` (the .dist-info files), `native` (compiling csrc/turboquant), `elf` (what a
shared library asks of a host), `build` (putting them together), `install`.
"""
