"""Chat templates without huge operations, which would fill the memory or hold the interpreter.

A template is code that comes with a model. jinja2's sandbox keeps it from Python's internals, and
``TimeLimitedThreads`` ends its loops, but neither interrupts one operation like ``'x' * 10**10``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import wraps
from itertools import islice
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# The longest text, and the most values in a value; more than any prompt has.
MAX_CHARS = 32 << 20
_MAX_VALUES = 1 << 19
# Larger numbers are only values, but no widths, counts or precisions.
_MAX_NUMBER = 1_000_000
_MAX_BITS = 100_000
# Lengths of what json.dumps repeats, and of what slow regular expressions search.
_MAX_INDENT = 64
_MAX_SEARCHED = 1 << 16
_BIG_NUMBER = re.compile(r"[0-9]{7}")
# A width in a format that is an argument.
_INNER_WIDTH = re.compile(r"%[^a-zA-Z]*\*|{[^}]*:[^}]*{")
_SEARCHING = frozenset(("striptags", "urlize", "wordwrap"))
# Filters whose time and result do not depend on what is in the values of a container.
_CHEAP = frozenset(
    (
        *("attr", "count", "d", "default", "first", "items", "last", "length", "list", "map"),
        *("reject", "rejectattr", "reverse", "select", "selectattr"),
    )
)
_WITH_NUMBERS = frozenset(("d", "default", "format"))
_VALUES = (str, bytes, int, float, list, tuple)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, whose operations raise SecurityError if they are too large."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.filters = _Filters(self.filters)
        self.finalize = _bounded
        del self.globals["lipsum"]

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins the parts of an output."""
        return "".join(_counted(parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **options: Any) -> Any:
        if isinstance(obj, Macro):  # what it does with its arguments is checked there
            return super().call(context, obj, *args, **options)
        size = _check(args, options) if args or options else 0
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        name = getattr(method, "__name__", "")
        owner = getattr(method, "__self__", None)
        if isinstance(owner, _VALUES):
            _check_sizes(name, owner, [*args, *options.values()])
        elif name == "strftime_now":
            _require(size <= _MAX_SEARCHED)
        elif name == "fromkeys":
            _require(sum(map(_length, args[:1])) * _check(*args[1:]) <= MAX_CHARS)
        return super().call(context, obj, *args, **options)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Rewriter().visit(super()._parse(source, name, filename))
        return template


class _Rewriter(NodeTransformer):
    """Lets filters check what jinja2 compiles to operations of Python: ``~``, literals and ``==``.

    Without the checks of literals, nested lists could have exponentially many values. jinja2 finds
    the methods by the names of its classes.
    """

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_bounded")

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_bounded") if node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for operand in node.ops:
            if not isinstance(node.expr, nodes.Const) and not isinstance(operand.expr, nodes.Const):
                operand.expr = _filtered(operand.expr, "_bounded")
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Filters(dict[str, Any]):
    """The filters by name, each with a check before it."""

    def __init__(self, filters: Mapping[str, Any]) -> None:
        super().__init__({name: _checked(name, filter) for name, filter in filters.items()})
        super().__setitem__("_bounded", _bounded)
        super().__setitem__("_concat", _concat)

    def __setitem__(self, name: str, filter: Any) -> None:
        super().__setitem__(name, _checked(name, filter))


def _checked(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    # Some filters get the context before the value.
    first = int(hasattr(filter, "jinja_pass_arg"))

    @wraps(filter)
    def checked(*args: Any, **options: Any) -> Any:
        before, value, others = args[:first], args[first], args[first + 1 :]
        if name not in _CHEAP:
            if isinstance(value, Iterator):
                value = list(islice(value, _MAX_VALUES + 1))
            _check(value)
        if others or options:
            _check(others, options)
        _check_sizes(name, value, [*others, *options.values()])
        return filter(*before, value, *others, **options)

    return checked


def _bounded(value: Any) -> Any:
    if not isinstance(value, str):
        _check(value)
    return value


def _concat(values: Sequence[Any]) -> str:
    _check(values)
    return "".join(_counted(map(str, values)))


def _counted(parts: Iterable[str]) -> Iterator[str]:
    chars = 0
    for part in parts:
        chars += len(part)
        _require(chars <= MAX_CHARS)
        yield part


def _check(*values: Any) -> int:
    """Checks the size of values with all that is in them, each counted where it is; returns it."""
    chars, count = 0, 0
    stack = [iter(values)]
    while stack:
        for each in stack[-1]:
            count += 1
            # The abstract class comes last: asking for it takes ten times as long.
            if isinstance(each, (str, bytes)):
                chars += len(each)
            elif isinstance(each, int):
                _require(each.bit_length() <= _MAX_BITS)
            elif isinstance(each, (list, tuple, set, frozenset)):
                stack.append(iter(each))
                break
            elif isinstance(each, Namespace):
                stack.append(iter(each._Namespace__attrs.values()))
                break
            elif isinstance(each, Mapping):
                stack += [iter(each.keys()), iter(each.values())]
                break
        else:
            stack.pop()
        _require(chars <= MAX_CHARS and count <= _MAX_VALUES)
    return chars + count


def _check_operation(operator: str, left: Any, right: Any) -> None:
    match operator:
        case "+" if isinstance(left, str | bytes):
            _require(len(left) + _length(right) <= MAX_CHARS)
        case "+":
            _check(left, right)
        case "*" if isinstance(left, int) and isinstance(right, int):
            _require(left.bit_length() + right.bit_length() <= _MAX_BITS)
        case "*":
            repeated, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int):
                _require(_check(repeated) * times <= MAX_CHARS)
        case "**" if isinstance(left, int) and isinstance(right, int):
            _require(left.bit_length() * right <= _MAX_BITS)
        case "%" if isinstance(left, str | bytes):
            _check_format(str(left), "%", _check(left, right))


def _check_sizes(name: str, value: Any, args: Sequence[Any]) -> None:
    """Checks how long the result of a filter, or of a method of ``value``, is at most."""
    widths = [n if isinstance(n, int) else _length(n) for n in args]
    if name in _SEARCHING:
        _require(_length(value) <= _MAX_SEARCHED)
    if name not in _WITH_NUMBERS:
        _require(all(abs(n) <= _MAX_NUMBER for n in args if isinstance(n, int)))
    match name:
        case "replace" if len(args) > 1:
            text, old = str(value), str(args[0])
            _require(len(text) + text.count(old) * max(widths[1:]) <= MAX_CHARS)
        case "join":  # of the filter the value is joined, of the method it is between the others
            _require(_length(value) * sum(widths) <= MAX_CHARS)
        case "indent" | "expandtabs":
            text = str(value)
            lines = 1 + text.count("\n") + text.count("\t")
            _require(len(text) + lines * max(widths, default=8) <= MAX_CHARS)
        case "translate":
            longest = [_length(n) for table in args for n in dict(table).values()]
            _require(_length(value) * max(longest, default=1) <= MAX_CHARS)
        case "batch" | "slice":
            _require(max(widths, default=0) * _check(*args[1:]) <= MAX_CHARS)
        case "format" | "format_map":
            _check_format(str(value), "%{", _check(value, *args))
        case "tojson":
            _require(max([*widths, _check(*args)]) <= _MAX_INDENT)
        case "sum":
            _require(all(isinstance(n, int | float | str) for n in args))


def _check_format(form: str, marks: str, size: int) -> None:
    """Checks a format, whose every mark may write arguments of ``size``: it has no large width."""
    _require(_BIG_NUMBER.search(form) is None and _INNER_WIDTH.search(form) is None)
    _require(sum(map(form.count, marks)) * size <= MAX_CHARS)


def _length(value: Any) -> int:
    """The length of a text or a container; 0 of others."""
    return len(value) if isinstance(value, Sized) else 0


def _require(is_small: bool) -> None:
    if not is_small:
        raise SecurityError("an operation of the template is too large")
