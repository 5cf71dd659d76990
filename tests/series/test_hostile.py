# SPDX-License-Identifier: Apache-2.0
"""Upstream changes under us: the right place, a drift that is told, or a conflict.

Every case changes one real file of vLLM 0.32.0 as a next release might, judges an
edit there, and compares the verdict and the result with what the change was, through
Python's own parser: never a wrong place, never an edit that is counted and does nothing.
"""

import ast
import functools
import itertools
import random
import re
import textwrap
from dataclasses import dataclass

import pytest

from tools.pins import ROOT
from tools.series.judge import CLEAN, CONFLICT, DRIFTED, judge
from tools.series.patch import parse_patch
from tools.series.project import Project
from tools.series.source import Source

SEEDS = range(3)
MARK = "_ours_4711"


@dataclass(frozen=True)
class Hook:
    """An edit, and how Python's parser sees what it hangs on.

    `anchor` opens the unparsed statement; "" stands for the symbol's own first line.
    `widen` makes another of that statement which the edit's pattern still matches.
    `reprinted` is the verdict when the file is laid out anew, with other quotes: a string
    in the anchor is then another string, one in the pattern is not found.
    """

    name: str
    file: str
    edit: str
    symbol: str = ""
    anchor: str = ""
    widen: tuple[str, str] = ()
    parameter: str = ""
    reprinted: str = CLEAN


CPU, CUDA = "vllm/platforms/cpu.py", "vllm/platforms/cuda.py"
TORCH, KV = "vllm/utils/torch_utils.py", "vllm/v1/kv_cache_interface.py"
OMP, REGISTRY = "vllm/utils/ompmultiprocessing.py", "vllm/v1/attention/backends/registry.py"
HOOKS = [
    Hook(
        "first", CPU,
        f"first: |\n  {MARK} = 1\n  print({MARK}, attn_selector_config)",
        "CpuPlatform.get_attn_backend_cls",
        widen=("        cls,\n        selected_", "        cls,\n        _new,\n        selected_"),
        parameter="attn_selector_config",
        reprinted=DRIFTED,
    ),
    Hook(
        "first, module function", CUDA,
        f"first: |\n  {MARK} = kv_cache_dtype",
        "_get_backend_priorities",
        widen=("    use_mla: bool,\n    device_", "    use_mla: int,\n    device_"),
        parameter="kv_cache_dtype",
    ),
    Hook(
        "after", CPU,
        f"after: cache_config = $_\ninsert: |\n  {MARK} = cache_config",
        "CpuPlatform.check_and_update_config",
        "cache_config = ",
        ("cache_config = vllm_config.cache_config\n", "cache_config = vllm_config.new\n"),
    ),
    Hook(
        "before an if", OMP,
        f'before: "if config.kv_transfer_config: $$$"\ninsert: |\n  {MARK} = config',
        "OMPProcessManager.__init__",
        "if config.kv_transfer_config",
        parameter="config",
    ),
    Hook(
        "after a call", OMP,
        f"after: self._parse_omp_threads_bind_env($$$)\ninsert: |\n  {MARK} = 1",
        "OMPProcessManager.__init__",
        "self._parse_omp_threads_bind_env(",
        ("threads_bind_env()\n", "threads_bind_env(1)\n"),
    ),
    Hook(
        "if_has", KV,
        f'if_has: kv_cache_dtype == "ultraquant_4bit"\nor_when: kv_cache_dtype == "{MARK}"',
        "get_kv_quant_mode",
        "if kv_cache_dtype == 'ultraquant_4bit'",
        parameter="kv_cache_dtype",
        reprinted=CONFLICT,
    ),
    Hook(
        "if_has in an elif", TORCH,
        f'if_has: cache_dtype in STR_DTYPE_TO_TORCH_DTYPE\nand_when: cache_dtype != "{MARK}"',
        "get_kv_cache_torch_dtype",
        parameter="cache_dtype",
        reprinted=DRIFTED,
    ),
    Hook(
        "replace", TORCH,
        f"replace: STR_DTYPE_TO_TORCH_DTYPE[$KEY]\nwith: getattr(torch, $KEY, '{MARK}')",
        "kv_cache_dtype_str_to_dtype",
        "return STR_DTYPE_TO_TORCH_DTYPE[kv_cache_dtype]",
    ),
    Hook(
        "append to an enum", KV,
        f"append: |\n  {MARK} = 4711",
        "KVQuantMode",
        widen=("class KVQuantMode(IntEnum):", "class KVQuantMode(IntEnum, metaclass=Meta):"),
    ),
    Hook(
        "prepend to an enum", REGISTRY,
        f'prepend: |\n  {MARK} = "{MARK}"',
        "AttentionBackendEnum",
        widen=("class AttentionBackendEnum(Enum,", "class AttentionBackendEnum(Mixin, Enum,"),
    ),
    Hook(
        "append to a Literal", "vllm/config/cache.py",
        f"append: |\n  '{MARK}'",
        "CacheDType",
        widen=("CacheDType = Literal[", "CacheDType: TypeAlias = Literal["),
    ),
    Hook(
        "append to a dict", TORCH,
        f"append: |\n  '{MARK}': torch.uint8,",
        "STR_DTYPE_TO_TORCH_DTYPE",
        widen=("STR_DTYPE_TO_TORCH_DTYPE = {", "STR_DTYPE_TO_TORCH_DTYPE: dict = {"),
    ),
    Hook("import", CPU, f"import: import {MARK}"),
]  # fmt: skip


