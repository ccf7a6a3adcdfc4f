"""Renders chat templates, which are untrusted code of checkpoints, in Jinja's sandbox with a budget.

Templates can use what Transformers (`apply_chat_template`) offers: Python's `tojson`, `strftime_now`,
`raise_exception`, the tags `break`, `continue` and `generation`.

The sandbox alone bounds neither time nor memory. Here each loop step, each call and each value that is made,
compared or written costs units of a budget; large values are paid for before they are made. So any template
ends within about a second, and with at most some 100 MB.
"""

import datetime
import functools
import json
import re
import string
import threading
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_BUDGET = 4_000_000  # units
_CHARACTERS_PER_UNIT = 8  # characters of a text per unit
_UNITS_PER_VALUE = 4  # units per value
_UNITS_PER_STEP = 100  # units per call or loop step; more in a long template, whose body may be long
_MAX_SOURCE = 64 << 10  # maximum characters of a template
_MAX_WIDTH = 1000  # of padding and indents
_MAX_BITS = 4096  # of an integer

# allowed filters
_FILTERS = (
    "abs attr batch capitalize center count d default dictsort e escape first float forceescape format"
    " groupby indent int items join last length list lower map max min reject rejectattr replace reverse"
    " round safe select selectattr slice sort string sum title tojson trim truncate unique upper urlencode"
    " wordcount"
).split()
# filters that read at most one value
_FREE_FILTERS = {"attr", "count", "d", "default", "first", "items", "last", "length"}
# tests that compare whole values
_COMPARING_TESTS = {"==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le", "gt"}
_COMPARING_TESTS |= {"greaterthan", "ge", "in"}
# filters and methods that take a width
_WIDENING = {"batch", "center", "indent", "ljust", "rjust", "round", "slice", "tojson", "truncate", "zfill"}

# allowed methods and attributes, by type
_TEXT_METHODS = (
    "capitalize casefold center count endswith find format format_map index isalnum isalpha isascii isdecimal"
    " isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip"
    " partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split"
    " splitlines startswith strip swapcase title upper zfill"
).split()
_METHODS: list[tuple[Any, list[str]]] = [
    (str, _TEXT_METHODS),
    (Mapping, ["copy", "get", "items", "keys", "values"]),
    (list | tuple, ["copy", "count", "index"]),
    (int | float, ["bit_length", "imag", "is_integer", "real"]),
]
# an allowed field of `"{}".format`; a refused field of `"%5d" % 7`
_ALLOWED_FIELD = re.compile(r"[^{}\d]{0,3}\d{0,2}(\.\d{1,2})?[^{}\d]{0,2}")
_REFUSED_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{3,}|\*)")
# The names of our own filters; they have blanks, so that templates cannot use them.
_MADE, _STEPS, _JOINED = "value made", "steps made", "texts joined"
_BEGINS, _ENDS = "generation begins", "generation ends"


