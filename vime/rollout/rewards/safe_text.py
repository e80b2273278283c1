"""Text of a model's that a scorer evaluates: only plain literals and small expressions get that far.

The evaluators of reasoning_gym's scorers are `eval` and sympy's `parse_expr`, which runs `eval` too. Both are replaced
in the process that scores, so that what is not harmless is refused before anything of it is run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from typing import Any

MAX_TEXT = 20_000
"""Characters of an expression."""
MAX_BITS = 4096
"""Of a number that an expression can come to, by an upper bound: (10**300)**2 passes, 9**9**9 does not."""
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth asinh acosh atanh exp log ln sqrt cbrt"
    " Abs sign erf erfi gamma Si Ci Ei li Integral".split()
)
"""What an expression of symbols may call."""
TRUSTED = frozenset({"reasoning_gym.arithmetic.bitwise_arithmetic"})
"""Modules whose scorer evaluates the question and not the response."""
NAME = re.compile(r"[A-Za-z]\w{0,19}", re.ASCII)

_COLLECTIONS = (ast.List, ast.Tuple, ast.Set, ast.Dict)


class Refused(ValueError):
    """Text that is not evaluated: it might do something, or take for ever."""


def literal(text: Any, *_: Any) -> Any:
    """The value of a Python literal, or of arithmetic with numbers: in place of `eval`.

    Raises Refused, SyntaxError when it is no Python, NameError for a bare word.
    """
    tree = _parsed(text)
    _bits(tree, symbols=False)
    return eval(compile(tree, "<response>", "eval"), {"__builtins__": {}})  # noqa: S307 - checked just above


def expression(text: Any) -> str:
    """`text`, when sympy may parse it: arithmetic, symbols, and calls of FUNCTIONS. Raises Refused or SyntaxError."""
    _bits(_parsed(text), symbols=True)
    return str(text)


def guard_evaluators() -> list[Refused]:
    """Puts the checks before the evaluators of all scorers, in this process. What is refused is added to the list."""
    import sympy
    from sympy.parsing import sympy_parser

    refused: list[Refused] = []
    parse_expr = sympy_parser.parse_expr

    def noted(check: Callable[..., Any]) -> Callable[..., Any]:
        def checked(text: Any, *others: Any) -> Any:
            try:
                return check(text, *others)
            except Refused as error:
                refused.append(error)
                raise

        return checked

    safe_eval, safe_text = noted(literal), noted(expression)

    def safe_parse_expr(text: Any, *others: Any, **options: Any) -> Any:
        return parse_expr(safe_text(text), *others, **options)

    sympy.parse_expr = safe_parse_expr
    sympy_parser.parse_expr = safe_parse_expr
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and name not in TRUSTED:
            module.eval = safe_eval  # type: ignore[attr-defined]  # found before the built-in one
            if getattr(module, "parse_expr", None) is parse_expr:
                module.parse_expr = safe_parse_expr  # type: ignore[attr-defined]
    return refused


def _parsed(text: Any) -> ast.Expression:
    if not isinstance(text, str):
        raise Refused(f"a {type(text).__name__}")
    if len(text) > MAX_TEXT:
        raise Refused(f"{len(text)} characters")
    try:
        return ast.parse(text.strip(), mode="eval")
    except (RecursionError, MemoryError, OverflowError) as error:
        raise Refused("nested too deeply") from error
    except ValueError as error:  # NUL, or a number of too many digits
        raise SyntaxError(str(error)) from error


def _bits(node: ast.AST, symbols: bool) -> float:
    """An upper bound for the size of what `node` comes to, in bits. Raises Refused, NameError."""
    if isinstance(node, ast.Expression):
        return _bits(node.body, symbols)
    if isinstance(node, _COLLECTIONS) and not symbols:
        children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]
        return max([0.0, *(_bits(child, symbols) for child in children)])
    if isinstance(node, ast.Constant):
        return _constant_bits(node.value, symbols)
    if isinstance(node, ast.Name):
        return _name_bits(node.id, symbols)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        return _bits(node.operand, symbols)
    if isinstance(node, ast.BinOp):
        return _bounded(_operation_bits(node, symbols))
    if symbols and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in FUNCTIONS:
            raise Refused(f"a call of {node.func.id[:40]}")
        return max([1.0, *(_bits(argument, symbols) for argument in node.args)])
    raise Refused(f"{type(node).__name__} in an expression")


def _constant_bits(value: Any, symbols: bool) -> float:
    if isinstance(value, int):
        return _bounded(max(1, int(value).bit_length()))
    if isinstance(value, float):
        return 64.0
    if not symbols and (value is None or isinstance(value, str)):
        return 0.0
    raise Refused(f"a {type(value).__name__} in an expression")


def _name_bits(name: str, symbols: bool) -> float:
    if not symbols:
        raise NameError(f"name {name!r} is not defined")
    if not NAME.fullmatch(name) or "__" in name:
        raise Refused(f"the name {name[:40]!r}")
    return 1.0


def _operation_bits(node: ast.BinOp, symbols: bool) -> float:
    left, right = _bits(node.left, symbols), _bits(node.right, symbols)
    if not symbols and not all(_may_be_number(child) for child in (node.left, node.right)):
        raise Refused("arithmetic with what is no number")  # "a" * 10**9
    match node.op:
        case ast.Add() | ast.Sub():
            return max(left, right) + 1
        case ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod():
            return left + right
        case ast.Pow() | ast.LShift():
            value = 2.0**right if right < 16 else float("inf")  # the exponent's
            return left + value if isinstance(node.op, ast.LShift) else left * value
        case ast.RShift() | ast.BitAnd() | ast.BitOr() | ast.BitXor() if not symbols:
            return max(left, right)
        case _:
            raise Refused(f"{type(node.op).__name__} in an expression")


def _may_be_number(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    return not isinstance(node, _COLLECTIONS)


def _bounded(bits: float) -> float:
    if bits > MAX_BITS:
        raise Refused(f"a number of more than {MAX_BITS} bits")
    return bits
