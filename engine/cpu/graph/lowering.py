"""Turns the graph of a decoder layer into steps: programs of compiled functions, and NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from chairlift.cache.state import StateLayer
from chairlift.engine.cpu.compiled.compiled_maps import mapped
from chairlift.engine.cpu.compiled.jobs import NoProgramError
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.graph.compiled_operations import add_jobs
from chairlift.engine.cpu.graph.graph import (
    Array,
    Call,
    Graph,
    NoGraphError,
    Primitive,
    StateRead,
    StateWrite,
    Value,
)
from chairlift.engine.cpu.graph.norms import norm_of
from chairlift.engine.cpu.graph.numpy_operations import (
    DTYPES,
    OPERATIONS,
    VIEWS,
    State,
    gathers_lines,
    one_line,
)
from chairlift.engine.cpu.program_builder import ProgramBuilder


class LayerCall(NamedTuple):
    """The arguments of a layer's call beside its input; see ``trace``.

    Attributes:
        mask: attention's.
        cache: has keys and values.
        state: the cache of a recurrent layer.
        offset: the tokens' positions.
    """

    mask: Any
    cache: Any
    state: StateLayer | None
    offset: Any = None


Step = Callable[[LayerCall], object]


class Lowered(NamedTuple):
    """The steps of a layer for a number of tokens, and their memory.

    Attributes:
        x: memory for the layer's input; see ``Form.shape``.
        offset: memory for the tokens' positions; None if the steps do not read them.
        others: memory for further arguments, by name.
        uses_cache: see ``Graph``.
        states: memory for the rows' states before the call, by slot.
        in_place: the shapes of other states, which change in the memory of the cache, by slot.
        steps: are computed one after the other.
        results: the layer's outputs.
        returns_tuple: see ``Graph``.
        kept: what the steps read, too.
    """

    x: Floats
    offset: Array | None
    others: Mapping[str, Array]
    uses_cache: bool
    states: dict[int, Floats]
    in_place: dict[int, tuple[int, ...]]
    steps: Sequence[Step]
    results: Sequence[Array | None]
    returns_tuple: bool
    kept: Sequence[Array]


class Lowering:
    """Adds the steps that compute a graph.

    All layers of a thread share the memory of arrays, because they are computed one after another.

    Attributes:
        states, in_place, kept: see ``Lowered``.
        once: the results of what several operations need, by key.

    Args:
        lower_call: adds the steps of a ``Call``, and returns its result.
    """

    def __init__(self, graph: Graph, lower_call: Callable[[Lowering, Call], Array]) -> None:
        self._graph, self._lower_call = graph, lower_call
        self._calls = {call.output.name: call for call in graph.calls}
        self._arrays: dict[str, Array] = dict(graph.constants)
        self._constants = set(graph.constants)
        self._builder: ProgramBuilder | None = None
        self._count = 0
        self._steps: list[Step] = []
        self.states: dict[int, Floats] = {}
        self.in_place: dict[int, tuple[int, ...]] = {}
        self.kept: list[Array] = []
        self.once: dict[Any, Any] = {}

    def lowered(self) -> Lowered:
        """The steps of the whole graph.

        Raises:
            NoGraphError: there is no way to compute an operation.
            NoProgramError: a part of an operation has no compiled function.
        """
        graph = self._graph
        x = self._given(graph.x)
        offset = self._given(graph.offset) if graph.uses_offset else None
        others = {name: self._given(value) for name, value in graph.others.items()}
        for call in graph.calls:
            # A state that changes in place is never read.
            if not isinstance(call.operation, StateRead):
                self.array(call.output)
        results = [None if each is None else self.array(each) for each in graph.results]
        self._finish()
        kept = [*self.kept, *graph.constants.values()]
        states = graph.uses_cache, self.states, self.in_place
        given = results, graph.returns_tuple
        return Lowered(x, offset, others, *states, self._steps, *given, kept)

    def array(self, value: Value) -> Array:
        """The array of a value, after the steps that compute it have been added."""
        name = value.name
        if name not in self._arrays:
            call = self._calls.get(name)
            if call is not None:
                self._arrays[name] = self._lower_call(self, call)
            elif name in self._graph.producers:
                self._lower(self._graph.producers[name])
            else:
                raise NoGraphError(f"nothing computes {value}")
        return self._arrays[name]

    def is_offset(self, value: Value) -> bool:
        """Whether a value is the tokens' positions."""
        return value == self._graph.offset

    def constant(self, value: Value) -> Array | None:
        """The array of a value that is the same in all calls; None if it is not."""
        primitive = self._graph.producers.get(value.name)
        if value.name not in self._constants and primitive is not None:
            constants = [self.constant(each) for each in primitive.inputs]
            if all(each is not None for each in constants):
                self._lower(primitive)
        return self._arrays[value.name] if value.name in self._constants else None

    def producer(self, value: Value, kind: str) -> Primitive | None:
        """The primitive that computes a value, if it is of this kind."""
        primitive = self._graph.producers.get(value.name)
        return primitive if primitive is not None and primitive.kind == kind else None

    def name(self) -> str:
        """A name for memory that no other array of the graph has."""
        self._count += 1
        return f"graph {self._count}"

    def new(self, shape: Sequence[int], dtype: type[Any] = np.float32) -> Array:
        """Memory for an array that a step writes."""
        if dtype is np.float32:
            return self.program.array(self.name(), *shape)
        return np.empty(shape, dtype)

    @property
    def program(self) -> ProgramBuilder:
        """The program to which jobs are added."""
        if self._builder is None:
            self._builder = ProgramBuilder()
        return self._builder

    def then(self, step: Step) -> None:
        """Adds a step of Python."""
        self._finish()
        self._steps.append(step)

    def own_slot(self, value: Value) -> int:
        """The slot whose state before the call is ``value``, which one operation reads.

        Raises:
            NoGraphError: it is no such state.
        """
        read = self._calls.get(value.name)
        if read is None or not isinstance(read.operation, StateRead):
            raise NoGraphError("a state comes from elsewhere")
        slot = read.operation.slot
        operations = [call.operation for call in self._graph.calls]
        writes = [one for one in operations if isinstance(one, StateWrite) and one.slot == slot]
        if sum(value in inputs for inputs in self._graph.inputs) != len(writes) + 1:
            raise NoGraphError("a state is read after it has changed")
        return slot

    def state(self, slot: int, shape: Sequence[int]) -> Array:
        """The rows' state in a slot before the call."""
        self.states[slot] = self.new(shape)
        return self.states[slot]

    def then_run(self, prepare: Step) -> None:
        """Ends the program; ``prepare`` is called before each of its runs."""
        run = self.program.program.run
        self._builder = None

        def step(call: LayerCall) -> None:
            prepare(call)
            run()

        self._steps.append(step)

    def before(self, step: Step) -> None:
        """Adds a step that is computed before all others."""
        self._steps.insert(0, step)

    def write(
        self,
        kind: str,
        state: State,
        inputs: Sequence[Array],
        into: Array,
        last_is_constant: bool = False,
    ) -> None:
        """Adds the steps of one of MLX's operations; see ``Primitive`` and ``add_jobs``."""
        compute, add = OPERATIONS[kind], self.program.program.add
        if not add_jobs(add, kind, state, inputs, into, last_is_constant):
            self.then(lambda _: compute(state, inputs, into))

    def heads(self, x: Array) -> Floats:
        """``[tokens, heads, dim]`` whose heads are adjacent."""
        adjacent = x.strides[2] == x.itemsize and x.strides[1] == x.shape[2] * x.itemsize
        return x if adjacent else self.contiguous(x)

    def flat(self, x: Array) -> Floats:
        """``[..., numbers]`` as ``[tokens, numbers]``, contiguous."""
        return self.contiguous(x).reshape(-1, x.shape[-1])

    def contiguous(self, x: Array) -> Array:
        """An array with the same numbers, which are contiguous."""
        if x.flags.c_contiguous:
            return x
        into = self.new(x.shape, x.dtype.type)
        self.copy(x, into)
        return into

    def copy(self, x: Array, into: Array) -> None:
        """Adds the steps that copy an array."""
        if not mapped("copy", [x], into, self.program.program.add):
            self.then(lambda _: np.copyto(into, x))

    def _like(self, inputs: Sequence[Array], shape: Sequence[int], dtype: type[Any]) -> Array:
        """Memory for a result, in the order of the largest input of its shape."""
        same = [each for each in inputs if each.shape == tuple(shape) and 0 not in each.strides]
        if not same:
            return self.new(shape, dtype)
        order = sorted(range(len(shape)), key=lambda axis: -abs(same[0].strides[axis]))
        memory = self.new([shape[axis] for axis in order], dtype)
        return memory.transpose(np.argsort(order))

    def _given(self, value: Value) -> Array:
        """Memory for an argument of the layer."""
        self._arrays[value.name] = self.new(value.shape, DTYPES[value.dtype])
        return self._arrays[value.name]

    def _is_identity(self, value: Value) -> bool:
        """Whether a value is the identity matrix that a ``TracedCache`` returns."""
        matrix = self._arrays[value.name]
        square = value.name in self._constants and matrix.shape[-2] == matrix.shape[-1]
        return square and np.array_equal(matrix, np.eye(len(matrix)))

    def _finish(self) -> None:
        if self._builder is not None and len(self._builder.program):
            run = self._builder.program.run
            self._steps.append(lambda _: run())
        self._builder = None

    def _lower(self, primitive: Primitive) -> None:
        """Adds the steps of a primitive, unless its inputs are constants."""
        if all(each.dtype not in DTYPES for each in primitive.outputs):
            raise NoGraphError(f"{primitive.kind} gives {primitive.outputs[0].dtype}")
        norm = norm_of(self, primitive)
        if norm is not None:
            self._arrays[primitive.outputs[0].name] = norm
            return
        inputs = [self.array(each) for each in primitive.inputs]
        names = [each.name for each in primitive.inputs]
        constant = set(names) <= self._constants
        results = self._computed(primitive, inputs, constant)
        for value, result in zip(primitive.outputs, results, strict=True):
            if result.shape != value.shape:
                raise NoGraphError(f"{primitive.kind} of {result.shape} is not {value.shape}")
            self._arrays[value.name] = result
            if constant:
                self._constants.add(value.name)
                self.kept.append(result)

    def _computed(
        self, primitive: Primitive, inputs: Sequence[Array], constant: bool
    ) -> Sequence[Array]:
        kind, state = primitive.kind, primitive.state
        value = primitive.outputs[0]
        if kind == "Split":
            return np.split(inputs[0], state[0], axis=state[1])
        if kind == "Gather":
            if not gathers_lines(state, inputs):
                raise NoGraphError("numbers are gathered from several axes")
            place = primitive.inputs[1].name
            if value.shape == state[1] and place in self._constants:
                return [one_line(state, inputs[0], int(inputs[1].reshape(-1)[0]))]
        if kind in VIEWS:
            view = VIEWS[kind](state, inputs[0], value.shape)
            if constant or np.may_share_memory(view, inputs[0]):
                return [view]
            whole = self.contiguous(inputs[0])
            return [VIEWS[kind](state, whole, value.shape)]
        if kind not in OPERATIONS:
            raise NoGraphError(f"no operation {kind}")
        if kind == "Matmul" and self._is_identity(primitive.inputs[1]):
            return [inputs[0]]
        dtype = DTYPES[value.dtype]
        if kind == "AsType" and inputs[0].dtype == dtype:
            return [inputs[0]]
        if constant:
            into = np.empty(value.shape, dtype)
            OPERATIONS[kind](state, inputs, into)
            return [into]
        into = self._like(inputs, value.shape, dtype)
        last_is_constant = bool(inputs) and primitive.inputs[-1].name in self._constants
        self.write(kind, state, inputs, into, last_is_constant)
        return [into]


def or_none(call: Callable[[], Array]) -> Array | None:
    """The result of a call that adds jobs; None if there are no compiled functions for it."""
    try:
        return call()
    except NoProgramError:
        return None
