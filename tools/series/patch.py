# SPDX-License-Identifier: Apache-2.0
"""What a patch file may say. Anything else in it is an error, never ignored."""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from tools.errors import Problem
from tools.series import syntax

MAX_OUR_LINES = 6
TOML_KEY = r'"([^"]*)"|([\w-]+)'

# verb -> (companions of which exactly one must be given, keys that may be given)
VERBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "append": ((), ("in",)),
    "prepend": ((), ("in",)),
    "first": ((), ("in",)),
    "before": (("insert",), ("in", "count", "count_why")),
    "after": (("insert",), ("in", "count", "count_why")),
    "replace": (("with",), ("in", "count", "count_why")),
    "if_has": (("or_when", "and_when"), ("in", "count", "count_why")),
    "line": (("insert", "with"), ("count", "count_why")),
    "toml": (("value",), ()),
    "hunk": ((), ()),
}
STRUCTURAL = ("append", "prepend", "first", "before", "after", "replace", "if_has")
NEED_SCOPE = ("append", "prepend", "first")
PATTERNS = ("before", "after", "replace", "if_has")
OUR_TEXT = ("append", "prepend", "first", "insert", "with", "or_when", "and_when", "import")
EVERYWHERE = ("file", "import", "unless", "releases")


@dataclass(frozen=True)
class Edit:
    """One edit of one upstream file; `number` counts from 1 within its patch."""

    patch: str
    number: int
    file: str
    verb: str
    fields: dict[str, object]
    unless: str | None = None
    releases: SpecifierSet | None = None

    @property
    def name(self) -> str:
        return f"patches/{self.patch}.yaml edit {self.number}"

    @property
    def scope(self) -> str:
        return str(self.fields.get("in", ""))

    @property
    def count(self) -> int:
        return int(self.fields.get("count", 1))

    def text(self, key: str) -> str:
        return str(self.fields.get(key, ""))


@dataclass(frozen=True)
class Patch:
    """One topic: why it exists, what became of it upstream, and its edits."""

    name: str
    subject: str
    why: str
    upstream: str
    edits: tuple[Edit, ...]


class _Loader(yaml.SafeLoader):
    """Safe, and a key given twice is an error (YAML would drop the first)."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"key `{key}` is given twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)


def load_series(folder: Path) -> list[Patch]:
    """All patches of `folder`, by name. Problem lists every fault of every file."""
    patches: list[Patch] = []
    faults: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        found: list[str] = []
        if path.suffix == ".yaml":
            patches.append(parse_patch(path.stem, path.read_text(encoding="utf-8"), found))
        else:
            found.append("not a patch; a patch is NAME.yaml")
        faults += [f"patches/{path.name}: {fault}" for fault in found]
    if faults:
        raise Problem(
            "the series cannot be read", "\n  ".join(faults), "docs/patches.md has the format"
        )
    return patches


def parse_patch(name: str, text: str, faults: list[str]) -> Patch | None:
    """One patch file; what is wrong with it is added to `faults`."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        faults.append("the file name may hold a-z, 0-9 and `-` only")
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        faults.append(f"not readable YAML: {error}")
        return None
    data = data if isinstance(data, dict) else {}
    for key in data.keys() - {"subject", "why", "upstream", "unless", "edits"}:
        faults.append(f"unknown key `{key}`")
    for key in ("subject", "why", "upstream"):
        if not isinstance(data.get(key), str) or not data[key].strip():
            faults.append(f"`{key}` is missing or empty")
    upstream = str(data.get("upstream") or "none yet")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+|none\b.*\w.*", upstream, re.DOTALL):
        faults.append("`upstream` is OWNER/REPO#NUMBER, or `none` with the reason")
    edits = data.get("edits")
    if not isinstance(edits, list) or not edits:
        faults.append("`edits` must be a list with at least one edit")
        edits = []
    parsed = []
    for number, fields in enumerate(edits, 1):
        problems: list[str] = []
        edit = parse_edit(name, number, fields, data.get("unless"), problems)
        faults += [f"edit {number}: {problem}" for problem in problems]
        parsed.append(edit)
    if faults:
        return None
    text = {key: data[key].strip() for key in ("subject", "why")}
    return Patch(name, text["subject"], text["why"], upstream.strip(), tuple(parsed))


