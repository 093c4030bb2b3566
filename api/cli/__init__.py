"""The ``chairlift`` command and its subcommands: builds settings from flags, environment and TOML.

``main`` parses the command line and starts a server, a chat, a download, a diagnosis or a load
test. Each group of ``chairlift serve --help`` has a module ``*_flags``: its ``add_arguments`` adds
the flags, and most have a function ``*_settings`` that converts the values to settings. The package
runs in the process that the user starts; ``serve`` makes it the API process. Modules that ``main``
imports at the top must not load MLX, mlx-lm, transformers, aiohttp or numpy, because ``chairlift
--help`` must take less than 0.2 s of CPU time. Slow imports are inside the functions that run a
command.
"""
