# SPDX-License-Identifier: Apache-2.0
"""Small models for a first run and for the tests, made once and cached."""
