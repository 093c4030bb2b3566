"""How commands read their arguments: the parser, other servers' names of flags, and the sources.

``parser.CommandParser`` parses every command and tool, ``config_sources.resolve`` adds variables
and a file, ``aliases.AliasAction`` is a second name of a flag. Imports nothing slow.
"""