def parse_edit(
    patch: str, number: int, fields: object, unless: object, problems: list[str]
) -> Edit | None:
    """One entry of `edits`; what is wrong with it is added to `problems`."""
    if not isinstance(fields, dict):
        problems.append("is not a mapping")
        return None
    verbs = [key for key in fields if key in VERBS]
    if "import" in fields and not verbs:
        verbs = ["import"]
    if len(verbs) != 1:
        problems.append(f"needs exactly one verb of {', '.join(VERBS)}, import; has {verbs}")
        return None
    verb = verbs[0]
    one_of, optional = VERBS.get(verb, ((), ()))
    for key in fields.keys() - {verb, *one_of, *optional, *EVERYWHERE}:
        problems.append(f"unknown key `{key}` for `{verb}`")
    if one_of and len(fields.keys() & set(one_of)) != 1:
        problems.append(f"`{verb}` needs " + " or ".join(f"`{key}`" for key in one_of))
    for key in fields.keys() - {"count", "value"}:
        if not isinstance(fields[key], str):
            problems.append(f"`{key}` must be text (quote it)")
        elif not fields[key].strip() and not (verb == "line" and key == "with"):
            problems.append(f"`{key}` is empty")
    if problems:
        return None

    file = fields.get("file", "")
    if not file or file.startswith("/") or ".." in file.split("/"):
        problems.append("`file` must be a path inside upstream's tree")
    if (verb in STRUCTURAL or "import" in fields) and not file.endswith(".py"):
        problems.append("edits by symbol and imports work on .py files; use `line` or `hunk`")
    if verb in NEED_SCOPE and "in" not in fields:
        problems.append(f"`{verb}` needs `in: SYMBOL`")
    count = fields.get("count", 1)
    if type(count) is not int or count < 1:
        problems.append("`count` must be a positive number")
    elif ("count_why" in fields) != (count != 1):
        problems.append("a `count` other than 1 needs `count_why`, and only then")
    ours = _our_lines(fields)
    if len(ours) > MAX_OUR_LINES:
        problems.append(
            f"{len(ours)} lines of ours, at most {MAX_OUR_LINES}: "
            "put a function into the overlay and call it"
        )
    if verb in PATTERNS and (fault := syntax.pattern_fault(fields[verb])):
        problems.append(f"`{verb}` is not a single piece of Python: {fault}")
    if verb == "replace":
        named = set(re.findall(r"\$+[A-Z]\w*", fields["replace"]))
        for name in set(syntax.META.findall(fields["with"])) - named:
            problems.append(f"`with` uses {name}, which the pattern does not name")
    for key in ("or_when", "and_when"):
        if key in fields and not syntax.is_expression(fields[key]):
            problems.append(f"`{key}` must be one expression")
    imports = fields.get("import", "").strip().splitlines()
    if not all(syntax.is_import(line.strip()) for line in imports):
        problems.append("`import` must hold import statements, one a line")
    if verb == "toml" and not re.fullmatch(rf"({TOML_KEY})(\.({TOML_KEY}))*", fields["toml"]):
        problems.append("`toml` is a dotted key")
    if verb == "hunk" and (fault := _hunk_fault(fields["hunk"])):
        problems.append(f"`hunk` {fault}")
    unless = fields.get("unless", unless)
    if unless is not None and not re.fullmatch(r"[^:\s]+\.py::[\w.]+", str(unless)):
        problems.append("`unless` is PATH.py::SYMBOL")
    releases = None
    try:
        releases = SpecifierSet(fields["releases"]) if "releases" in fields else None
    except InvalidSpecifier:
        problems.append('`releases` is a version range such as ">=0.33" or "<0.32"')
    return Edit(patch, number, file, verb, fields, unless and str(unless), releases)


def _our_lines(fields: dict) -> list[str]:
    text = "\n".join(str(fields[key]) for key in OUR_TEXT if key in fields)
    lines = [line for line in text.splitlines() if line.strip()]
    added = [line for line in str(fields.get("hunk", "")).splitlines() if line[:1] == "+"]
    return lines + added


def _hunk_fault(hunk: str) -> str | None:
    marks = {line[:1] or " " for line in hunk.splitlines()}
    if not marks <= {" ", "+", "-"}:
        return "lines must begin with a blank, `+` or `-`"
    if not marks & {"+", "-"}:
        return "changes nothing"
    if marks == {"+"}:
        return "needs at least one line of upstream's to find its place"
    return None
