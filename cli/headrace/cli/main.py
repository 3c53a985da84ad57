"""The `headrace` command: reads arguments, calls a command's module, turns errors into one sentence and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import sys

from headrace.cli.command_families import COMMANDS

TYPE_CHECKING = False  # typing's own would be imported before `main` can catch an interrupt
if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterable
    from typing import Any, NoReturn

# Read once, when gRPC is imported: its own log repeats our errors less clearly, and children are started by exec only. What it
# alone knows are connections that TLS turns away (headrace.cli.run.connection_log); a driver of preprocessors has none.
_SERVES = sys.argv[1:2] in (["reorder"], ["preprocessor"]) and not any(word.startswith("--engine") for word in sys.argv)
if _SERVES and os.environ.get("HEADRACE_LOG_CONNECTIONS", "") not in ("", "0"):
    os.environ |= {"GRPC_VERBOSITY": "INFO", "GRPC_TRACE": "handshaker"}
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_EXTRAS = {
    "preprocessor": "preprocessor",
    "bench": "preprocessor,trainer",
    "inspect": "preprocessor",
    "compare": "preprocessor",
    "orchestrate": "preprocessor",
    "experiment": "trainer",
    "train": "trainer",
    "export": "trainer",
    "profile": "trainer",
    "replay": "preprocessor",
    "audit": "preprocessor",
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
EXIT_USER_ERROR = 2
EXIT_FAILURE = 1
EXIT_UNRECOVERABLE = 3  # nodes or layers are lost for good
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell reports of a program ended by SIGPIPE, as most programs are


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    _open_closed_streams()
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, where an error can still be reported
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return EXIT_BROKEN_PIPE  # rich turns a broken pipe into an exit
    except OSError as err:
        if err.errno not in _FULL:
            raise
        _drop_output()
        where = err.filename or "to standard output"
        print(f"headrace: cannot write {where}: {err.strerror}: make room, or write elsewhere", file=sys.stderr)
        return EXIT_FAILURE


def _open_closed_streams() -> None:
    """Redirect closed standard streams (`>&-`) to /dev/null, as the next file opened would otherwise receive their output."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _drop_output() -> None:
    """Discard all further standard output, including what the interpreter flushes when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run(argv: list[str] | None) -> int:
    # imported here because it takes a moment, in which Ctrl-C is pressed too
    from headrace.cli.run.processors import share_processors

    share_processors()  # before anything loads torch or numpy
    from headrace.errors import HeadraceError, JobFailedError, UnrecoverableError, UserError
    from headrace.printable import printable

    args = _parse(argv)
    if getattr(args, "cluster_token_file", None) is not None:  # overrides the environment, for child processes too
        os.environ["HEADRACE_CLUSTER_TOKEN_FILE"] = str(args.cluster_token_file)
        os.environ.pop("HEADRACE_CLUSTER_TOKEN", None)
    if getattr(args, "tls", None) is not None:
        os.environ["HEADRACE_TLS"] = args.tls and os.path.abspath(args.tls)
    try:
        return int(args.run(args))
    except HeadraceError as err:
        print(f"headrace {args.command}: {printable(str(err), keep=chr(10))}", file=sys.stderr)
        if isinstance(err, UserError | JobFailedError):
            return EXIT_USER_ERROR
        return EXIT_UNRECOVERABLE if isinstance(err, UnrecoverableError) else EXIT_FAILURE
    except ModuleNotFoundError as err:
        print(f"headrace {args.command}: this installation lacks {err.name}; {_remedy(args.command)}", file=sys.stderr)
        return EXIT_USER_ERROR


def _parse(argv: list[str] | None) -> argparse.Namespace:
    arguments = sys.argv[1:] if argv is None else argv
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    parsed = _parser({command}).parse_args(arguments)  # other modules need not be loaded: a health check comes every few seconds
    parsed.arguments = arguments  # for a command that starts itself again
    return parsed


def _parser(loaded: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands. `loaded`: those that have their arguments."""
    import argparse  # imported here because it takes a moment too

    from headrace.cli.completion import SHELLS
    from headrace.cli.help_format import HelpFormatter, InFamilies, described

    class Parser(argparse.ArgumentParser):
        """A parser that reports an error in one line, without the usage."""

        def __init__(self, **options: Any) -> None:
            super().__init__(formatter_class=HelpFormatter, **options)

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            """Refuse what this command does not know: the one that calls it would send its user to another help."""
            known, unknown = super().parse_known_args(args, namespace)
            if unknown:
                alike = _alike(unknown[0].partition("=")[0], self._option_string_actions)
                self.error(f"unrecognized arguments: {' '.join(unknown)}{alike}")
            return known, unknown

        def _check_value(self, action: argparse.Action, value: Any) -> None:
            if action.choices is not None and value not in action.choices and (alike := _alike(str(value), action.choices)):
                raise argparse.ArgumentError(action, f"there is no {str(value)!r}{alike}")
            super()._check_value(action, value)

        def error(self, message: str) -> NoReturn:
            self.exit(
                EXIT_USER_ERROR, f"{self.prog}: {message}{' ' if message.endswith('?') else '; '}`{self.prog} --help` says more\n"
            )

    class Version(argparse.Action):
        """Print the version, which is looked up only on request since that takes a moment as well."""

        def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
            from headrace.admission import PROTOCOL, release

            print(f"headrace {release()}, protocol {PROTOCOL}")
            parser.exit()

    class Completion(argparse.Action):
        """Print the script of a shell that completes commands."""

        def __call__(self, parser: argparse.ArgumentParser, _: object, shell: object, *__: object) -> None:
            from headrace.cli.completion import script

            print(script(_parser(COMMANDS), str(shell)), end="")
            parser.exit()

    class InstallCompletion(argparse.Action):
        """Install that script for the user's shell, and say where."""

        def __call__(self, parser: argparse.ArgumentParser, _: object, shell: object, *__: object) -> None:
            from headrace.cli.completion import script
            from headrace.cli.install_completion import install_for, shell_of
            from headrace.errors import UserError

            try:
                name = str(shell or shell_of(os.environ))
                print("\n".join(install_for(name, script(_parser(COMMANDS), name))))
            except UserError as err:
                parser.exit(EXIT_USER_ERROR, f"headrace: {err}\n")
            parser.exit()

    parser = Parser(
        prog="headrace",
        description="Disaggregated data preprocessing and batch planning for multimodal LLM training.",
        epilog="Start with `headrace demo`. "
        "Exit codes: 0 done, 1 failed, 2 something for you to fix, 3 too many nodes lost, 130 interrupted.",
    )
    parser.add_argument(
        "--version", action=Version, nargs=0, help="say which release this is and which protocol it speaks, and exit"
    )
    parser.add_argument(
        "--completion",
        action=Completion,
        choices=SHELLS,
        help="print the script that completes these commands in a shell, and exit: `source <(headrace --completion bash)`",
    )
    parser.add_argument(
        "--install-completion",
        action=InstallCompletion,
        nargs="?",
        choices=SHELLS,
        help="write that script where your shell ($SHELL, or the one named) finds it, say where and how to undo it, and exit",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands", action=InFamilies)
    for name, (module, line) in COMMANDS.items():
        sub = commands.add_parser(name, **described(line))
        if name in loaded:
            found = importlib.import_module(f"headrace.cli.{module}")
            found.add_arguments(sub)
            sub.set_defaults(run=found.run)
    return parser


def _alike(name: str, known: Iterable[object]) -> str:
    """Return a question for one of the known names that is much like this one; nothing where there is none."""
    import difflib  # imported here because only mistakes need it

    close = difflib.get_close_matches(name, [str(one) for one in known], 1, 0.75)
    return f"; did you mean {close[0]}?" if close and len(name) > 2 else ""


def every_command() -> argparse.ArgumentParser:
    """Return the parser of all commands, each with its arguments, for those who describe them."""
    return _parser(COMMANDS)


def _remedy(command: str) -> str:
    extra = _EXTRAS.get(command, "preprocessor,trainer")
    return f"install it with `pip install 'headrace[{extra}]'`"
