"""An engine client whose engine is played by the test."""

from __future__ import annotations

from collections.abc import AsyncIterator

from support.api.fake_engine import model_info

from chairlift.engine.client.base import BaseEngineClient
from chairlift.engine.client.stream import Stream
from chairlift.engine.messages import (
    SamplingParams,
    StepOutput,
    StepStats,
    Submit,
    ToEngine,
    TokenOutput,
)


class Scripted(BaseEngineClient):
    """Records messages to the engine; the test sends the engine's outputs with ``step``."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[ToEngine] = []
        self.begin(lambda text: None)
        self.receive(model_info())

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    def step(self, *outputs: TokenOutput) -> None:
        self.receive(StepOutput(list(outputs), StepStats()))


def submitted(client: Scripted, name: str, n: int = 1) -> Stream:
    return client.submit(Submit(name, [1], SamplingParams(max_tokens=4, seed=0), n))


async def tokens(batches: AsyncIterator[list[TokenOutput]]) -> list[list[int]]:
    return [[token for output in batch for token in output.token_ids] async for batch in batches]