class Template:
    """A chat template, ready to render.

    Args:
      source: Jinja source.

    Raises:
      jinja2.TemplateError: it does not compile, or is longer than 64 KiB.
    """

    def __init__(self, source: str):
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"it has {len(source)} characters, but at most {_MAX_SOURCE} are allowed")
        self._environment = _Environment(_UNITS_PER_STEP + len(source) // 64)
        self._template = self._environment.from_string(source)
        self._lock = threading.Lock()

    def render(self, generation_marks: str = "", /, **values: Any) -> str:
        """The text; two marks, if given, surround the content of `{% generation %}`.

        Raises:
          jinja2.TemplateError: the template rejects the values, or exceeds its budget.
          Exception: anything else that its code raises.
        """
        with self._lock:
            self._environment.units_left, self._environment.marks = _BUDGET, generation_marks
            return self._template.render(**values)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget; `step` is the cost in units of a call or loop step."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, step: int):
        # With no optimizer, and a finalizer that needs a context, Jinja evaluates nothing while it compiles.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self._pay_for_output,
            extensions=[LoopControlExtension, _Generation],
        )
        self.units_left, self._step, self.marks = _BUDGET, step, ""
        filters = {**self.filters, "tojson": _to_json}
        self.filters = {name: self._metered(name, filters[name], name in _FREE_FILTERS) for name in _FILTERS}
        self.filters |= {_BEGINS: lambda _: self.marks[:1], _ENDS: lambda _: self.marks[1:]}
        self.filters |= {_MADE: self._pay_for_value, _STEPS: self._pay_for_steps, _JOINED: self._join_texts}
        self.tests = {
            name: self._metered(name, test, name not in _COMPARING_TESTS) for name, test in self.tests.items()
        }
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Metering(self).visit(super()._parse(source, name, filename))

    def pay(self, units: int) -> None:
        """Takes units from the budget."""
        self.units_left -= units
        if self.units_left < 0:
            raise TemplateError("it exceeds the limits on steps or text lengths: simplify it")

    def weigh(self, *values: Any) -> None:
        """Pays for values and all values within them; for a shared value, each time it occurs."""
        pending, left = list(values), self.units_left
        while pending and left >= 0:
            value = pending.pop()
            left -= _UNITS_PER_VALUE
            if isinstance(value, str):
                left -= len(value) // _CHARACTERS_PER_UNIT
            elif isinstance(value, dict):
                pending += [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple | set):
                pending += value
        self.units_left = left
        self.pay(0)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allows attributes of Jinja's objects, and methods that make no large values, or are paid for.

        Raises:
          SecurityError: Jinja's sandbox allows the attribute, but this class does not. To print nothing would
            change the text.
        """
        if not super().is_safe_attribute(obj, attr, value):
            return False
        allowed = next((names for kind, names in _METHODS if isinstance(obj, kind)), ())
        # Jinja's objects may be of these types too: a group of `groupby` is a named tuple.
        if attr not in allowed and not type(obj).__module__.startswith("jinja2."):
            raise SecurityError(f"access to attribute '{attr}' of '{type(obj).__name__}' object is unsafe.")
        return True

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a macro, a method or a global function."""
        self.pay(self._step)
        if isinstance(obj, Macro):  # its body pays for itself
            return super().call(context, obj, *args, **kwargs)
        args = tuple(map(self._as_list, args))
        owner = getattr(obj, "__self__", None)
        if not isinstance(owner, Mapping):  # `get` reads one value
            self._pay_before(getattr(obj, "__name__", ""), (owner, *args), kwargs)
        value = super().call(context, obj, *args, **kwargs)
        self.weigh(value)
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator; a large result is paid for, or refused, first."""
        bits = [abs(x).bit_length() for x in (left, right) if isinstance(x, int)]
        sizes = [_units_of(x) for x in (left, right) if isinstance(x, str | list | tuple)]
        self.pay(_UNITS_PER_VALUE + sum(sizes))
        if operator == "%" and isinstance(left, str):
            self._pay_before("format", (left, right), {})
        elif operator == "*" and sizes and bits:
            self.pay(sizes[0] * max(left if isinstance(left, int) else right, 0))
        elif len(bits) == 2 and (
            sum(bits) > _MAX_BITS or (operator == "**" and bits[0] * max(right, 0) > _MAX_BITS)
        ):
            raise TemplateError("it makes integers that are too large")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` that refuses wide fields, and pays for its inputs once for each field."""
        plain = super().wrap_str_format(value)
        if plain is None:
            return None

        def wrapper(*args: Any, **kwargs: Any) -> str:
            fields = list(string.Formatter().parse(value.__self__))
            if not all(_ALLOWED_FIELD.fullmatch(field[2] or "") for field in fields):
                raise SecurityError("str.format supports no widths above two digits or from arguments")
            before = self.units_left
            self.weigh(value.__self__, args, kwargs)
            self.pay(len(fields) * (before - self.units_left))
            return plain(*args, **kwargs)

        return wrapper

    def _metered(self, name: str, function: Any, is_free: bool) -> Callable:
        """Wraps a filter or test, so that it pays for its inputs and results."""
        num_contexts = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.pay(1)
            if is_free:
                return function(*args, **kwargs)
            inputs = tuple(map(self._as_list, args[num_contexts:]))
            self._pay_before(name, inputs, kwargs)
            value = function(*args[:num_contexts], *inputs, **kwargs)
            self.weigh(value)
            return value

        return metered

    def _pay_before(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Pays for a function's inputs, and for a result that is longer."""
        before = self.units_left
        self.weigh(args, kwargs)
        input_cost, values = before - self.units_left, [*args, *kwargs.values()]
        widths = [abs(value) for value in values[1:] if isinstance(value, int)]
        if name in _WIDENING and any(width > _MAX_WIDTH for width in widths):
            raise TemplateError(f"{name} by more than {_MAX_WIDTH}")
        match name:
            case "join":
                sizes = [len(value) for value in values if isinstance(value, str | list | tuple | Mapping)]
                self.pay(
                    sum(sizes)
                    * sum(len(value) for value in values if isinstance(value, str))
                    // _CHARACTERS_PER_UNIT
                )
            case "replace" if len(values) > 2:
                text, *pair = map(str, values[:3])
                for old, new in (pair, pair[::-1]):  # in either order, since they may be keyword arguments
                    self.pay((text.count(old) + 1) * len(new) // _CHARACTERS_PER_UNIT)
            case "indent":
                width = sum(widths) + sum(len(value) for value in values[1:] if isinstance(value, str))
                self.pay((str(values[0]).count("\n") + 1) * width // _CHARACTERS_PER_UNIT)
            case "tojson":
                inner = [x for arg in values[1:] for x in (arg if isinstance(arg, list | tuple) else [arg])]
                longest = max((len(x) for x in inner if isinstance(x, str)), default=0)
                added = 400 * (sum(widths) + longest)  # characters for each value, indented by 400 levels
                self.pay(input_cost * added // (_UNITS_PER_VALUE * _CHARACTERS_PER_UNIT))
            case "format" | "strftime_now":
                text = str(values[0] if name == "format" else values[-1])
                if _REFUSED_FIELD.search(text):
                    raise SecurityError("wide fields are not supported")
                self.pay(text.count("%") * input_cost)
            case "sum" if len(values) > 1 and isinstance(values[0], list | tuple):
                self.pay(len(values[0]) ** 2)

    def _as_list(self, value: Any) -> Any:
        """Converts an iterator to a list, and pays for its steps; other values are unchanged."""
        if isinstance(value, Iterator | KeysView | ValuesView | ItemsView | range):
            return list(self._pay_for_steps(value))
        return value

    def _pay_for_steps(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.pay(self._step)
            yield value

    def _pay_for_value(self, value: Any) -> Any:
        self.weigh(value)
        return value

    def _join_texts(self, values: list[Any]) -> str:
        """Joins values as text (`~` in a template), and pays for them first."""
        self.weigh(values)
        return "".join(map(str, values))

    @pass_context
    def _pay_for_output(self, _: Any, value: Any) -> Any:
        self.weigh(self._as_list(value) if isinstance(value, KeysView | ValuesView | ItemsView) else value)
        return value


class _Metering(NodeTransformer):
    """Inserts filters that pay, at nodes that are no calls, filters or operators: loops, lists, ..."""

    def __init__(self, environment: _Environment):
        self._environment = environment

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.For():
                if node.recursive:
                    raise TemplateError("recursive loops are not supported")
                node.iter = self._with_filter(_STEPS, node.iter)
            case nodes.Concat():
                return self._with_filter(_JOINED, nodes.List(node.nodes, lineno=node.lineno))
            case nodes.List() | nodes.Dict() | nodes.Getitem(arg=nodes.Slice()) | nodes.Tuple(ctx="load"):
                return self._with_filter(_MADE, node)
            case nodes.Compare():
                node.expr = self._with_filter(_MADE, node.expr)
                for operand in node.ops:
                    operand.expr = self._with_filter(_MADE, operand.expr)
        return node

    def _with_filter(self, name: str, node: Any) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=self._environment)


def _units_of(value: str | list | tuple) -> int:
    """The units for a text or list, without the items of the list."""
    return 1 + (len(value) // _CHARACTERS_PER_UNIT if isinstance(value, str) else len(value))


def _raise_exception(message: str) -> None:
    """The function with which a template rejects its values."""
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, as in Transformers: unlike Jinja's, it escapes no HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(format: str) -> str:
    """The current date and time, in the format that a template gives."""
    return datetime.datetime.now().strftime(format)


class _Generation(Extension):
    """`{% generation %}`: writes its content unchanged, between marks if there are any."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begins, ends = (
            nodes.Output([nodes.Filter(nodes.Const(""), name, [], [], None, None, lineno=line)], lineno=line)
            for name in (_BEGINS, _ENDS)
        )
        return nodes.Scope([begins, *body, ends], lineno=line)
