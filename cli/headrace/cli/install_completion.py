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
    try:
        at.script.parent.mkdir(parents=True, exist_ok=True)
        known = at.script.read_text(encoding="utf-8") if at.script.exists() else None
        if known != script:
            at.script.write_text(script, encoding="utf-8")
        done = [f"{at.script} {'is up to date' if known == script else 'is written'}"]
        undo = f"to undo it, remove {at.script}"
        if at.startup is not None:
            is_new = _add_line(at.startup, at.line)
            done.append(f"{at.startup} names it {'in its last line' if is_new else 'already'}")
            undo += f" and that line of {at.startup}"
    except OSError as err:
        raise UserError(
            f"cannot write {err.filename or at.script}: {err.strerror}; `headrace --completion SHELL` prints the script"
        ) from err
    return [*done, f"shells that start from now on complete headrace; {undo}"]


def _add_line(path: Path, line: str) -> bool:
    """Append a line to a file that has it not yet; return whether it had not."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
    if line in text.splitlines():
        return False
    with path.open("a", encoding="utf-8") as startup:
        startup.write("\n" * bool(text and not text.endswith("\n")) + line + "\n")
    return True


def install_for(shell: str, script: str) -> list[str]:
    """As `install`, with the places of this process's environment."""
    return install(script, places(shell, os.environ))
