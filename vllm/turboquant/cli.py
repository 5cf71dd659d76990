# SPDX-License-Identifier: Apache-2.0
"""`vllm turboquant calibrate` and `vllm turboquant evaluate`.

Imported by upstream's command line on every start, so it imports the engine only to run it.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.turboquant.formats import FORMATS

DEFAULT = "tdsf_k4v4"
# An engine for texts of a few hundred tokens, not for serving.
_SMALL_ENGINE = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28, "enforce_eager": True}


class TurboquantSubcommand(CLISubcommand):
    """The group of our commands in upstream's command line."""

    name = "turboquant"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run the chosen command; expected failures end with their message and status 1."""
        try:
            args.turboquant_command(args)
        except (ValueError, OSError) as error:
            sys.exit(f"vllm turboquant: {error}")

    def subparser_init(self, subparsers) -> argparse.ArgumentParser:
        """Add the group to upstream's parser."""
        group = subparsers.add_parser(
            self.name,
            help="Calibrate and evaluate the TDSF KV cache.",
            usage="vllm turboquant {calibrate,evaluate} --model MODEL [options]",
        )
        if sys.argv[1:2] == [self.name]:  # vLLM's engine options take a second to list
            add_commands(group)
        return group


def cmd_init() -> list[CLISubcommand]:
    """What upstream's command line asks every module for."""
    return [TurboquantSubcommand()]


def add_commands(group: argparse.ArgumentParser) -> None:
    """Add calibrate and evaluate to a parser; both take vLLM's engine options too."""
    from vllm.engine.arg_utils import EngineArgs

    commands = group.add_subparsers(required=True, dest="turboquant")
    fit = commands.add_parser("calibrate", help="Fit a model's profile and keep it.")
    fit.add_argument("--data", type=Path, help="UTF-8 text to fit on (default: built in)")
    fit.add_argument("--strict", action="store_true", help="the TDSF formula alone is the scale")
    fit.add_argument("--output", type=Path, help="profile file (default: in the user's cache)")
    fit.set_defaults(turboquant_command=calibrate)
    weigh = commands.add_parser("evaluate", help="Measure what cache formats cost.")
    weigh.add_argument("--data", type=Path, help="UTF-8 text to measure on (default: built in)")
    weigh.add_argument(
        "--formats",
        default=",".join(FORMATS),
        help="comma-separated names; a TDSF format followed by :strict is measured without "
        "scale bytes",
    )
    weigh.add_argument("--calibration", default="auto", help="auto, off, require or a profile")
    weigh.add_argument("--pieces", type=int, default=2, help="pieces of text")
    weigh.add_argument("--length", type=int, default=512, help="tokens per piece")
    weigh.add_argument("--layers", action="store_true", help="measure every layer alone, too")
    weigh.add_argument(
        "--target-kl",
        type=float,
        help="propose layers to leave uncompressed so that a format loses no more, nats per token",
    )
    weigh.add_argument("--json", type=Path, help="write the figures here")
    weigh.add_argument("--html", type=Path, help="write a page with plots here")
    weigh.set_defaults(turboquant_command=evaluate)
    for parser in (fit, weigh):
        EngineArgs.add_cli_args(parser)
        parser.set_defaults(kv_cache_dtype=DEFAULT, **_SMALL_ENGINE)


def calibrate(args: argparse.Namespace) -> None:
    """Fit a profile and write it."""
    from tqdm import tqdm

    from vllm.engine.arg_utils import EngineArgs
    from vllm.turboquant import registry, startup
    from vllm.turboquant.calibrate import BUILT_IN_TEXT
    from vllm.turboquant.calibrate import calibrate as fit_text
    from vllm.turboquant.engine import engine_core
    from vllm.turboquant.profile import Profile, write

    if args.kv_cache_dtype not in FORMATS:
        raise ValueError(f"--kv-cache-dtype must be one of {', '.join(FORMATS)}")
    text = (args.data or BUILT_IN_TEXT).read_text(encoding="utf-8")
    fmt = FORMATS[args.kv_cache_dtype]
    with engine_core(EngineArgs.from_cli_args(args), startup.LATER) as core:
        identity = startup.identity_of(core.vllm_config)
        path = args.output or registry.cached_path(identity, fmt, args.strict)
        fit = fit_text(
            core,
            text,
            lambda pieces: tqdm(pieces, desc="calibrating", unit="piece"),
            strict=args.strict,
        )
    write(Profile(identity, fmt, fit.layers, fit.fitted_on, fit.quality), path)
    print(
        f"{path}: {fmt.name} constants of {len(fit.layers)} layers of {identity}; KL to the "
        f"uncompressed cache {fit.quality['kl']:.5f} nats per token"
    )


def evaluate(args: argparse.Namespace) -> None:
    """Measure formats, print a table, and write the figures where asked."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.turboquant.evaluate import BUILT_IN_TEXT, Task, check
    from vllm.turboquant.evaluate import evaluate as measure

    if args.html and not importlib.util.find_spec("matplotlib"):
        raise ValueError("--html draws with matplotlib: pip install 'vllm[evaluate]'")
    if args.target_kl is not None and not args.target_kl > 0:
        raise ValueError(f"--target-kl must be positive, not {args.target_kl}")
    formats = args.formats.split(",")
    check(formats)
    task = Task(
        text=(args.data or BUILT_IN_TEXT).read_text(encoding="utf-8"),
        pieces=args.pieces,
        length=args.length,
        mode=args.calibration,
        layers=args.layers,
        scales=args.html is not None,
        target=args.target_kl,
    )
    rows, figures = [], []
    print(f"{'format':20} {'bits':>6} {'KL':>9} {'perplexity':>10} {'top-1':>7}")
    for row, proposal in measure(EngineArgs.from_cli_args(args), formats, task):
        rows.append(row)
        print(
            f"{row.format:20} {row.bits_per_element:6.3f} {row.kl:9.5f} {row.perplexity:10.4f} "
            f"{100 * row.top1:6.2f}%",
            flush=True,
        )
        for layer, kl in (row.layers or {}).items():
            print(f"  {layer:40} {kl:9.6f}", flush=True)
        figures.append(dataclasses.asdict(dataclasses.replace(row, scales=None)))
        if proposal:
            print(f"  {_advice(proposal)}", flush=True)
            figures[-1]["skip"] = dataclasses.asdict(proposal)
    if args.json:
        kept = [{name: x for name, x in row.items() if x is not None} for row in figures]
        _write(args.json, json.dumps(kept, indent=1) + "\n")
    if args.html:
        from vllm.turboquant import report

        _write(args.html, report.page(str(args.model), rows))


def _advice(proposal) -> str:
    if not proposal.layers:
        return f"KL {proposal.kl:.5f} is within {proposal.target:g}: no layer need be skipped"
    return (
        f"for a KL of {proposal.target:g}: --kv-cache-dtype-skip-layers "
        f"{' '.join(map(str, proposal.layers))} (KL {proposal.kl:.5f}, "
        f"{proposal.bits_per_element:.3f} bits)"
    )


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
