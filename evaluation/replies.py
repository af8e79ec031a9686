r"""Read a chat model's reply: its final answer as math_verify reads it, and its program.

tests/evaluation/replies.jsonl holds replies with a reader's verdict. In doubt a reply has no answer.
"""

import builtins
import math
import re
import symtable
from decimal import Decimal
from functools import cache

from markdown_it import MarkdownIt
from math_verify import parse, verify


# What thoughts begin with, in DeepSeek-R1's form and in OpenThoughts-114k's, which the recipes of `sft` train.
THOUGHTS = ("<think>", "<|begin_of_thought|>")


def final_part(reply: str) -> str:
    """Return what a reply says after its thoughts: nothing when they do not end."""
    said = re.split(r"</think>|<\|end_of_thought\|>", reply)[-1]
    said = re.sub(r"<\|(?:begin|end)_of_solution\|>", "", said)
    return "" if any(marker in said for marker in THOUGHTS) else said


# Mathematics

_BRACES = r"[^{}]*"
for _ in range(6):  # braces within braces
    _BRACES = rf"[^{{}}]*(?:\{{{_BRACES}\}}[^{{}}]*)*"
_OPENING = r"\\(?:boxed|fbox)\s*\{"
_BOX = re.compile(rf"{_OPENING}({_BRACES})\}}")
# Between the boxes of one answer: x = \boxed{3} or x = \boxed{5}.
_GAP = r"(?:[\s$&]|\\[()\[\]]|\\q?quad)*"
_JOINT = re.compile(
    rf"{_GAP}(?:,|,?{_GAP}(?:\\text\{{\s*)?\b(?:and|or)\b\s*\}}?){_GAP}(?:[A-Za-z](?:_\{{?\d\}}?)?\s*=\s*)?"
)
_MARKER = re.compile(r"(?<!#)####\s*(-?\s*\\?[$€£]?\s*-?\s*[\d,]*\.?\d+\s*\\?%?)\.?\s*$", re.MULTILINE)

# Around the number of an answer.
_TEXT = r"\\(?:text(?:it|rm|sf|normal)?|math(?:rm|sf)|mbox)\s*"
_CURRENCY = re.compile(rf"(^|=)(\s*-?\s*)(?:{_TEXT}\{{\\?\$\}}|\\?\$|[€£¥]|\\pounds|USD|EUR|GBP)\s*(?=[-\d.])")
_THOUSANDS = re.compile(r"(?:^|=)\s*(?:\\\$)?\s*-?\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?(?=\s*(?:\Z|\$|\\[)\]]))")
_SUM = re.compile(r"^(?:[-+*/×÷=\s\d.,()]|\\(?:times|cdot|div|\$))*=(?=\s*-?[\d., ]+$)")
_UNIT_IN_TEXT = rf"\s*/?\s*{_TEXT}\{{([^{{}}\\\d]+)\}}"
_UNIT_IN_WORDS = r"(?<=\d)\s+([A-Za-z]{3,}(?:[ /-](?:[A-Za-z]{2,}|a))*)"
_UNIT_IN_SIGNS = r"(?<=\d)\s+((?:[kcm]?m|mi|ft|k?g|L)/(?:h|hr|min|s)|(?:[kcm]m|ft|in|yd)(?=\^\{?\d))"
_UNIT = re.compile(rf"(?:{_UNIT_IN_TEXT}|{_UNIT_IN_WORDS}|{_UNIT_IN_SIGNS})(?:\^\{{?\d\}}?)?$")
_FACTORS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_MULTIPLE = re.compile(
    rf"(\d[\d,]*(?:\.\d+)?)((?:[\s~$*]|\\[ ,;()]|{_TEXT}\{{)+)((?:\s*\b(?:{'|'.join(_FACTORS)})s?\b)+)", re.IGNORECASE
)
_NO_UNITS = {"and", "or", "if", "more", "less", "fewer", "most", "least", "not", "plus", "minus"}