class Changed(Source):
    """The release with some files replaced; None deletes one."""

    def __init__(self, base: Source, files: dict[str, str | None]) -> None:
        super().__init__(base.release, base.repository)
        self.files, self.base = files, base

    def _read(self, path: str) -> str | None:
        return self.files[path] if path in self.files else self.base.read(path)

    def definitions_of(self, name: str) -> list[str]:
        return []  # where symbols went is a test of its own


@pytest.fixture(scope="session")
def pinned() -> Source:
    return Project(ROOT).source("0.32.0")


@pytest.fixture(scope="session")
def reviewed(pinned):
    """Per hook: its patch, the reviewed fingerprints, the rendered file."""
    known = {}
    for hook in HOOKS:
        scope = f"in: {hook.symbol}\n" if hook.symbol else ""
        edit = textwrap.indent(f"file: {hook.file}\n{scope}{hook.edit}", "    ")[4:]
        faults: list[str] = []
        text = f"subject: s\nwhy: w\nupstream: none; a test\nedits:\n  - {edit}\n"
        patch = parse_patch("hook", text, faults)
        assert not faults
        outcome = judge([patch], pinned)
        assert outcome.of(CLEAN)
        known[hook.name] = (
            patch,
            {("hook", 1): outcome.verdicts[0].fingerprint},
            outcome.rendered()[hook.file],
        )
    return known


# -- Python's own view of the file ------------------------------------------------------


def find(tree: ast.Module, symbol: str) -> ast.stmt:
    node: ast.AST = tree
    for part in symbol.split("."):
        (node,) = [child for child in node.body if part in _names(child)]
    return node


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return [getattr(node, "name", "")]


def rows(node: ast.stmt) -> slice:
    decorators = getattr(node, "decorator_list", [])
    return slice(min([node.lineno, *(d.lineno for d in decorators)]) - 1, node.end_lineno)


def anchor(hook: Hook, text: str) -> ast.stmt:
    symbol = find(ast.parse(text), hook.symbol)
    (found,) = [
        node
        for node in ast.walk(symbol)
        if isinstance(node, ast.stmt) and ast.unparse(node).startswith(hook.anchor)
    ]
    return found


def starts(text: str) -> list[int]:
    """Rows before which a line may be put in without changing what is around."""
    lines, found = text.splitlines(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            at = rows(node).start
            before = lines[at][: node.col_offset if not hasattr(node, "decorator_list") else 0]
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
            if not before.strip() and not docstring and not future:
                found.add(at)
    return sorted(at for at in found if not lines[at].lstrip().startswith("elif"))


def put(text: str, at: int, line: str) -> str:
    lines = text.splitlines(keepends=True)
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())] if at < len(lines) else ""
    return "".join([*lines[:at], f"{indent}{line}\n", *lines[at:]])


