"""Checks the syntax of a chat template before the model is loaded."""

from __future__ import annotations


def syntax_error(text: str) -> str | None:
    """Checks a chat template; returns one line about its first error, or None without an error."""
    # Imported here, because only few command lines need it.
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """The block with which transformers marks an assistant's turn."""

        tags = {"generation"}  # noqa: RUF012 as in Extension

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        Environment(extensions=[Generation, "jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return None
