# SPDX-License-Identifier: Apache-2.0
"""qwen3-recall: a small trained model that finds pairs of words in long contexts."""