# Sentences that do not say the answer.
_DOUBT = re.compile(
    r"\b(?:not|no|or|between|might|may|could|would|perhaps|maybe|wait|however|in fact|actually|at (?:most|least))\b"
    r"|n't\b|^\(?[A-E][.)]\s|\d:\d|\d to \$?\d|\dk\b",
    re.IGNORECASE,
)
_ASIDE = re.compile(r"\W*(?:note|check|to (?:double-)?check|verif)", re.IGNORECASE)


def _without_separators(number: re.Match) -> str:
    return re.sub(r"(?<=\d)[, ]", "", number[0])


def _factor(words: list[str]) -> int:
    return math.prod(_FACTORS.get(word.removesuffix("s"), 1) for word in words)


def _without_unit(answer: str) -> str:
    r"""Return the number, in LaTeX, of answers such as "18 dollars", r"\$18", r"120~\text{miles}", r"\text{8 in}"."""
    # i, e and vectors are no units.
    answer = re.sub(r"\\(?:mathbf|boldsymbol)\s*\{([A-Za-z])\}|\\(?:mathrm|text)\s*\{([ie])\}", r"\1\2", answer)
    if whole := re.fullmatch(rf"{_TEXT}\{{([^{{}}]*\d[^{{}}]*)\}}", answer):
        answer = whole[1]
    answer = re.sub(r"(?<!\\)\\[ ,;:]|~", " ", answer.replace(r"\!", "").replace("{,}", ",")).strip().removesuffix(".")
    answer = _CURRENCY.sub(r"\1\2", re.sub("°[CF]?", r"^\\circ ", answer))
    if (unit := _UNIT.search(answer)) and (number := answer[: unit.start()].strip()):
        words = re.findall("[a-z]+", (unit[1] or unit[2] or unit[3]).lower().replace(".", ""))
        if (factor := _factor(words)) > 1:
            return rf"{number} \cdot {factor}"
        # math_verify would drop every text.
        answer = number if _NO_UNITS.isdisjoint(words) else f"({number}, {' '.join(words)})"
    return _THOUSANDS.sub(_without_separators, _SUM.sub("", answer))


def _multiplied(multiple: re.Match) -> str:
    """Return the number of "5 dozen", with the LaTeX between its parts."""
    number, between, words = multiple.groups()
    return f"{Decimal(number.replace(',', '')) * _factor(words.lower().split()):f}{between}"


def _read(answer: str) -> tuple | None:
    answer = _without_unit(answer.strip()).replace(r"\varnothing", r"\emptyset")
    if re.match(r"[<>≤≥]|\\[gl](?:eq?|t)\b", answer):  # math_verify reads the number alone
        return None
    return tuple(parse(rf"\boxed{{{answer}}}")) or None


def _conclusion(text: str) -> str | None:
    """Return the last sentence with a number or LaTeX of a reply without a box, from its last "answer" on.

    It is `None` where the reply breaks off or doubts what it says, and where there is no such sentence.
    """
    text = re.sub(r"(?is)\\\[.*?\\\]|\$\$.*?\$\$|answer\W*\n", lambda part: part[0].replace("\n", " "), text)
    sentences = re.split(r"(?<=[.!?])\s+|\n+", text.strip())
    stated = [sentence for sentence in sentences if re.search(r"\d|\\\w", sentence) and not _ASIDE.match(sentence)]
    if not stated or re.search(r"(?:\s[-=+*/×]|,)$", sentences[-1]):
        return None
    if re.search(r"[A-Za-z]$", sentences[-1]) and sentences[-1] is not stated[-1]:
        return None
    named = [number for number, sentence in enumerate(stated) if "answer" in sentence.lower()]
    end = stated[named[-1] if named else -1 :]
    return None if any(map(_DOUBT.search, end)) else re.split("(?=answer)", end[0], flags=re.IGNORECASE)[-1]


