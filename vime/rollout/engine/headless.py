"""vLLM's ranks on a further node of an engine: no server, only the executor. Arguments as for the API server.

`vllm serve --headless` does the same, but vLLM's command fails in its CPU distribution, which is not called `vllm`.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the ranks of this node until one of them ends or this process is told to."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args([*sys.argv[1:], "--headless"])
    arguments.api_server_count = 0
    validate_parsed_serve_args(arguments)
    run_headless(arguments)


if __name__ == "__main__":
    main()
