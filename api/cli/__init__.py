"""The ``chairlift`` command and its subcommands, from flags, environment and TOML file to settings.

``main`` parses the command line and starts a server, a chat, a download, a diagnosis or a load
test; there is one ``*_flags`` module for each group of ``chairlift serve --help``. It runs in the
process that the user starts, which for ``serve`` becomes the API process. Modules that ``main``
imports at the top must not load MLX, mlx-lm, transformers, aiohttp or numpy: ``chairlift --help``
takes less than 0.2 s of CPU time. Slow imports stand inside the functions that run a command.
"""
