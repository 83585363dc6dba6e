"""chat: a conversation at a terminal, or one message from an argument or a pipe.

With --session the daemon keeps the conversation; without, it lives as long as the command. Ctrl-C ends a reply and
keeps what came of it; Ctrl-D leaves. Resuming is never silent: it says which session, how old and how long.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import colibri

from .command import given, online, sampling_options, text_or_stdin
from .generate import show_reply
from .output import ProgressLine, length, print_stream, printable, reply_line

PROMPT = "> "
# As much as a shell keeps.
HISTORY_LINES = 1000


class Conversation:
    """What the next message is added to: a session, or a list of messages that lives here."""

    def __init__(self, client: colibri.Client, session: colibri.Session | None, system: str | None) -> None:
        self._client = client
        self.session = session
        # Not sent yet; without a session, all that was said.
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def say(self, text: str, progress: ProgressLine, options: dict[str, Any]) -> colibri.Stream:
        """Sends a message of the user."""
        self._messages.append({"role": "user", "content": text})
        target = self.session or self._client
        return target.chat_stream(self._messages, on_progress=progress, **given(options))

    def heard(self, reply: colibri.Reply | None) -> None:
        """Keeps the reply, or what came of it; forgets a message that was not answered at all."""
        if self.session is not None:
            self._messages = [] if reply is not None else self._messages[:-1]
        elif reply is not None:
            self._messages.append({"role": "assistant", "content": reply.text})
        else:
            self._messages.pop()

    def history(self) -> list[tuple[str, str]]:
        """Role and text of all that was said."""
        if self.session is None:
            return [(message["role"], message["content"]) for message in self._messages]
        return [(message.role, message.content) for message in self.session.info().messages]


@click.command()
@click.argument("message", required=False)
@click.option("--session", "name", metavar="NAME", help="Keep the conversation under this name, or resume it.")
@click.option("--new", is_flag=True, help="The session must not exist yet.")
@click.option("--resume", is_flag=True, help="The session must exist.")
@click.option("--system", metavar="TEXT", help="A system message, for a conversation that begins.")
@click.option("--stats", is_flag=True, help="Say on stderr what a reply cost.")
@sampling_options
@online
def chat(
    client: colibri.Client,
    message: str | None,
    name: str | None,
    new: bool,
    resume: bool,
    system: str | None,
    stats: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Converse with the model; with MESSAGE or piped input, one message and its reply.

    \b
    colibrictl chat --session alice
    colibrictl chat "Name the capital of France."
    """
    session = _open(client, name, new, resume)
    if session is not None and session.resumed and system:
        raise click.UsageError("--system is for a conversation that begins, and this session exists")
    conversation = Conversation(client, session, system)
    if message is None and sys.stdin.isatty() and not as_json:
        Repl(conversation, options, stats).run()
        return
    text = text_or_stdin(message, "a message").removesuffix("\n")
    if session is not None and session.resumed and not as_json:
        click.echo(str(session), err=True)
    progress = ProgressLine()
    show_reply(conversation.say(text, progress, options), progress, as_json=as_json, stats=stats)


def _open(client: colibri.Client, name: str | None, new: bool, resume: bool) -> colibri.Session | None:
    if new and resume:
        raise click.UsageError("--new and --resume exclude each other")
    if name is None:
        if new or resume:
            raise click.UsageError("--new and --resume are about a --session")
        return None
    return client.session(name, resume=True if resume else False if new else None)


class Repl:
    """Reads, asks, prints."""

    def __init__(self, conversation: Conversation, options: dict[str, Any], stats: bool) -> None:
        self._conversation = conversation
        self._options = options
        self._stats = stats
        self._last: colibri.Reply | None = None
        self._leaving = False
        self._commands: dict[str, Callable[[], object]] = {
            "/help": self._help,
            "/stats": self._show_stats,
            "/history": self._show_history,
            "/quit": self._quit,
        }

    def run(self) -> None:
        """Until Ctrl-D or /quit."""
        session = self._conversation.session
        click.secho(str(session) if session else "a conversation that is not kept (--session NAME keeps it)", dim=True)
        if session is not None and session.state == "interrupted":
            click.secho("the last reply was cut off; what came of it is kept", dim=True)
        click.secho("Ctrl-C ends a reply, Ctrl-D leaves, /help tells more", dim=True)
        with _line_editing():
            while not self._leaving and (line := self._read()) is not None:
                self._obey(line)
        if session is not None and session.n_turns:
            click.secho(f"kept: colibrictl chat --session {session.name} goes on", dim=True)

    def _read(self) -> str | None:
        """A line that is not empty (one that ends in a backslash goes on); None at the end."""
        lines: list[str] = []
        while True:
            try:
                line = input("… " if lines else PROMPT)
            except EOFError:
                click.echo()
                return None
            except KeyboardInterrupt:  # forget what was typed
                click.echo()
                lines.clear()
                continue
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\") and (text := "\n".join(lines)).strip():
                return text
            if not line.endswith("\\"):
                lines.clear()

    def _obey(self, line: str) -> None:
        if not line.startswith("/"):
            self._ask(line)
        elif (command := self._commands.get(line.strip())) is not None:
            command()
        else:
            click.echo(f"no command {line.split()[0]}; /help shows those there are", err=True)

    def _ask(self, text: str) -> None:
        progress = ProgressLine()
        stream: colibri.Stream | None = None
        try:
            stream = self._conversation.say(text, progress, self._options)
            print_stream(stream, progress)
            self._last = stream.result
        except KeyboardInterrupt:
            self._last = self._stopped(stream)
        except (colibri.ConnectionLost, colibri.ShuttingDown):
            raise
        except colibri.ColibriError as error:
            self._last = None
            click.echo(f"colibrictl: {error}", err=True)
        self._conversation.heard(self._last)
        if self._last is not None and self._last.note:
            click.echo(f"note: {self._last.note}", err=True)
        if self._last is not None and self._stats:
            click.echo(reply_line(self._last), err=True)

    def _stopped(self, stream: colibri.Stream | None) -> colibri.Reply | None:
        if stream is None:
            return None
        stream.close()
        click.secho("[stopped]", dim=True)
        with contextlib.suppress(colibri.ColibriError):
            return stream.result
        return None

    def _help(self) -> None:
        click.echo("/stats    what the last reply cost, and the session")
        click.echo("/history  what was said")
        click.echo("/quit     leave (as Ctrl-D)")
        click.echo("A line that ends in a backslash goes on in the next.")

    def _show_stats(self) -> None:
        session = self._conversation.session
        if session is not None:
            click.echo(f"session {session.name!r}: {length(session.n_turns, session.n_tokens)}")
        click.echo(reply_line(self._last) if self._last is not None else "no reply yet")

    def _show_history(self) -> None:
        for role, text in self._conversation.history():
            click.echo(f"{role}: {printable(text)}")

    def _quit(self) -> None:
        self._leaving = True


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Editing and a history of lines kept from call to call, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = _history_path()
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)  # what was asked is nobody else's business
            readline.write_history_file(path)


def _history_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "colibri" / "chat_history"
