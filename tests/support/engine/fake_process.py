"""Engine processes that a test plays, in place of real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from chairlift.engine.messages import (
    Abort,
    FinishedChoice,
    FromEngine,
    StepOutput,
    StepStats,
    Submit,
    ToEngine,
    TokenOutput,
    Withdraw,
)
from chairlift.engine.process.engine_process import Start

# A step of the fake takes this long for the statistics; nothing waits for it.
STEP_SECONDS = 0.01


class Process:
    """A fake ``EngineProcess``.

    Attributes:
        started: all processes of a test.
        start, environment: what it was spawned with.
        computing: the requests that it computes when it ends.
    """

    started: list[Process]

    def __init__(self, receive: Callable[[FromEngine], None]) -> None:
        self.pid = len(self.started)
        self.receive = receive
        self.sent: list[ToEngine] = []
        self.start: Start | None = None
        self.environment: Mapping[str, str] = {}
        self.computing: dict[str, float] = {}
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.started.append(self)

    async def spawn(self, start: Start, environment: Mapping[str, str]) -> None:
        self.start, self.environment = start, environment

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def ended(self) -> int:
        return await asyncio.shield(self._code)

    def end(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)

    def kill(self) -> None:
        self.end(-9)

    async def stop(self) -> None:
        """Waits for the end of the process; a loading process does not react to requests."""
        await self._code

    def close(self) -> None:
        pass

    @property
    def running(self) -> bool:
        return not self._code.done()

    @property
    def submitted(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, Submit)]


def token(prompt: list[int], position: int) -> int:
    """The output token of a fake engine: it depends on nothing else, as with greedy decoding."""
    return (sum(prompt) * 31 + position * 7) % 251


class ComputingProcess(Process):
    """A fake that computes one token of each running choice in a step.

    Attributes:
        poison: the process crashes instead of computing a request whose prompt has this token.
    """

    poison = 666

    def __init__(self, receive: Callable[[FromEngine], None]) -> None:
        super().__init__(receive)
        self._requests: dict[str, Submit] = {}
        self._outputs: dict[str, dict[int, int]] = {}

    def send(self, message: ToEngine) -> None:
        super().send(message)
        match message:
            case Submit():
                self._requests[message.request_id] = message
                choices = message.resumed or range(message.n)
                self._outputs[message.request_id] = {
                    choice if isinstance(choice, int) else choice.index: (
                        0 if isinstance(choice, int) else len(choice.output)
                    )
                    for choice in choices
                }
            case Abort() if message.index is not None:
                self._outputs.get(message.request_id, {}).pop(message.index, None)
            case Abort() | Withdraw():
                self._outputs.pop(message.request_id, None)

    async def stop(self) -> None:
        self.end(0)

    @property
    def active(self) -> list[str]:
        """The ids of the requests that the next step computes."""
        return [name for name, choices in self._outputs.items() if choices]

    def crash(self, code: int = 1) -> None:
        self.computing = dict.fromkeys(self.active, 1.0)
        self.end(code)

    def step(self) -> None:
        """Computes a token of every choice, or crashes."""
        if not self.running or not self.active:
            return
        if any(self.poison in self._requests[name].prompt for name in self.active):
            self.crash()
            return
        outputs: list[TokenOutput] = []
        stats = StepStats(
            ended_seconds=STEP_SECONDS, ended_rows=len(self.active), ended_tokens=len(self.active)
        )
        for name in self.active:
            request, choices = self._requests[name], self._outputs[name]
            for index in list(choices):
                position = choices[index]
                last = position + 1 == request.params.max_tokens
                value = token(request.prompt, position)
                outputs.append(TokenOutput(name, index, [value], finish="length" if last else None))
                choices[index] += 1
                if last:
                    del choices[index]
                    stats.finished.append(_finished(request))
        stats.running = sum(map(len, self._outputs.values()))
        self.receive(StepOutput(outputs, stats))


def _finished(request: Submit) -> FinishedChoice:
    tokens = request.params.max_tokens
    return FinishedChoice(
        "length", len(request.prompt), tokens, tokens, request.n, 0.0, 0.0, 0.0, 1.0
    )
