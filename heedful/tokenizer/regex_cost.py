"""Bound how much a regular expression of a tokenizer file can backtrack, before the library compiles it.

The grammar is the part of Oniguruma's that published tokenizers use. The cost of a pattern is the count of ways in
which the library can try it from one position of a text of ASSUMED_REPEATS characters; a pattern of cost 1 never
backtracks. `limits.py` calls `bound_cost`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

ASSUMED_REPEATS = 64  # repeats of an unbounded repeat
MAX_COST = ASSUMED_REPEATS**2 - 1  # allows one unbounded repeat that can fail later, and some choices; never two
MAX_PATTERN_CHARS = 8_192  # maximum characters of a pattern
MAX_DEPTH = 20  # maximum levels of groups in groups
_COUNT = re.compile(r"\{(\d{0,6})(,?)(\d{0,6})\}")
_FLAGS = re.compile(r"\?[imx]*(?:-[imx]+)?[:)]")
_NAME = re.compile(r"\?<[A-Za-z_]\w{0,40}>")
_CHARACTER_ESCAPES = set("dDsSwWhHNOntrfvae")  # escapes that match one character
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_ANCHORS = set("bBAzZG")


class UnsupportedError(ValueError):
    """The pattern has a construct that is not supported, or that can backtrack too much."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The cost of a pattern, and the length of its matches."""

    cost: float
    min_chars: int  # minimum characters of a match; 0 if unknown


@dataclass(slots=True)
class _Node:
    """A part of a pattern."""

    kind: Literal["one", "anchor", "look", "atomic", "sequence", "either", "repeat"]  # one: a single character
    parts: list[_Node] = field(default_factory=list)
    text: str = ""  # the character that "one" matches, or "" if it matches several
    min_repeats: int = 1
    max_repeats: float = 1

    @property
    def min_chars(self) -> int:
        """Minimum number of characters of a match."""
        match self.kind:
            case "one":
                return 1
            case "anchor" | "look":
                return 0
            case "either":
                return min(part.min_chars for part in self.parts)
            case "repeat":
                return self.min_repeats * self.parts[0].min_chars
        return sum(part.min_chars for part in self.parts)

    @property
    def first(self) -> str:
        """The ASCII character, in lower case, that every match begins with, or "" if there is no such character."""
        match self.kind:
            case "one":
                return self.text.lower() if self.text.isascii() else ""
            case "sequence" | "atomic" if self.parts:
                return self.parts[0].first
            case "repeat" if self.min_repeats:
                return self.parts[0].first
        return ""

    @property
    def can_fail(self) -> bool:
        """Whether there is a text that does not match."""
        match self.kind:
            case "either":
                return all(part.can_fail for part in self.parts)
            case "repeat":
                return self.min_repeats > 0 and self.parts[0].can_fail
            case "sequence" | "atomic":
                return any(part.can_fail for part in self.parts)
        return True

    def cost(self, can_fail_later: bool) -> float:
        """Return in how many ways the part can be tried.

        Args:
            can_fail_later: Whether the rest of the pattern can fail, so that all ways are tried.
        """
        match self.kind:
            case "one" | "anchor":
                return 1
            case "look" | "atomic":  # no other way is tried after a match
                return self.parts[0].cost(False)
            case "either":
                if len({part.first for part in self.parts} - {""}) == len(self.parts):
                    return max(part.cost(can_fail_later) for part in self.parts)  # the first character decides
                return sum(part.cost(can_fail_later) for part in self.parts)
            case "sequence":
                total, next_first = 1.0, ""
                for part in reversed(self.parts):
                    is_optional = part.kind == "repeat" and part.max_repeats == 1
                    inner_first = part.parts[0].first if is_optional else ""
                    # whether one character decides if the optional part matches
                    is_decided = inner_first != "" and next_first != "" and inner_first != next_first
                    total *= 1 if is_decided else part.cost(can_fail_later)
                    can_fail_later = can_fail_later or part.can_fail
                    next_first = part.first
                return total
        return self._repeat_cost(can_fail_later)

    def _repeat_cost(self, can_fail_later: bool) -> float:
        """Return in how many ways a repeat can be tried: with each possible count of repeats."""
        (inner,) = self.parts
        if inner.min_chars == 0 and self.max_repeats > 1:
            raise UnsupportedError("it repeats something that can be empty")
        if not can_fail_later and self.min_repeats < 2:
            return inner.cost(False)
        inner_cost = inner.cost(True)
        max_repeats = min(self.max_repeats, max(ASSUMED_REPEATS, self.min_repeats))
        if inner_cost == 1:
            return max_repeats - self.min_repeats + 1
        capped = min(inner_cost, MAX_COST + 1) ** min(max_repeats, ASSUMED_REPEATS)  # does not overflow
        num_ways_without = 1 if self.min_repeats == 0 else 0
        return float(capped) + num_ways_without


