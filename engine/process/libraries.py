"""Loads the libraries of a process that computes, in the order in which they have to come."""

from __future__ import annotations

import logging
from typing import NamedTuple

from chairlift.engine.config import cache_dir
from chairlift.engine.cpu.blas import BlasReport, load_fast_blas
from chairlift.engine.cpu.kernel_folder import KernelFolder, lock_kernel_folder
from chairlift.engine.cuda.graphs import set_graph_limits
from chairlift.engine.device.open_files import import_mlx_lm
from chairlift.engine.messages import Loading, ModelInfo
from chairlift.engine.parallel.place import RankPlace, choose_device

log = logging.getLogger(__name__)


class Libraries(NamedTuple):
    """The BLAS that MLX uses, and the folder for MLX's kernels if there is one."""

    blas: BlasReport
    kernels: KernelFolder | None

    def record(self, message: object) -> None:
        """Records the kernels compiled so far, before a message that an engine sends when it is
        ready, or begins another part of its start: at these times MLX compiles nothing.
        """
        begins = isinstance(message, Loading) and not message.total
        if self.kernels is not None and (begins or isinstance(message, ModelInfo)):
            self.kernels.record()


def load_libraries(place: RankPlace | None = None) -> Libraries:
    """Loads the BLAS, then MLX; with several ranks, MLX sees only the device of this one.

    Raises:
        BackendError: MLX cannot be imported here.
    """
    blas = load_fast_blas()
    if blas.warning:
        log.warning(blas.warning)
    if place is not None:
        choose_device(place)
    set_graph_limits(1 if place is None else place.size)
    kernels = lock_kernel_folder(cache_dir() / "kernels")
    import_mlx_lm()
    return Libraries(blas, kernels)
