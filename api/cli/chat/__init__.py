"""``chairlift chat``: a conversation with a server in the terminal, or one question through a pipe.

``command`` holds the flags and chooses between the two, ``conversation`` the messages, ``session``
the interactive prompt with its slash commands, ``display`` shows replies. Text of the model and of
the server passes ``clean.printable`` before it reaches a terminal.

NOTE: prompt_toolkit and rich are imported only by a conversation in a terminal, inside functions.
"""

from chairlift.api.cli.chat.command import add_arguments, run

__all__ = ["add_arguments", "run"]