def bound_cost(pattern: str) -> Bound:
    """Return the cost of a pattern, and the minimum length of a match.

    Raises:
        UnsupportedError: If the pattern has a construct that is not supported, or can backtrack too much.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise UnsupportedError(f"it has {len(pattern)} characters, at most {MAX_PATTERN_CHARS} are read")
    parser = _Parser(pattern)
    root = parser.alternatives(0)
    if parser.position < len(pattern):
        raise UnsupportedError("a parenthesis closes that was not opened")
    cost = root.cost(False)
    if cost > MAX_COST:
        raise UnsupportedError("it can backtrack too much: repeat single characters or classes, not groups that vary")
    if root.min_chars > MAX_PATTERN_CHARS:
        raise UnsupportedError(
            f"a match has {root.min_chars} characters or more, at most {MAX_PATTERN_CHARS} are looked for"
        )
    # without case, one character of a text may match several of a pattern
    return Bound(cost, min(root.min_chars, 1) if parser.ignores_case else root.min_chars)


class _Parser:
    """Recursive-descent parser: each method reads one construct of the pattern at `position`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.ignores_case = False

    def peek(self) -> str:
        """Return the next character, or "" at the end."""
        return self.text[self.position : self.position + 1]

    def take(self) -> str:
        """Consume the next character; raise UnsupportedError at the end."""
        character = self.peek()
        if not character:
            raise UnsupportedError("it ends too early")
        self.position += 1
        return character

    def alternatives(self, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise UnsupportedError(f"groups are nested more than {MAX_DEPTH} deep")
        branches = [self.sequence(depth)]
        while self.peek() == "|":
            self.position += 1
            branches.append(self.sequence(depth))
        return branches[0] if len(branches) == 1 else _Node("either", branches)

    def sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.with_repeats(self.atom(depth)))
        return parts[0] if len(parts) == 1 else _Node("sequence", parts)

    def with_repeats(self, node: _Node) -> _Node:
        """Read the repeats after a part, and return the part with them."""
        while True:
            match self.peek():
                case "*" | "+" | "?" as mark:
                    min_repeats = int(mark == "+")
                    max_repeats = 1 if mark == "?" else math.inf
                    length = 1
                case "{" if match := _COUNT.match(self.text, self.position):
                    low, comma, high = match.groups()
                    if not (low or high):
                        raise UnsupportedError(f"{match[0]} is no count")
                    min_repeats = int(low or 0)
                    length = len(match[0])
                    without_high = math.inf if comma else min_repeats
                    max_repeats = float(high) if high else without_high
                    if min_repeats > max_repeats:
                        raise UnsupportedError(f"{match[0]} counts backwards")
                case _:
                    return node
            self.position += length
            if node.kind in ("anchor", "look"):
                raise UnsupportedError("it repeats something that can be empty")
            node = _Node("repeat", [node], min_repeats=min_repeats, max_repeats=max_repeats)
            if self.peek() == "?":
                self.position += 1
                if length > 1 and min_repeats == max_repeats:  # as in Ruby, {n}? makes it optional
                    node = _Node("repeat", [node], min_repeats=0)
            elif self.peek() == "+" and length == 1:
                self.position += 1
                node = _Node("atomic", [node])

    def atom(self, depth: int) -> _Node:
        match character := self.take():
            case "(":
                return self.group(depth)
            case "[":
                self.skip_class(depth)
                return _Node("one")
            case "\\":
                return self.escape()
            case "^" | "$":
                return _Node("anchor")
            case "*" | "+" | "?":
                raise UnsupportedError(f"{character} repeats nothing")
        return _Node("one", text="" if character == "." else character)

    def group(self, depth: int) -> _Node:
        kind: Literal["atomic", "look"] | None = None  # None for an ordinary group
        start = self.position
        if self.peek() == "*":
            raise UnsupportedError("(* is not supported")
        if self.peek() == "?":
            if match := _NAME.match(self.text, start):
                self.position = match.end()
            elif match := _FLAGS.match(self.text, start):
                self.position = match.end()
                self.ignores_case |= "i" in match[0].partition("-")[0]
                if "x" in match[0]:
                    raise UnsupportedError("the flag x is not supported")
                if match[0].endswith(")"):
                    return _Node("sequence")
            else:
                openings = ("?=", "?!", "?<=", "?<!", "?>")
                opening = next((mark for mark in openings if self.text.startswith(mark, start)), "")
                if not opening:
                    raise UnsupportedError(f"({self.text[start : start + 2]} is not supported")
                kind, self.position = "atomic" if opening == "?>" else "look", start + len(opening)
        inner = self.alternatives(depth + 1)
        if self.take() != ")":
            raise UnsupportedError("a parenthesis is not closed")
        return inner if kind is None else _Node(kind, [inner])

    def escape(self) -> _Node:
        character = self.take()
        if character in "pP":
            if not (match := re.compile(r"\{\^?[\w ]{1,40}\}").match(self.text, self.position)):
                raise UnsupportedError(f"\\{character} needs a name in braces")
            self.position = match.end()
        elif character in "xu0":
            digits = {"x": r"\{[0-9A-Fa-f]{1,8}\}|[0-9A-Fa-f]{1,2}", "u": "[0-9A-Fa-f]{4}", "0": "[0-7]{0,2}"}
            if not (match := re.compile(digits[character]).match(self.text, self.position)):
                raise UnsupportedError(f"\\{character} needs digits")
            self.position = match.end()
        elif character == "R":
            return _Node("atomic", [_Node("either", [_Node("one"), _Node("sequence", [_Node("one"), _Node("one")])])])
        elif character in _ANCHORS:
            return _Node("anchor")
        elif character.isascii() and character.isalnum() and character not in _CHARACTER_ESCAPES:
            raise UnsupportedError(f"\\{character} is not supported")
        else:
            return _Node("one", text=_CONTROLS.get(character, "") if character in _CHARACTER_ESCAPES else character)
        return _Node("one")

    def skip_class(self, depth: int) -> None:
        """Skip a character class after its opening bracket; classes may be nested in it."""
        if depth > MAX_DEPTH:
            raise UnsupportedError("classes are nested too deep")
        if self.peek() == "^":
            self.position += 1
        if self.peek() == "]":  # a literal, as the first character
            self.position += 1
        while (character := self.take()) != "]":
            if character == "[":
                if self.peek() == ":" and (match := re.compile(r":\^?\w+:\]").match(self.text, self.position)):
                    self.position = match.end()
                else:
                    self.skip_class(depth + 1)
            elif character == "\\":
                self.take()
