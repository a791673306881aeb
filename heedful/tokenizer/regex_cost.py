"""A bound on how much a regular expression of a tokenizer file can backtrack, computed before the library compiles it.

The grammar is Oniguruma's, as far as published tokenizers use it. `Bound.cost` counts the ways in which a text of
REPEAT characters can be tried from one position; `1` means that nothing is tried twice.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

REPEAT = 64  # how often something unbounded is assumed to repeat
MAX_COST = REPEAT * REPEAT - 1  # one unbounded repeat that can fail after it, and some choices; never two
MAX_LENGTH = 8_192  # characters of a pattern
MAX_DEPTH = 20  # of groups in groups
_COUNT = re.compile(r"\{(\d{0,6})(,?)(\d{0,6})\}")
_FLAGS = re.compile(r"\?[imx]*(?:-[imx]+)?[:)]")
_NAME = re.compile(r"\?<[A-Za-z_]\w{0,40}>")
_PLAIN = set("dDsSwWhHNOntrfvae")  # escapes that match one character
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_ANCHORS = set("bBAzZG")


class UnsupportedError(ValueError):
    """The pattern uses something whose cost is not known."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`shortest`: characters that a match has at least; 0 also where that is not known."""

    cost: float
    shortest: int


@dataclass(slots=True)
class _Node:
    """Part of a pattern; `kind` is one, anchor, look, atomic, sequence, either or repeat."""

    kind: str
    parts: list[_Node] = field(default_factory=list)
    text: str = ""  # of a literal character
    least: int = 1
    most: float = 1

    @property
    def shortest(self) -> int:
        match self.kind:
            case "one":
                return 1
            case "anchor" | "look":
                return 0
            case "either":
                return min(part.shortest for part in self.parts)
            case "repeat":
                return self.least * self.parts[0].shortest
        return sum(part.shortest for part in self.parts)

    @property
    def first(self) -> str:
        """The ASCII character, in lower case, that every match begins with; empty: not known."""
        match self.kind:
            case "one":
                return self.text.lower() if self.text.isascii() else ""
            case "sequence" | "atomic" if self.parts:
                return self.parts[0].first
            case "repeat" if self.least:
                return self.parts[0].first
        return ""

    @property
    def can_fail(self) -> bool:
        """Whether there is a text on which it does not match."""
        match self.kind:
            case "either":
                return all(part.can_fail for part in self.parts)
            case "repeat":
                return self.least > 0 and self.parts[0].can_fail
            case "sequence" | "atomic":
                return any(part.can_fail for part in self.parts)
        return True

    def cost(self, after: bool) -> float:
        """Ways to match; `after`: whether what follows can fail, so that other ways are tried."""
        match self.kind:
            case "one" | "anchor":
                return 1
            case "look" | "atomic":  # no other way is tried once it has matched
                return self.parts[0].cost(False)
            case "either":
                if len({part.first for part in self.parts} - {""}) == len(self.parts):
                    return max(part.cost(after) for part in self.parts)  # one character tells which
                return sum(part.cost(after) for part in self.parts)
            case "sequence":
                total, following = 1.0, ""
                for part in reversed(self.parts):
                    is_decided = (
                        part.kind == "repeat" and part.most == 1 and "" != part.parts[0].first != following != ""
                    )
                    total *= 1 if is_decided else part.cost(after)
                    after = after or part.can_fail
                    following = part.first
                return total
        return self._repeated(after)

    def _repeated(self, after: bool) -> float:
        (inner,) = self.parts
        if inner.shortest == 0 and self.most > 1:
            raise UnsupportedError("it repeats something that can be empty")
        if not after and self.least < 2:
            return inner.cost(False)
        once, most = inner.cost(True), min(self.most, max(REPEAT, self.least))
        if once == 1:
            return most - self.least + 1
        return float(min(once, MAX_COST + 1) ** min(most, REPEAT)) + (self.least == 0)  # capped: no overflow


