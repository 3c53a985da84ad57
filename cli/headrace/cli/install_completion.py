"""Install the completion of `headrace` commands for a user's shell, in the file that this shell reads by itself.

bash with bash-completion, and fish, look for a command's script in a folder of the user's. zsh looks through the folders of its
`fpath`, to which it has none of the user's, so that a line of `~/.zshrc` names the script. `~/.bashrc` gets one, too, for a bash
without bash-completion.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.completion import SHELLS
from headrace.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the completion of one shell is installed."""

    script: Path
    startup: Path | None
    """The file that gets `line`; None: the shell finds the script by itself."""
    line: str = ""


def shell_of(environment: Mapping[str, str]) -> str:
    """Return the name of the user's shell. Raises UserError where it is none of SHELLS."""
    name = Path(environment.get("SHELL", "")).name
    if name not in SHELLS:
        what = f"the shell {name!r}" if name else "no shell in SHELL"
        raise UserError(f"there is {what}, and completion is for {', '.join(SHELLS)}: name one, --install-completion bash")
    return name


def places(shell: str, environment: Mapping[str, str]) -> Places:
    """Return where the completion of `shell` belongs, by HOME, ZDOTDIR and the XDG folders of the environment."""
    home = Path(environment.get("HOME") or Path.home())
    data = Path(environment.get("XDG_DATA_HOME") or home / ".local" / "share")
    if shell == "fish":
        config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
        return Places(script=config / "fish" / "completions" / "headrace.fish", startup=None)
    if shell == "zsh":
        script, startup = data / "headrace" / "completion.zsh", Path(environment.get("ZDOTDIR") or home) / ".zshrc"
    else:
        script, startup = data / "bash-completion" / "completions" / "headrace", home / ".bashrc"
    quoted = shlex.quote(str(script))
    return Places(script=script, startup=startup, line=f"[ -r {quoted} ] && source {quoted}  # completion of headrace")


def install(script: str, at: Places) -> list[str]:
    """Write the script where it belongs, and its line into the shell's own file where that is not there yet.

    Returns what was done, and how to undo it, in sentences. Raises UserError where a file cannot be written.
    """
    path = at.script
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.read_text(encoding="utf-8") if path.exists() else None
        if known != script:
            path.write_text(script, encoding="utf-8")
        done = [f"{path} {'is up to date' if known == script else 'is written'}"]
        undo = f"to undo it, remove {path}"
        if (path := at.startup) is not None:
            lines = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
            if at.line in lines.splitlines():
                done.append(f"{path} names it already")
            else:
                with path.open("a", encoding="utf-8") as startup:
                    startup.write("\n" * bool(lines and not lines.endswith("\n")) + at.line + "\n")
                done.append(f"{path} names it in its last line")
            undo += f" and that line of {path}"
    except OSError as err:
        raise UserError(
            f"cannot write {err.filename or path}: {err.strerror}; `headrace --completion SHELL` prints the script"
        ) from err
    return [*done, f"shells that start from now on complete headrace; {undo}"]


def install_for(shell: str, script: str) -> list[str]:
    """As `install`, with the places of this process's environment."""
    return install(script, places(shell, os.environ))
