r"""Read a chat model's reply: its final answer, which math_verify parses, and its program.

tests/evaluation/replies.jsonl holds replies with a reader's verdict.
"""

import builtins
import math
import re
import symtable
from decimal import Decimal
from functools import cache
from typing import NamedTuple

from latex2sympy2_extended.sets import FiniteSet
from markdown_it import MarkdownIt
from math_verify import parse, verify
from sympy import Basic, Eq, Union
from sympy.core.relational import Relational

from iha.thoughts import after_thoughts


def final_part(reply: str) -> str:
    """Return the part of a reply after its thoughts, without OpenThoughts' markers."""
    return re.sub(r"<\|(?:begin|end)_of_solution\|>", "", after_thoughts(reply))


# Mathematics

# "\boxed{" of \boxed{42}
_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
# The text between the boxes of one answer, as in x = \boxed{3} or x = \boxed{5}. It gives nothing back (*+), because
# a search that tries every division of many blanks into neighbours does not end.
_GAP = r"(?:[\s$&]|\\[()\[\]]|\\q?quad)*+"
# " or x = " between the boxes of x = \boxed{3} or x = \boxed{5}
_JOINT = re.compile(
    rf"{_GAP}(?:,|,?{_GAP}(?:\\text\{{\s*+)?\b(?:and|or)\b\s*+\}}?){_GAP}(?:[A-Za-z](?:_\{{?\d\}}?)?\s*=\s*)?"
)
_REST = r"[^\S\n]*+"  # blanks of the same line
# "$1,200" of a last line "#### $1,200."
_MARKER = re.compile(
    rf"(?<!#)####\s*+(-?\s*+\\?[$€£]?\s*+-?\s*+[\d,]*+(?:\.\d++|(?<=\d)){_REST}\\?%?)\.?{_REST}$", re.MULTILINE
)

