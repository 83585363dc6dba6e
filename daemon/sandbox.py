"""Where chat templates run: jinja2's sandbox keeps them from what they must not touch, and this one bounds what they
cost. A template comes with a model that somebody else made, and messages come from anybody.

    steps        every turn of a loop and every call
    characters   every text and list that is made, before it is made where an operation can make much of little

A template that goes over a bound raises TemplateRuntimeError; the daemon and its other requests go on.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

# No frame brings more than half of it, and no context that fits a machine is longer.
MAX_CHARACTERS = 1 << 25
# Of all that one rendering makes, most of which is soon dropped: some operations on the longest text there may be.
MAX_CHARACTERS_MADE = 1 << 28
# Steps of loops, and calls; a conversation of a hundred thousand messages stays below.
MAX_STEPS = 1_000_000
# What an item of a list or map costs, so that nested ones are bounded in number, too.
_ITEM_CHARACTERS = 8

_Text = str | bytes


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_CHARACTERS_MADE

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise jinja2.TemplateRuntimeError(f"more than {MAX_STEPS} steps of loops and calls")

    def make(self, n: int, what: str) -> None:
        """Before, or after, n characters or items are made."""
        self._characters -= n
        if n > MAX_CHARACTERS or self._characters < 0:
            raise jinja2.TemplateRuntimeError(f"the result of {what} is too large")


_current: ContextVar[Budget] = ContextVar("budget of this rendering")


@contextmanager
def budget() -> Iterator[Budget]:
    """The bounds of one rendering, which holds for this thread until the end of the block."""
    new = Budget()
    token = _current.set(new)
    try:
        yield new
    finally:
        _current.reset(token)


def _make(n: int, what: str) -> None:
    # The compiler computes constants before any rendering: each by itself is bounded.
    _current.get(Budget()).make(n, what)


def _text_size(value: Any) -> int:
    """About how long a value is as text, nested ones included: stops to look when it is too long anyway."""
    total = 0
    left: list[Any] = [value]
    while left and total <= MAX_CHARACTERS:
        item = left.pop()
        parts: Collection[Any] = ()
        if isinstance(item, _Text):
            total += len(item)
        elif isinstance(item, jinja2.utils.Namespace):
            parts = [object.__getattribute__(item, "_Namespace__attrs")]
        elif isinstance(item, Mapping):
            parts = [part for pair in item.items() for part in pair]
        elif isinstance(item, Collection):
            parts = item
        total += _ITEM_CHARACTERS
        if parts:
            total += _ITEM_CHARACTERS * len(parts)
            left.extend(parts if total <= MAX_CHARACTERS else ())
    return total


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Characters of a text, items of a sequence, bits of a power; 0 where it does not matter."""
    if operator == "**":
        return left.bit_length() * abs(right) if isinstance(left, int) and isinstance(right, int) else 0
    if operator == "%":
        return _percent_size(left, right) if isinstance(left, _Text) else 0
    n_left, n_right = (len(value) if isinstance(value, Sequence) else 0 for value in (left, right))
    if operator == "+":
        return n_left + n_right
    return n_left * right if isinstance(right, int) else n_right * left if isinstance(left, int) else 0


_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


def _percent_size(text: _Text, values: Any) -> int:
    """Of text % values."""
    fields = _PERCENT_FIELD.findall(text if isinstance(text, str) else text.decode("latin-1"))
    widths = [number for field in fields for number in field if number]
    if "*" in widths:
        raise jinja2.TemplateRuntimeError("a width that is a value (*) is not available here")
    return len(text) + sum(map(int, widths)) + len(fields) * _text_size(values)


def _format_size(text: str, values: Any) -> int:
    """Of text.format(values)."""
    fields = [(spec or "") for _, name, spec, _ in string.Formatter().parse(text) if name is not None]
    if any("{" in spec for spec in fields):
        raise jinja2.TemplateRuntimeError("a width that is a value ({}) is not available here")
    widths = sum(int(number) for spec in fields for number in re.findall(r"\d+", spec))
    return len(text) + widths + len(fields) * _text_size(values)


def _join_size(separator: Any, items: Any) -> int:
    return _text_size(items) + (len(items) * len(separator) if isinstance(items, Sized) else 0)


def _replace_size(text: Any, old: Any, new: Any) -> int:
    return len(text) + int(text.count(old)) * len(new)