@functools.cache
def shape(text: str, any_order: bool = False) -> str:
    """The program, whatever its layout and without noise."""
    tree = ast.parse(text)
    for node in list(ast.walk(tree)):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list):
                body[:] = [
                    child for child in body if not "".join(_names(child)).startswith("_noise")
                ]
    for node in [tree, *tree.body] if any_order else []:
        if isinstance(node, ast.Module | ast.ClassDef):
            node.body.sort(key=ast.dump)
    return ast.dump(tree)


# -- what upstream might do: (hook, text, random) -> text, expected verdict ----------------


def comments(hook, text, rng):
    for at in sorted(rng.sample(starts(text), 8), reverse=True):
        text = put(text, at, rng.choice(["# A remark.", "", "# total = count(n)"]))
    return text


def noise(hook, text, rng):
    for number, at in enumerate(sorted(rng.sample(starts(text), 8), reverse=True)):
        text = put(text, at, f"_noise_{number} = {number}")
    return text


def reprint(hook, text, rng):
    return ast.unparse(ast.parse(text)) + "\n"


def reorder(hook, text, rng):
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    definitions = [
        [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        for body in bodies
    ]
    pairs = [pair for some in definitions for pair in itertools.pairwise(some)]
    first, second = (rows(node) for node in rng.choice(pairs))
    between = lines[first.stop : second.start]
    lines[first.start : second.stop] = [*lines[second], *between, *lines[first]]
    return "".join(lines)


def top_level(hook, text):
    return find(ast.parse(text), hook.symbol.split(".")[0])


def own_text(node, text) -> str:
    return "".join(text.splitlines(keepends=True)[rows(node)])


def twin_elsewhere(hook, text, rng):
    node = top_level(hook, text)
    name = hook.symbol.split(".")[0]
    return text + "\n\n" + re.sub(rf"\b{name}\b", f"_noise_{name}", own_text(node, text), count=1)


def rename(hook, text, rng):
    node = find(ast.parse(text), hook.symbol)
    lines = text.splitlines(keepends=True)
    name = hook.symbol.split(".")[-1]
    lines[node.lineno - 1] = re.sub(rf"\b{name}\b", f"{name}_v2", lines[node.lineno - 1], count=1)
    return "".join(lines)


def remove_symbol(hook, text, rng):
    node = find(ast.parse(text), hook.symbol)
    lines = text.splitlines(keepends=True)
    lines[rows(node)] = [" " * node.col_offset + "pass\n"]
    return "".join(lines)


def define_twice(hook, text, rng):
    node = find(ast.parse(text), hook.symbol)
    lines = text.splitlines(keepends=True)
    lines[rows(node)] = [*lines[rows(node)], "\n", *lines[rows(node)]]
    return "".join(lines)


def unfinished(hook, text, rng):
    return text + "\nif (\n"


def anchor_twice(hook, text, rng):
    node, lines = anchor(hook, text), text.splitlines(keepends=True)
    lines[rows(node)] = lines[rows(node)] * 2
    return "".join(lines)


def anchor_gone(hook, text, rng):
    node, lines = anchor(hook, text), text.splitlines(keepends=True)
    lines[rows(node)] = [" " * node.col_offset + "pass\n"]
    return "".join(lines)


def anchor_quoted(hook, text, rng):
    """The statement survives as a comment and in a string only."""
    node, lines = anchor(hook, text), text.splitlines(keepends=True)
    indent, old = " " * node.col_offset, lines[rows(node)]
    quoted = [f"{indent}'''\n", *old, f"{indent}'''\n"]
    lines[rows(node)] = [indent + "# " + line.lstrip() for line in old] + quoted
    return "".join(lines)


def anchor_nested(hook, text, rng):
    node, lines = anchor(hook, text), text.splitlines(keepends=True)
    inner = ["    " + line if line.strip() else line for line in lines[rows(node)]]
    lines[rows(node)] = [" " * node.col_offset + "if print():\n", *inner]
    return "".join(lines)


def unnested(text):
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for at, child in enumerate(body if isinstance(body, list) else []):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "print()":
                body[at : at + 1] = child.body
    return ast.unparse(tree)


def anchor_widened(hook, text, rng):
    old, new = hook.widen
    assert text.count(old) == 1
    return text.replace(old, new)


def parameter_renamed(hook, text, rng):
    node = find(ast.parse(text), hook.symbol)
    lines = text.splitlines(keepends=True)
    body = "".join(lines[rows(node)])
    lines[rows(node)] = [re.sub(rf"\b{hook.parameter}\b", f"{hook.parameter}_v2", body)]
    return "".join(lines)


EVERY = [(comments, CLEAN), (noise, CLEAN), (reorder, CLEAN)]  # with every seed
SYMBOL = [
    (twin_elsewhere, CLEAN), (rename, CONFLICT), (remove_symbol, CONFLICT), (define_twice, CONFLICT),
]  # fmt: skip
STATEMENT = [
    (anchor_twice, CONFLICT), (anchor_gone, CONFLICT), (anchor_quoted, CONFLICT),
    (anchor_nested, DRIFTED),
]  # fmt: skip
CASES = [
    *((hook, work, want, seed) for hook in HOOKS for work, want in EVERY for seed in SEEDS),
    *((hook, work, want, 0) for hook in HOOKS if hook.symbol for work, want in SYMBOL),
    *((hook, work, want, 0) for hook in HOOKS if hook.anchor for work, want in STATEMENT),
    *((hook, reprint, hook.reprinted, 0) for hook in HOOKS if hook.symbol),
    *((hook, anchor_widened, DRIFTED, 0) for hook in HOOKS if hook.widen),
    *((hook, parameter_renamed, CONFLICT, 0) for hook in HOOKS if hook.parameter),
    *((hook, unfinished, CONFLICT, 0) for hook in HOOKS),
]


@pytest.mark.parametrize(
    ("hook", "work", "want", "seed"),
    CASES,
    ids=[f"{hook.name}-{work.__name__}-{seed}" for hook, work, _, seed in CASES],
)
def test_verdict(hook, work, want, seed, pinned, reviewed):
    patch, known, rendered = reviewed[hook.name]
    text = pinned.read(hook.file)
    changed = work(hook, text, random.Random(f"{hook.name} {seed}"))
    assert changed != text
    outcome = judge([patch], Changed(pinned, {hook.file: changed}), known)
    verdict = outcome.verdicts[0]
    assert verdict.state == want, verdict
    if verdict.state == CONFLICT:
        assert verdict.reasons
        return
    result = outcome.rendered()[hook.file]
    assert result.count(MARK) == rendered.count(MARK)
    if work is anchor_widened:
        assert result.replace(*reversed(hook.widen)) == rendered
    elif work is anchor_nested:
        assert shape(unnested(result)) == shape(rendered)
    elif hook.symbol or work is not noise:
        any_order = work is reorder
        assert shape(result, any_order) == shape(rendered, any_order)


def test_there_are_at_least_200():
    assert len(CASES) >= 200


def test_file_deleted(pinned, reviewed):
    for hook in HOOKS:
        patch, known, _ = reviewed[hook.name]
        outcome = judge([patch], Changed(pinned, {hook.file: None}), known)
        assert outcome.verdicts[0].state == CONFLICT
        assert outcome.verdicts[0].reasons[0] == f"{hook.file} does not exist"


@pytest.mark.parametrize("hook", [h for h in HOOKS if h.symbol], ids=lambda hook: hook.name)
def test_moved_to_another_file(hook, pinned, reviewed, release):
    patch, known, _ = reviewed[hook.name]
    text = pinned.read(hook.file)
    moved = textwrap.dedent(own_text(top_level(hook, text), text))
    moved_hook = Hook(hook.name, hook.file, hook.edit, hook.symbol.split(".")[0])
    rest = remove_symbol(moved_hook, text, None)
    source = release({hook.file: rest, "vllm/new/home.py": f"import os\n\n\n{moved}"})
    verdict = judge([patch], source, known).verdicts[0]
    assert verdict.state == CONFLICT
    assert "vllm/new/home.py:" in verdict.reasons[1]
