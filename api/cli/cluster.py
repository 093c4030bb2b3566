"""``chairlift cluster``: deploys models to a Ray cluster and asks for their state."""

from __future__ import annotations

import argparse
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from chairlift.api.cli.flags import port
from chairlift.api.cluster.config import ClusterConfig, ClusterConfigError, parse
from chairlift.api.settings import ServerSettings

_SERVER = ServerSettings()


class _UsageError(Exception):
    """The command cannot do this. The message is one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the action, the file and the flags of ``cluster``."""
    parser.description = (
        "Deploys models to a running Ray cluster with Ray Serve, shows what is deployed, or "
        "deletes it. Needs the extra ray: pip install 'chairlift[ray]'."
    )
    add = parser.add_argument
    add(
        "action",
        choices=("deploy", "status", "delete"),
        help="deploy FILE and wait until it serves; print the applications; delete one",
    )
    add("file", nargs="?", type=Path, metavar="FILE", help="YAML file of models, for deploy")
    add(
        "--address",
        default="auto",
        help="address of Ray: HOST:PORT, or ray://HOST:PORT from outside (default: $RAY_ADDRESS, "
        "or the cluster of this machine)",
    )
    add("--name", default="chairlift", help="name of the application (default: %(default)s)")
    add(
        "--route-prefix",
        default="/",
        metavar="PATH",
        help="path below which the application serves (default: %(default)s)",
    )
    add(
        "--host",
        default=_SERVER.host,
        help="address that Ray's proxies listen on if none runs yet (default: %(default)s)",
    )
    add(
        "--port",
        type=port,
        default=_SERVER.port,
        help="port of Ray's proxies if none runs yet (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Does the action; returns 0, 1 if it failed, 130 after Ctrl-C."""
    try:
        if (options.file is not None) != (options.action == "deploy"):
            options.parser.error("deploy takes a FILE, and no other action does")
        # Before Ray is imported, so that a wrong file fails at once.
        config = None if options.file is None else _read(options.file)
        if find_spec("ray") is None or find_spec("ray.serve") is None:
            raise _UsageError("Ray is not installed: pip install 'chairlift[ray]'")
        _act(options, config)
    except (_UsageError, ClusterConfigError) as error:
        print(f"chairlift cluster: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("chairlift cluster: interrupted; Ray goes on with what it was told", file=sys.stderr)
        return 130
    return 0


def _act(options: argparse.Namespace, config: ClusterConfig | None) -> None:
    from chairlift.api.cluster import deploy

    signal.signal(signal.SIGINT, signal.default_int_handler)
    destination = deploy.Destination(
        *(options.address, options.name, options.route_prefix, options.host, options.port)
    )
    try:
        if config is not None:
            deploy.deploy(config, destination, lambda line: print(line, flush=True))
            print(f"{options.name} serves {', '.join(m.served_name for m in config.models)}")
        elif options.action == "status":
            lines = deploy.status(options.address)
            print("\n".join(lines) or "no application is deployed")
        else:
            deploy.delete(options.address, options.name)
            print(f"deleted {options.name}")
    except deploy.ClusterError as error:
        raise _UsageError(str(error)) from error


def _read(path: Path) -> ClusterConfig:
    """Reads a file of models.

    Raises:
        _UsageError, ClusterConfigError: the file cannot be read or is invalid.
    """
    # A dependency of Ray; it is imported here because it takes time.
    try:
        import yaml
    except ImportError:
        raise _UsageError("Ray is not installed: pip install 'chairlift[ray]'") from None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _UsageError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise _UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if isinstance(values, dict) and "applications" in values:
        raise _UsageError(
            f"{path}: this is a configuration of Ray Serve; deploy it with 'serve deploy {path}'"
        )
    try:
        return parse(values)
    except ClusterConfigError as error:
        raise ClusterConfigError(f"{path}: {error}") from error