def _method_size(name: str, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Of the result of a method of a text that can make much of little; 0 for the others."""
    if name in ("center", "ljust", "rjust", "zfill"):
        return int(args[0])
    if name == "expandtabs":
        tab = args[0] if args else kwargs.get("tabsize", 8)
        return len(text) + len(text) * abs(int(tab))
    if name == "replace":
        return _replace_size(text, args[0], args[1])
    if name == "join":
        return _join_size(text, args[0])
    if name == "translate":
        raise jinja2.TemplateRuntimeError("translate is not available here")
    return 0


def _filter_size(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The same for filters."""
    numbers = [abs(number) for number in (*args, *kwargs.values()) if isinstance(number, int)]
    if name == "join":
        separator = args[0] if args else kwargs.get("d", "")
        return _join_size(separator if isinstance(separator, _Text) else str(separator), value)
    if name == "replace":
        old, new, *_ = [*args, *kwargs.values()]
        return _replace_size(str(value), str(old), str(new))
    if name == "format":
        return _percent_size(str(value), kwargs or args)
    texts = [len(text) for text in (*args, *kwargs.values()) if isinstance(text, _Text)]
    if name == "indent":
        n_lines = str(value).count("\n") + 1
        return _text_size(value) + n_lines * max(numbers + texts, default=4)
    if name in ("tojson", "wordwrap"):
        return _text_size(value) * (1 + max(numbers + texts, default=0) // _ITEM_CHARACTERS)
    return _text_size(value) + sum(numbers)


# Filters that only look at a value, or hand its items on.
_LOOKING = frozenset(
    """abs attr count counted d default dictsort first float groupby int items last length list map max min random
    reject rejectattr reverse round select selectattr sort unique""".split()  # noqa: SIM905 (a line, not a column)
)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is bounded before it is made where it can be large, and counted after."""
    n_own = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*given: Any, **kwargs: Any) -> Any:
        own, (value, *args) = given[:n_own], given[n_own:]
        if name == "sum" and not isinstance(kwargs.get("start", args[1] if len(args) > 1 else 0), int | float):
            raise jinja2.TemplateRuntimeError("sum is available for numbers only")
        if name not in _LOOKING:
            if isinstance(value, Iterator):
                value = list(value)
            _make(_filter_size(name, value, args, kwargs), name)
        return _counted_result(function(*own, value, *args, **kwargs), value, name)

    return bounded


def _counted_result(result: Any, source: Any, what: str) -> Any:
    if result is not source and isinstance(result, _Text | Sequence):
        _make(len(result), what)
    return result


def _counted(iterable: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop."""
    steps = _current.get()
    for item in iterable:
        steps.step()
        yield item


def _concatenated(parts: Sequence[Any]) -> str:
    """The operator ~."""
    _make(_text_size(parts), "~")
    return "".join(map(str, parts))


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    return _counted_result(value[start:stop:step], value, "a slice")


def _finalize(value: Any) -> Any:
    """What {{ … }} is about to write."""
    if not isinstance(value, str):
        _make(_text_size(value), "{{ }}")
    return value


class _Rewriter(jinja2.visitor.NodeTransformer):
    """Puts counting into loops, and bounds into ~ and slices, which jinja2 offers no hook for."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, "counted")
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._filtered(jinja2.nodes.List(node.nodes, lineno=node.lineno), "concatenated")

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, jinja2.nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        given = [bound or jinja2.nodes.Const(None, lineno=node.lineno) for bound in bounds]
        return self._filtered(node.node, "sliced", given)

    def _filtered(
        self, node: jinja2.nodes.Node, name: str, args: Sequence[jinja2.nodes.Expr] = ()
    ) -> jinja2.nodes.Filter:
        return jinja2.nodes.Filter(
            node, name, list(args), [], None, None, lineno=node.lineno, environment=self._environment
        )


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks a reply for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Bounded in steps and characters, inside `with budget():`. `filters` are added to jinja2's own."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_finalize,
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
        )
        self.filters.update(filters)
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {"counted": _counted, "concatenated": _concatenated, "sliced": _sliced}
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _Rewriter(self).visit(super()._parse(source, name, filename))
        return tree

    def concat(self, parts: Iterable[str]) -> str:
        """What a macro or a block gives, from its pieces."""
        pieces = list(parts)
        _make(sum(map(len, pieces)), "a block or macro")
        return "".join(pieces)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _make(_format_size(value.__self__, [*args, *kwargs.values()]), "format")
            return wrapped(*args, **kwargs)

        return bounded

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _current.get().step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, _Text):
            if name == "join" and isinstance(args[0], Iterator):
                args = (list(args[0]),)
            _make(_method_size(name, owner, args, kwargs), name)
        return _counted_result(super().call(__context, __obj, *args, **kwargs), owner, name)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _make(_result_size(operator, left, right), operator)
        return super().call_binop(context, operator, left, right)
