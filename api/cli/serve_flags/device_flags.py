"""The flags of ``serve`` for several devices: replicas of the model, or parts of it."""

from __future__ import annotations

import argparse

from chairlift.api.cli.arguments.list_types import device_names
from chairlift.api.cli.flags import existing_file, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group "Several devices"."""
    add = parser.add_argument_group("Several devices").add_argument
    add(
        "--replicas",
        type=positive,
        metavar="N",
        help="engine processes that serve the model together, each with its own weights; a request "
        "goes to the one that has its prefix, unless that is busier (default: one for each of "
        "--devices, else 1)",
    )
    add(
        "--devices",
        type=device_names,
        action="extend",
        default=[],
        metavar="LIST",
        help="the CUDA device of each replica, like 0,1: numbers among the devices of "
        "CUDA_VISIBLE_DEVICES, or names as there (default: one after the other)",
    )
    add(
        "--tensor-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="divide the model among N devices, with a process for each (default: %(default)s)",
    )
    add(
        "--hostfile",
        type=existing_file,
        metavar="FILE",
        help="the hosts of the N processes of --tensor-parallel-size, as JSON for mlx.launch; the "
        "first is this machine (default: all on this machine)",
    )