def bound_cost(pattern: str) -> Bound:
    """Bound a pattern; UnsupportedError says what cannot be bounded."""
    if len(pattern) > MAX_LENGTH:
        raise UnsupportedError(f"it has {len(pattern)} characters, at most {MAX_LENGTH} are read")
    parser = _Parser(pattern)
    whole = parser.either(0)
    if parser.place < len(pattern):
        raise UnsupportedError("a parenthesis closes that was not opened")
    cost = whole.cost(False)
    if cost > MAX_COST:
        raise UnsupportedError("it can backtrack too much: repeat single characters or classes, not groups that vary")
    if whole.shortest > MAX_LENGTH:
        raise UnsupportedError(f"a match has {whole.shortest} characters or more, at most {MAX_LENGTH} are looked for")
    # ignoring case, one character may match several
    return Bound(cost, min(whole.shortest, 1) if parser.ignores_case else whole.shortest)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.place, self.ignores_case = text, 0, False

    def peek(self, ahead: int = 0) -> str:
        return self.text[self.place + ahead : self.place + ahead + 1]

    def take(self) -> str:
        sign = self.peek()
        if not sign:
            raise UnsupportedError("it ends too early")
        self.place += 1
        return sign

    def either(self, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise UnsupportedError(f"groups are nested more than {MAX_DEPTH} deep")
        branches = [self.sequence(depth)]
        while self.peek() == "|":
            self.place += 1
            branches.append(self.sequence(depth))
        return branches[0] if len(branches) == 1 else _Node("either", branches)

    def sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated(self.atom(depth)))
        return parts[0] if len(parts) == 1 else _Node("sequence", parts)

    def repeated(self, node: _Node) -> _Node:
        while True:
            match self.peek():
                case "*" | "+" | "?" as sign:
                    least, most, ends = int(sign == "+"), 1 if sign == "?" else math.inf, 1
                case "{" if match := _COUNT.match(self.text, self.place):
                    low, comma, high = match.groups()
                    if not (low or high):
                        raise UnsupportedError(f"{match[0]} is no count")
                    least = int(low or 0)
                    most, ends = float(high) if high else math.inf if comma else least, len(match[0])
                    if least > most:
                        raise UnsupportedError(f"{match[0]} counts backwards")
                case _:
                    return node
            self.place += ends
            if node.kind in ("anchor", "look"):
                raise UnsupportedError("it repeats something that can be empty")
            node = _Node("repeat", [node], least=least, most=most)
            if self.peek() == "?":
                self.place += 1
                if ends > 1 and least == most:  # Ruby's {n}? makes it optional
                    node = _Node("repeat", [node], least=0)
            elif self.peek() == "+" and ends == 1:
                self.place += 1
                node = _Node("atomic", [node])

    def atom(self, depth: int) -> _Node:
        match sign := self.take():
            case "(":
                return self.group(depth)
            case "[":
                self.klass(depth)
                return _Node("one")
            case "\\":
                return self.escape()
            case "^" | "$":
                return _Node("anchor")
            case "*" | "+" | "?":
                raise UnsupportedError(f"{sign} repeats nothing")
        return _Node("one", text="" if sign == "." else sign)

    def group(self, depth: int) -> _Node:
        kind, start = "", self.place
        if self.peek() == "*":
            raise UnsupportedError("(* is not read")
        if self.peek() == "?":
            if match := _NAME.match(self.text, start):
                self.place = match.end()
            elif match := _FLAGS.match(self.text, start):
                self.place = match.end()
                self.ignores_case |= "i" in match[0].partition("-")[0]
                if "x" in match[0]:
                    raise UnsupportedError("the flag x is not read")
                if match[0].endswith(")"):
                    return _Node("sequence")
            else:
                opening = next(
                    (sign for sign in ("?=", "?!", "?<=", "?<!", "?>") if self.text.startswith(sign, start)), ""
                )
                if not opening:
                    raise UnsupportedError(f"({self.text[start : start + 2]} is not read")
                kind, self.place = "atomic" if opening == "?>" else "look", start + len(opening)
        inner = self.either(depth + 1)
        if self.take() != ")":
            raise UnsupportedError("a parenthesis is not closed")
        return _Node(kind, [inner]) if kind else inner

    def escape(self) -> _Node:
        sign = self.take()
        if sign in "pP":
            if not (match := re.compile(r"\{\^?[\w ]{1,40}\}").match(self.text, self.place)):
                raise UnsupportedError(f"\\{sign} needs a name in braces")
            self.place = match.end()
        elif sign in "xu0":
            digits = {"x": r"\{[0-9A-Fa-f]{1,8}\}|[0-9A-Fa-f]{1,2}", "u": "[0-9A-Fa-f]{4}", "0": "[0-7]{0,2}"}[sign]
            if not (match := re.compile(digits).match(self.text, self.place)):
                raise UnsupportedError(f"\\{sign} needs digits")
            self.place = match.end()
        elif sign == "R":
            return _Node("atomic", [_Node("either", [_Node("one"), _Node("sequence", [_Node("one"), _Node("one")])])])
        elif sign in _ANCHORS:
            return _Node("anchor")
        elif sign.isascii() and sign.isalnum() and sign not in _PLAIN:
            raise UnsupportedError(f"\\{sign} is not read")
        else:
            return _Node("one", text=_CONTROLS.get(sign, "") if sign in _PLAIN else sign)
        return _Node("one")

    def klass(self, depth: int) -> None:
        """Skip a class, whose opening bracket has been read; classes may be nested in it."""
        if depth > MAX_DEPTH:
            raise UnsupportedError("classes are nested too deep")
        if self.peek() == "^":
            self.place += 1
        if self.peek() == "]":  # a literal, as the first character
            self.place += 1
        while (sign := self.take()) != "]":
            if sign == "[":
                if self.peek() == ":" and (match := re.compile(r":\^?\w+:\]").match(self.text, self.place)):
                    self.place = match.end()
                else:
                    self.klass(depth + 1)
            elif sign == "\\":
                self.take()