# Signs that math_verify does not read.
_SIGNS = str.maketrans({"−": "-", "∞": r"\infty ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "`": ""})

# The text around the number of an answer.
# "\text" of 8\text{ in}, "\mathrm" of 5\,\mathrm{cm}
_TEXT = r"\\(?:text(?:it|rm|sf|normal)?|math(?:rm|sf)|mbox)\s*"
# "\$" of \$18, "\text{\$}" of \text{\$}18, "€" of 18€, "USD" of 18 USD
_CURRENCY = re.compile(rf"{_TEXT}\{{\\?\$\}}|\\?\$|[€£¥]|\\pounds\b|\b(?:USD|EUR|GBP)\b")
# "1,234.50", or "= 12 500" at the end of a formula
_THOUSANDS = re.compile(r"(?:^|=)\s*-?\s*\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?(?=\s*(?:\Z|\$|\\[)\]]))")
# "3 \times 6 =" of "3 \times 6 = 18"
_SUM = re.compile(r"^(?:[-+*/×÷=\s\d.,()]|\\(?:times|cdot|div|\$))*=(?=\s*-?[\d., ]+$)")
# "\text{ miles}" of 120\text{ miles}, "/\text{h}" of 60/\text{h}
_UNIT_IN_TEXT = rf"\s*/?\s*{_TEXT}\{{([^{{}}\\\d]+)\}}"
# " miles per hour" of "60 miles per hour"
_UNIT_IN_WORDS = r"(?<=\d)\s+([A-Za-z]{3,}(?:[ /-](?:[A-Za-z]{2,}|a))*)"
# " km/h" of "60 km/h", " cm" of "12 cm^2"
_UNIT_IN_SIGNS = r"(?<=\d)\s+((?:[kcm]?m|mi|ft|k?g|L)/(?:h|hr|min|s)|(?:[kcm]m|ft|in|yd)(?=\^\{?\d))"
# Any of these at the end, with its power: " cm^2" of "12 cm^2"
_UNIT = re.compile(rf"(?:{_UNIT_IN_TEXT}|{_UNIT_IN_WORDS}|{_UNIT_IN_SIGNS})(?:\^\{{?\d\}}?)?$")
# Words after a number that are no unit: "more" of "5 more"
_NO_UNITS = {"and", "or", "if", "more", "less", "fewer", "most", "least", "not", "plus", "minus"}
_FACTORS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
# "5 dozen", "3 million" of "$3 million". The result of a calculation, "84/12 = 7 dozen", is in the unit that was asked
# for.
_MULTIPLE = re.compile(
    rf"(?<![\d.,=])(?<!= )(?<!= \$)(\d[\d,]*(?:\.\d+)?)((?:[\s~$*]|\\[ ,;()]|{_TEXT}\{{)+)"
    rf"((?:\s*\b(?:{'|'.join(_FACTORS)})s?\b)+)",
    re.IGNORECASE,
)

# Parts of a reply without a box.
# Formulas in separate lines: "\[ x = 3 \]", "$$x = 3$$"
_DISPLAY = re.compile(
    r"\\\[(.*?)\\\]|\$\$(.*?)\$\$|\\begin\{((?:align|gather|eqnarray)\*?)\}(.*?)\\end\{\3\}", re.DOTALL
)
# Sentences that do not say the answer: "Note that 3 is prime.", "(A) 12"
_ASIDE = re.compile(r"\W*(?:note|check|to (?:double-)?check|verif)|\(?[A-E][.)]\s", re.IGNORECASE)
# Words that take an answer back: "Wait, that is wrong."
_CORRECTION = re.compile(r"\b(?:wait|in fact|actually)\b", re.IGNORECASE)
# " $18." of "at most $18."
_NUMBER = r"[\s*]*\$?\d[\d,.]*\$?(?=[\s.,;!?)*]|\Z)"
# Numbers that are no answer: "at least 5", "between 3 and 7", "5 or more", "10:30", "60k"
_NO_ANSWER = re.compile(
    rf"(?:n't|\b(?:not|over|under|than|up to|at (?:most|least)|between)){_NUMBER}(?:[\s*]*(?:and|or|to)\b{_NUMBER})?"
    rf"|\$?\d[\d,.]*(?:[\s*]*or|\$?[\s*]*to)\b(?:{_NUMBER}| (?:more|less|fewer))|\d+:\d+|\$?\d+k\b",
    re.IGNORECASE,
)


class Box(NamedTuple):
    """Hold the start, the end and the content of a box in a text."""

    start: int
    end: int
    content: str


def boxes(text: str) -> tuple[list[Box], bool]:
    """Return the boxes of `text`, and whether a box that does not end follows the last of them."""
    found = []
    position = 0
    is_open = False
    closing_braces = _closing_braces(text)
    for opening in _OPENING.finditer(text):
        if opening.start() < position:  # inside the box before
            continue
        closing = closing_braces.get(opening.end() - 1)
        is_open = closing is None  # a box that does not end may hold boxes that do
        if closing is not None:
            position = closing + 1
            found.append(Box(opening.start(), position, text[opening.end() : closing]))
    return found, is_open


def _closing_braces(text: str) -> dict[int, int]:
    """Return the place of the closing brace for that of each opening brace which has one."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in re.finditer("[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closing[opened.pop()] = brace.start()
    return closing


def _without_separators(number: re.Match) -> str:
    return re.sub(r"(?<=\d)[, ]", "", number[0])


def _multiplied(multiple: re.Match) -> str:
    """Return the number of "5 dozen", with the LaTeX between its parts."""
    number, between, words = multiple.groups()
    factors = (_FACTORS[word.removesuffix("s")] for word in words.lower().split())
    return f"{Decimal(number.replace(',', '')) * math.prod(factors):f}{between}"


def _plain(text: str) -> str:
    """Return `text` with its signs, numbers, degrees and bases as math_verify reads them."""
    text = re.sub(r"°[CF]?|\\degree\b", r"^\\circ ", text.translate(_SIGNS))
    text = re.sub(r",\\!\s*|\{,\}", ",", text).replace(r"\!", "")
    text = re.sub(r"\bUS(?=\\?\$)|\((?=\d+\)_)|(?<=\d)\)(?=_)|(?<=\d)\s+(?=i\b)", "", text)
    return _MULTIPLE.sub(_multiplied, text)


def _without_unit(answer: str) -> str:
    r"""Return the number, in LaTeX, of answers such as "18 dollars", r"\$18", r"120~\text{miles}", r"\text{8 in}"."""
    # i, e and vectors are no units.
    answer = re.sub(r"\\(?:mathbf|boldsymbol)\s*\{([A-Za-z])\}|\\(?:mathrm|text)\s*\{([ie])\}", r"\1\2", answer)
    if whole := re.fullmatch(rf"{_TEXT}\{{([^{{}}]*\d[^{{}}]*)\}}", answer):
        answer = whole[1]
    answer = re.sub(r"(?<!\\)\\[ ,;:]|~", " ", _CURRENCY.sub("", answer)).strip().removesuffix(".")
    unit = _UNIT.search(answer)
    number = answer[: unit.start()].strip() if unit else ""
    if number:
        words = re.findall("[a-z]+", (unit[1] or unit[2] or unit[3]).lower())
        # The words are kept next to the number, because math_verify would drop every text.
        answer = number if _NO_UNITS.isdisjoint(words) else f"({number}, {' '.join(words)})"
    return _THOUSANDS.sub(_without_separators, _SUM.sub("", answer))


def _is_range(part: Basic) -> bool:
    """Return whether `part` is x < 2 or 3 < x < 5."""
    return len(part.free_symbols) == 1 and bool(part.atoms(Relational) - part.atoms(Eq))


def _union(parts: FiniteSet) -> Basic | None:
    """Return the set of all numbers in one of the ranges `parts`, or `None` if SymPy makes no set of them."""
    if not all(map(_is_range, parts.args)):
        return None
    try:
        return Union(*(bounds.as_set() for bounds in parts.args))
    except Exception:  # SymPy raises many types, such as NotImplementedError for sin(x) < 1/2
        return None


def _read(answer: str) -> tuple | None:
    answer = _without_unit(_plain(answer.strip())).replace(r"\varnothing", r"\emptyset")
    if re.match(r"[<>≤≥]|\\[gl](?:eq?|t)\b", answer):  # math_verify would read only the number
        return None
    found = tuple(parse(rf"\boxed{{{answer}}}"))
    if found and re.search(r"\bor\b", answer) and isinstance(found[0], FiniteSet):
        ranges = _union(found[0])
        if ranges is not None:
            return ranges, found[1]
    return found or None


def _last_row(display: re.Match) -> str:
    """Return the last row of a displayed formula as a formula in a line."""
    row = " ".join((display[1] or display[2] or display[4] or "").split()).removesuffix(r"\\")
    if "matrix" not in row:
        row = re.sub(r"\\(?:begin|end)\{\w+\}|&", "", row).rpartition(r"\\")[2]
    return f" ${row.strip(' .=')}$. "


def _conclusion(text: str) -> str:
    """Return the last sentence with a number or LaTeX of a reply without a box, from its last "answer" on.

    It is empty if the reply is truncated or takes back its answer, and if there is no such sentence.
    """
    text = _DISPLAY.sub(_last_row, text).replace(".$", "$.").strip()
    text = re.sub(r"(?i)(answer(?: is)?)\W*\n", r"\1: ", text)
    sentences = re.split(r"(?i)(?<=[.!?])(?<!\d!)\s+|\n+|(?=\banswer)", text)
    says = re.compile(r"(?i)\d|\\\w|\$|^answer(?: is|\W*:)")
    stated = [sentence for sentence in sentences if says.search(sentence)]
    stated = [sentence for sentence in stated if not _ASIDE.match(sentence)]
    if not stated or re.search(r"(?:\s[-=+*/×]|,|[.!?] [^\d\\\n]*[A-Za-z])$", text):  # the reply is truncated
        return ""
    named = [number for number, sentence in enumerate(stated) if sentence.lower().startswith("answer")]
    if named and any(map(_CORRECTION.search, stated[named[-1] :])):
        return ""
    return stated[named[-1] if named else -1]


@cache
def math_answer(text: str) -> tuple | None:
    """Return the final answer in `text` as math_verify reads it, or `None` if there is none.

    It is in the last box. Without a box it is the number that stands alone after the last "####" (GSM8K's marker), and
    without both it is in the conclusion. Thoughts do not count. Boxes that "and", "or" or a comma joins are one
    answer.
    """
    text = final_part(text)
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        text = tagged[-1]
    found, is_open = boxes(text)
    if is_open:
        return None
    if found:
        first = len(found) - 1
        while first and _JOINT.fullmatch(text, found[first - 1].end, found[first].start):
            first -= 1
        return _read(", ".join(dict.fromkeys(box.content for box in found[first:])))
    text = _plain(text)
    if markers := _MARKER.findall(text):
        return _read(markers[-1])
    conclusion = _conclusion(text.replace(r"\$", ""))
    if words := re.fullmatch(r"(?i)answer(?: is|\W*:)([^\d\\$]*)", conclusion):
        return _read(words[1].strip(" .*"))
    return tuple(parse(_THOUSANDS.sub(_without_separators, _NO_ANSWER.sub(" ", conclusion)))) or None


def _letters(latex: str) -> set[str]:
    """Return the letters of the variables in `latex`, but no letters if it is a word."""
    letters = re.sub(rf"{_TEXT}\{{[^{{}}]*\}}|\\[A-Za-z]+", "", latex)
    return set() if letters.isalpha() else set(filter(str.isalpha, letters))


def _differ(first: str, second: str) -> bool:
    """Return whether answers differ in a way that math_verify ignores: 3r and 3R, or 44 in base 8 and in base 9."""
    mine = _letters(first)
    yours = _letters(second)
    if any(letter.swapcase() in yours - mine for letter in mine - yours):
        return True
    bases = [re.search(r"\d_\{?(\d+)\}?$", answer) for answer in (first, second)]
    return all(bases) and bases[0][1] != bases[1][1]


def equal_answers(gold: tuple, answer: tuple) -> bool:
    """Return whether answers are the same: 1,000 and 1000, 1/2 and 0.5, x < 3 and the interval. Takes at most 5 s."""
    same = verify(list(gold), list(answer), allow_set_relation_comp=True)
    return same and not _differ(str(gold[-1]), str(answer[-1]))


# Code

# The label of a block: "python", "Python3", "{.py}"
_PYTHON = re.compile(r"\W*py(?:thon)?3?(?![\w-])", re.IGNORECASE)
# Without these rules, fences in lists and behind tags count too.
_MARKDOWN = MarkdownIt("commonmark").disable(["code", "html_block"])


def _names(code: str) -> tuple[set[str], set[str], set[str]]:
    """Return the names that `code` defines, those that it imports, and those that it uses besides Python's own."""
    try:
        tables = [symtable.symtable(code, "reply", "exec")]
    # A truncated program is still the reply's program. The parser of Python 3.11 raises MemoryError for many words.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(re.findall(r"^(?:def|class) +(\w+)", code, re.MULTILINE)), set(), set()
    defined = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_assigned()}
    imported = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_imported()}
    used = set()
    for table in tables:
        tables.extend(table.get_children())
        outer = [symbol for symbol in table.get_symbols() if symbol.is_global()]
        used |= {symbol.get_name() for symbol in outer if symbol.is_referenced()}
    return defined, imported, used - set(dir(builtins))


def names_needed(code: str) -> set[str]:
    """Return the names that `code` uses and does not define."""
    defined, imported, used = _names(code)
    return used - defined - imported


def program(reply: str, names: set[str]) -> str:
    """Return the program in a chat model's reply, which should define `names`.

    It is the last block of Python that defines them, with the blocks that it needs. If no block defines them, it is
    the last block. If no block that is labelled as Python defines one of them, blocks without a label count too. If
    there is no block, it is the whole reply.
    """
    # A fence may stand behind prose: "Here is the code: ```python".
    reply = re.sub(r"(?m)(?<=\S)[ \t]+(?=```\w+\s*$)", "\n", final_part(reply))
    fences = [token for token in _MARKDOWN.parse(reply) if token.type == "fence"]
    labelled = [fence.content for fence in fences if _PYTHON.match(fence.info)]
    if any(names & _names(block)[0] for block in labelled):
        blocks = labelled
    else:
        blocks = [fence.content for fence in fences if _may_be_python(fence.info)]
    if not blocks:
        return reply
    chosen = _blocks_that_define(blocks, names)
    if not chosen:  # an indented block continues the function of HumanEval's prompt
        return next((block for block in reversed(blocks) if re.match(r"[ \t]+\S", block)), blocks[-1])
    return "\n".join(chosen)


def _may_be_python(label: str) -> bool:
    """Return whether a block with this label may be Python: the label says so, or is empty."""
    return _PYTHON.match(label) is not None or not label.strip()


def _blocks_that_define(blocks: list[str], names: set[str]) -> list[str]:
    """Return the last block that defines `names`, with the blocks that it needs, in their order."""
    provided = []
    used = []
    for defined, imported, needed in map(_names, blocks):
        provided.append(defined | imported - names)  # a block that shows how to use the function may import it
        used.append(needed)
    chosen: set[int] = set()
    missing = names
    while True:
        providing = [i for i, provides in enumerate(provided) if missing & provides]
        found = [i for i in providing if i not in chosen]
        if not found:
            return [blocks[i] for i in sorted(chosen)]
        chosen.add(found[-1])
        missing = names.union(*(used[i] for i in chosen)).difference(*(provided[i] for i in chosen))
