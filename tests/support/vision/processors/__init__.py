"""What the processors of tiny models read, by type."""

from support.vision.processors.files import ProcessorFiles
from support.vision.processors.grids import GRID_PROCESSORS
from support.vision.processors.more_plain import MORE_PLAIN_PROCESSORS
from support.vision.processors.plain import PLAIN_PROCESSORS
from support.vision.processors.prepared import PREPARED_PROCESSORS
from support.vision.processors.scaled import SCALED_PROCESSORS
from support.vision.processors.tiles import TILED_PROCESSORS

PROCESSORS: dict[str, ProcessorFiles] = {
    **PLAIN_PROCESSORS,
    **MORE_PLAIN_PROCESSORS,
    **GRID_PROCESSORS,
    **SCALED_PROCESSORS,
    **TILED_PROCESSORS,
    **PREPARED_PROCESSORS,
}

__all__ = ["PROCESSORS", "ProcessorFiles"]
