# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm.turboquant`: the same commands as `vllm turboquant`."""

from vllm.turboquant.cli import TurboquantSubcommand, add_commands
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    """Parse the command line and run the command."""
    parser = FlexibleArgumentParser(prog="python -m vllm.turboquant")
    add_commands(parser)
    TurboquantSubcommand.cmd(parser.parse_args())


if __name__ == "__main__":
    main()
