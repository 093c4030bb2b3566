"""Completes slash commands and their arguments at the prompt."""

from __future__ import annotations

from collections.abc import Iterable

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from chairlift.api.cli.chat.clean import one_line
from chairlift.api.cli.chat.conversation import Conversation
from chairlift.api.cli.chat.slash import ANY_FILE, COMMANDS, FILE


class SlashCompleter(Completer):
    """Completes the names of slash commands, and their arguments.

    Args:
        conversation: the conversation that the commands change.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """See Completer. A line that is no command has no completions."""
        word, space, argument = document.text_before_cursor.partition(" ")
        if not word.startswith("/"):
            return
        if not space:
            for name, known in COMMANDS.items():
                if name.startswith(word[1:]):
                    yield Completion(f"/{name}", -len(word), display_meta=known.help)
            return
        command = COMMANDS.get(word[1:])
        typed = argument.lstrip()
        if command is None:
            return
        if command.argument in (FILE, ANY_FILE):
            yield from self._paths.get_completions(Document(typed, len(typed)), event)
        for value in command.values(self._conversation):
            if value.startswith(typed):
                yield Completion(value, -len(typed), display=one_line(value))
