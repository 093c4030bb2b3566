"""The interactive prompt: editing, history, completion, slash commands, Ctrl-C."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output
from rich.console import Console

from chairlift.api.cli.chat import background
from chairlift.api.cli.chat.clean import one_line, printable
from chairlift.api.cli.chat.client import ChatError, NoServer
from chairlift.api.cli.chat.completion import SlashCompleter
from chairlift.api.cli.chat.conversation import Conversation
from chairlift.api.cli.chat.history import open_history
from chairlift.api.cli.chat.slash import Leave, run_command
from chairlift.engine.config import cache_dir

_PROMPT = "> "
_CONTINUATION = ". "
_HISTORY = "chat-history"


class Session:
    """Reads questions and slash commands from the terminal until the user leaves.

    Args:
        conversation: what the user talks in.
        input: the keyboard; None means standard input.
        output: where the prompt is drawn; None means standard output, or standard error if the
            replies go to a file.
    """

    def __init__(
        self, conversation: Conversation, input: Input | None = None, output: Output | None = None
    ) -> None:
        self._conversation = conversation
        self._input = input
        terminal = sys.stdout if sys.stdout.isatty() else sys.stderr
        self._output = output or create_output(terminal)
        self._console = Console(file=terminal)
        self._server: background.BackgroundServer | None = None
        self._prompt: PromptSession[str] = PromptSession(
            _PROMPT,
            multiline=True,
            prompt_continuation=_CONTINUATION,
            key_bindings=_key_bindings(),
            history=open_history(cache_dir() / _HISTORY),
            completer=SlashCompleter(conversation),
            complete_while_typing=False,
            input=input,
            output=self._output,
        )

    def run(self, base_url: str, api_key: str | None, images: Sequence[str] = ()) -> None:
        """Talks until the user leaves.

        Args:
            base_url: the server's address. If no server answers there, the user may start one.
            api_key: the API key of a server that is started.
            images: those of the first question, files or URLs.

        Raises:
            ChatError: there is no server, or no such image.
            KeyboardInterrupt: Ctrl-C while a server starts.
        """
        conversation = self._conversation
        self._connect(base_url, api_key)
        conversation.choose_model()
        for image in images:
            conversation.attach(image)
        model = one_line(conversation.fields["model"])
        _note(f"{model}: Ctrl-C stops a reply, Ctrl-D leaves, Alt-Enter begins a line, /help")
        try:
            self._talk()
        finally:
            if self._server is not None:
                _note(self._server.how_to_stop)

    def _talk(self) -> None:
        was_interrupted = False
        while True:
            try:
                line = self._prompt.prompt()
            except EOFError:
                return
            except KeyboardInterrupt:
                # The line that was typed counts as what the first Ctrl-C stops.
                if was_interrupted and not self._prompt.default_buffer.text:
                    return
                was_interrupted = True
                _note("Ctrl-C again leaves")
                continue
            was_interrupted = False
            if not line.strip():
                continue
            try:
                with _without_echo():
                    if not run_command(self._conversation, line):
                        self._conversation.ask(line)
            except ChatError as error:
                _note(f"error: {one_line(str(error))}")
            except Leave:
                return
            except KeyboardInterrupt:
                was_interrupted = True
                _note("stopped; Ctrl-C again leaves")

    def _connect(self, base_url: str, api_key: str | None) -> None:
        conversation = self._conversation
        try:
            conversation.model_ids()
        except NoServer:
            if not background.can_start(base_url) or not self._agrees(base_url):
                raise
            model = conversation.fields.get("model")
            server = background.start(base_url, model, api_key, cache_dir())
            _note(f"starting a server; its log is {server.log}")
            background.wait(server, conversation.is_healthy, self._console)
            self._server = server
            _note(server.how_to_stop)
            if model not in (ids := conversation.model_ids()):
                # The server was started with a path; its id in the API is another.
                conversation.fields["model"] = ids[0]

    def _agrees(self, base_url: str) -> bool:
        question: PromptSession[str] = PromptSession(
            history=InMemoryHistory(), input=self._input, output=self._output
        )
        try:
            answer = question.prompt(
                f"no server answers at {printable(base_url)}. Start one in the background? (y/n) "
            )
        except (EOFError, KeyboardInterrupt):
            return False
        return answer.strip().lower() in ("y", "yes")


@contextmanager
def _without_echo() -> Iterator[None]:
    """Keeps keys that are typed while a reply streams from appearing in the middle of it.

    The next prompt reads them.
    """
    if not sys.stdin.isatty():
        yield
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    silent = termios.tcgetattr(file)
    # A terminal that collects lines would swallow Ctrl-D.
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(file, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _key_bindings() -> KeyBindings:
    """Enter sends and Alt-Enter, which terminals send as Esc and Enter, begins a new line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr)
