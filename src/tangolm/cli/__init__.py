"""The command `tangolm`: parse, call, print. A file a group of commands; `main` is the entry point.

A mistake of the user (a `ValueError` whose message names what is wrong and what would do) is one line on stderr and exit
code 2. `TANGOLM_DEBUG=1` shows the traceback as well. Of several processes (`torchrun`) that one speaks which met the mistake.
"""

from __future__ import annotations

import os
import sys
import traceback

import typer

PARALLEL = ("train",)  # commands that torchrun may start in several processes


def commands() -> typer.Typer:
    """All commands. Imported here: a process that a preparation starts imports this file, and needs none of them."""
    from tangolm.cli import bench, data, experiment, folders, model, quickstart, train
    from tangolm.cli.app import Commands

    app = typer.Typer(
        cls=Commands,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="TANGO language models: train, measure and compare them.",
    )
    for group in (quickstart, data, folders, train, experiment, model, bench):
        group.register(app)
    return app


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    from tangolm.training.distributed import ElsewhereError, LostProcessError

    command = typer.main.get_command(commands())
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    speaker = "tangolm" if size == 1 else f"tangolm, process {rank}"
    try:
        if size > 1 and arguments and arguments[0] not in PARALLEL:
            if rank:
                return 2
            raise ValueError(f"{arguments[0]} does not run in {size} processes; {' and '.join(PARALLEL)} does")
        code = command.main(arguments or ["--help"], prog_name="tangolm", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except ElsewhereError:
        return 2
    except (typer.Abort, KeyboardInterrupt):
        print("tangolm: interrupted", file=sys.stderr)
        return 130
    except typer.TyperException as error:
        message = error.format_message()
    except BrokenPipeError:
        # The reader (such as `head`) has all it wants; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if rank and isinstance(error, LostProcessError):
            return 2
        if os.environ.get("TANGOLM_DEBUG"):
            traceback.print_exc()
        message = str(error) or type(error).__name__
    print(f"{speaker}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def script() -> None:
    """What the installed command calls."""
    sys.exit(main())
