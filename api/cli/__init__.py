"""The ``chairlift`` command and its subcommands: builds settings from flags, environment and TOML.

``main`` runs a subcommand, whose module it imports only then. ``serve`` starts a server; each group
of its flags has a module in ``serve_flags``. The package runs in the process that the user
starts; ``serve`` makes it the API process. Modules with flags must not load MLX, mlx-lm,
transformers, aiohttp or numpy at the top: ``chairlift --help`` must take less than 0.2 s of CPU
time, and wrong flags must fail at once. Slow imports are inside the functions that run a command.
"""
