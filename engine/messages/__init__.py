"""The messages between the API process and the engine process.

Plain msgspec structs, encoded as MessagePack: ``requests`` go to the engine, ``outputs``, ``stats``
and ``startup`` come from it. Times are seconds of ``time.monotonic()``, which all processes of one
machine share; sizes are bytes. Import the messages from here. Runs in both processes; must not
import MLX.
"""

from chairlift.engine.messages.images import Array, ImagePrompt, ImageSource, PromptImage
from chairlift.engine.messages.outputs import (
    MAX_TOP_LOGPROBS,
    FinishReason,
    PrefillTimes,
    PromptLogprobs,
    TokenLogprobs,
    TokenOutput,
)
from chairlift.engine.messages.requests import (
    MAX_PRIORITY,
    Abort,
    Grammar,
    LoadAdapter,
    Pooling,
    Resumed,
    SamplingParams,
    Shutdown,
    Submit,
    Thinking,
    UnloadAdapter,
    Withdraw,
)
from chairlift.engine.messages.startup import (
    AdapterFailed,
    AdapterLoaded,
    Loading,
    ModelInfo,
    OnProgress,
    StartFailed,
    silent,
)
from chairlift.engine.messages.stats import FinishedChoice, StepOutput, StepStats

ToEngine = Submit | Abort | Withdraw | LoadAdapter | UnloadAdapter | Shutdown
FromEngine = StepOutput | Loading | ModelInfo | StartFailed | AdapterLoaded | AdapterFailed

__all__ = [
    "MAX_PRIORITY",
    "MAX_TOP_LOGPROBS",
    "Abort",
    "AdapterFailed",
    "AdapterLoaded",
    "Array",
    "FinishReason",
    "FinishedChoice",
    "FromEngine",
    "Grammar",
    "ImagePrompt",
    "ImageSource",
    "LoadAdapter",
    "Loading",
    "ModelInfo",
    "OnProgress",
    "Pooling",
    "PrefillTimes",
    "PromptImage",
    "PromptLogprobs",
    "Resumed",
    "SamplingParams",
    "Shutdown",
    "StartFailed",
    "StepOutput",
    "StepStats",
    "Submit",
    "Thinking",
    "ToEngine",
    "TokenLogprobs",
    "TokenOutput",
    "UnloadAdapter",
    "Withdraw",
    "silent",
]