@cache
def math_answer(text: str) -> tuple | None:
    """Return the final answer in `text` as math_verify reads it; `None` when there is none.

    It is in the last box, else after the last "####" (GSM8K's marker) with nothing but a number, else in the
    conclusion. Thoughts do not count, and boxes that "and", "or" or a comma joins are one answer.
    """
    text = final_part(text).replace("\N{MINUS SIGN}", "-")
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        text = tagged[-1]
    if boxes := list(_BOX.finditer(text)):
        first = len(boxes) - 1
        while first and _JOINT.fullmatch(text, boxes[first - 1].end(), boxes[first].start()):
            first -= 1
        answers = dict.fromkeys(box[1] for box in boxes[first:])
        text_after = text[boxes[-1].end() :]
        return None if re.search(_OPENING, text_after) else _read(", ".join(answers))
    if re.search(_OPENING, text):  # a box that does not end
        return None
    if markers := _MARKER.findall(text):
        return _read(markers[-1])
    text = _THOUSANDS.sub(_without_separators, _MULTIPLE.sub(_multiplied, text))
    found = tuple(parse(text))
    if found and not getattr(found[0], "is_number", True):  # formulas, and sets of what "and" and "or" join
        return found
    conclusion = _conclusion(text)
    return tuple(parse(conclusion)) or None if conclusion else None


def _letters(latex: str) -> set[str]:
    """Return the letters of the variables in `latex`; none of a word."""
    letters = re.sub(rf"{_TEXT}\{{[^{{}}]*\}}|\\[A-Za-z]+", "", latex)
    return set() if letters.isalpha() else set(filter(str.isalpha, letters))


def _differ(first: str, second: str) -> bool:
    """Return whether answers differ in what math_verify passes over: 3r and 3R, and 44 in base 8 and in base 9."""
    mine, yours = _letters(first), _letters(second)
    if any(letter.swapcase() in yours - mine for letter in mine - yours):
        return True
    bases = [re.search(r"\d_\{?(\d+)\}?$", answer) for answer in (first, second)]
    return all(bases) and bases[0][1] != bases[1][1]


def equal_answers(gold: tuple, answer: tuple) -> bool:
    """Return whether answers are the same: 1,000 and 1000, 1/2 and 0.5, x < 3 and the interval. Takes at most 5 s."""
    same = verify(list(gold), list(answer), allow_set_relation_comp=True)
    return same and not _differ(str(gold[-1]), str(answer[-1]))


# Code

# Fences in lists and behind tags are fences too.
_MARKDOWN = MarkdownIt("commonmark").disable(["code", "html_block"])


def _names(code: str) -> tuple[set[str], set[str], set[str]]:
    """Return the names that `code` defines, those that it imports, and those that it uses beside Python's own."""
    try:
        tables = [symtable.symtable(code, "reply", "exec")]
    except (SyntaxError, ValueError, RecursionError):  # a program that breaks off is the reply's program all the same
        return set(re.findall(r"^(?:def|class) +(\w+)", code, re.MULTILINE)), set(), set()
    defined = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_assigned()}
    imported = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_imported()}
    used = set()
    for table in tables:
        tables.extend(table.get_children())
        used |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return defined, imported, used - set(dir(builtins))


def names_needed(code: str) -> set[str]:
    """Return the names that `code` uses and does not define."""
    defined, imported, used = _names(code)
    return used - defined - imported


def program(reply: str, names: set[str]) -> str:
    """Return the program in a chat model's reply, which is to define `names`.

    It is the last block of Python that defines them, with the blocks that it needs; without such a block the last one.
    Blocks without a label count where none says Python, and the whole reply where there is no block.
    """
    reply = final_part(reply)
    fences = [token for token in _MARKDOWN.parse(reply) if token.type == "fence"]
    labelled = [fence.content for fence in fences if re.match(r"\W*py(?:thon)?3?(?![\w-])", fence.info, re.IGNORECASE)]
    blocks = labelled or [fence.content for fence in fences if not fence.info.strip()]
    if not blocks:
        return reply
    provided, used = [], []
    for defined, imported, needed in map(_names, blocks):
        provided.append(defined | imported - names)  # an example of use may import the function
        used.append(needed)
    chosen, missing = set(), names
    while found := [i for i, provides in enumerate(provided) if i not in chosen and missing & provides]:
        chosen.add(found[-1])
        missing = names.union(*(used[i] for i in chosen)).difference(*(provided[i] for i in chosen))
    if not chosen:  # in HumanEval's prompt an indented block goes on with the function
        return next((block for block in reversed(blocks) if re.match(r"[ \t]+\S", block)), blocks[-1])
    return "\n".join(blocks[i] for i in sorted(chosen))
