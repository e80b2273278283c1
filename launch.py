"""Start a run: `python launch.py cluster=local recipe=tiny_grpo [dotted.key=value ...]`.

Composes the configuration, plans which role runs where, and shows the plan (`--dry-run`) or submits the run.
Exit codes: 0 the run completed (or was submitted, or only shown), 1 it failed, 2 the input was wrong.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path

try:
    from vime.config import Config
    from vime.config.compose import compose
    from vime.errors import UserError
    from vime.launch.arguments import OptionParser, read_settings
    from vime.plan.checks import check_model
    from vime.plan.plan import make_plan
except ModuleNotFoundError as missing:
    text = f"launch.py: {missing.name} is not installed here; run `make venv` and use .venv/bin/python"
    print(text, file=sys.stderr)
    raise SystemExit(2) from None

USAGE = """usage: python launch.py cluster=NAME recipe=NAME [dotted.key=value ...] [options]
       python launch.py --resume RUN [dotted.key=value ...] [options]
       python launch.py sweep=FILE [cluster=NAME] [recipe=NAME] [dotted.key=value ...] [options]

  cluster=NAME       a file in clusters/, or a path
  recipe=NAME        a file in configs/, or a path
  sweep=FILE         runs the recipe with every combination of the file's values (see vime/launch/sweep/file.py);
                     sweep.parallel=N at once
  dotted.key=value   changes one value, such as training.learning_rate=1e-6; values are YAML

  --dry-run          show the plan; start nothing and write nothing
  --json             with --dry-run: the configuration and the plan as JSON
  --resume RUN       continue the run of that directory from its newest complete checkpoint
  --wait, --no-wait  stay until the run ends (the default on a local cluster), or return once it is submitted
  --help [SECTION]   this text; or the keys of a section, such as rollout or recipe.rollout

exit code: 0 completed, 1 the run failed, 2 the input was wrong
"""


@dataclass(frozen=True)
class Command:
    """What the command line asked for: a cluster and a recipe, a sweep of them, or a run to resume."""

    cluster: str
    recipe: str
    resume: str | None
    sweep: str | None
    parallel: int | None
    overrides: tuple[str, ...]
    dry_run: bool
    as_json: bool
    wait: bool | None


def option_parser() -> OptionParser:
    """The options of USAGE."""
    parser = OptionParser()
    for flag in ("--dry-run", "--json", "--wait", "--no-wait"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--resume", nargs="?", const="")
    parser.add_argument("-h", "--help", nargs="*")
    return parser


def parse(arguments: list[str]) -> Command:
    """Read the command line, without `--help`. Raises UserError."""
    options, rest = option_parser().read(arguments)
    given = read_settings(rest, ("cluster", "recipe", "sweep", "sweep.parallel"))
    names, resume = given.names, options.resume
    if given.words:
        raise UserError(f"{given.words[0]!r} is not an option or key=value; see --help")
    if resume == "":
        raise UserError("--resume needs the directory of a run")
    for key in ("cluster", "recipe"):
        if resume is not None and key in names:
            raise UserError(f"--resume takes {key} from the run; leave {key}= out")
        if resume is None and key not in names and "sweep" not in names:
            raise UserError(f"{key}=NAME is missing; see --help")
    if options.wait and options.no_wait:
        raise UserError("--wait and --no-wait exclude each other")
    if options.json and not options.dry_run:
        raise UserError("--json shows the plan as data; it needs --dry-run")
    if resume is not None and options.dry_run:
        raise UserError("--dry-run shows a new run; it cannot be used with --resume")
    if resume is not None and "sweep" in names:
        raise UserError("--resume continues one run; leave sweep= out")
    if "sweep.parallel" in names and "sweep" not in names:
        raise UserError("sweep.parallel=N is how many runs of a sweep go on at once; it needs sweep=FILE")
    if "sweep.parallel" in names and not (names["sweep.parallel"].isdecimal() and int(names["sweep.parallel"])):
        raise UserError(f"sweep.parallel={names['sweep.parallel']} must be a whole number of at least 1")
    return Command(
        cluster=names.get("cluster", ""),
        recipe=names.get("recipe", ""),
        resume=resume,
        sweep=names.get("sweep"),
        parallel=int(names["sweep.parallel"]) if "sweep.parallel" in names else None,
        overrides=given.overrides,
        dry_run=options.dry_run,
        as_json=options.json,
        wait=True if options.wait else False if options.no_wait else None,
    )


def run(command: Command) -> int:
    """Do it; returns the exit code. Raises UserError before anything is written."""
    if command.resume is not None:
        from vime.launch.submit import resume

        return resume(Path(command.resume), command.overrides, wait=command.wait)
    if command.sweep is not None:
        return run_sweep(command, command.sweep)
    config: Config = compose(command.cluster, command.recipe, command.overrides, check=check_model)
    plan = make_plan(config)
    if command.dry_run:
        from vime.launch.preview import print_preview

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--dry-run | head` ends quietly
        print_preview(config, plan, command.as_json)
        return 0
    # Imported late: a dry run and an error must not pay for what only a submission needs.
    from vime.launch.checks import check_ready
    from vime.launch.submit import submit

    check_ready(config)
    wait = config.cluster.scheduler == "local" if command.wait is None else command.wait
    return submit(config, plan, wait=wait)


def run_sweep(command: Command, file: str) -> int:
    """Show or submit every combination of a sweep file; returns the exit code. Raises UserError."""
    from vime.launch.sweep.file import read_sweep

    sweep = read_sweep(Path(file), command.cluster or None, command.recipe or None, command.overrides)
    if command.dry_run:
        from vime.launch.sweep.members import print_sweep

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        print_sweep(sweep, command.as_json)
        return 0
    from vime.launch.sweep.submit import submit_sweep

    return submit_sweep(sweep, command.parallel, wait=command.wait)


def show_help(sections: list[str]) -> None:
    """Print the usage, or the documentation of sections. Raises UserError."""
    if not sections:
        print(USAGE, end="")
        return
    from vime.config.help import schema_help

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for section in sections:
        print(schema_help(section))


def main(arguments: list[str]) -> int:
    """The command line as a function of its arguments; returns the exit code."""
    try:
        wanted = option_parser().parse_known_args(arguments)[0].help
        if wanted is not None:
            show_help(wanted)
            return 0
        return run(parse(arguments))
    except UserError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
