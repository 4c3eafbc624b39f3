"""Loops in machine code."""

import re
from collections import Counter


def loops_with(sass: str, name: str) -> list[list[str]]:
    """Instructions of each loop that has an instruction with `name` in it, and no such loop within.

    A loop ends in a conditional branch back. Waits that go on elsewhere, behind the code, come back unconditionally.
    """
    code = [(int(at, 16), text.strip()) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;/]*);", sass)]
    index = {at: number for number, (at, _) in enumerate(code)}
    loops = []
    for last, (at, text) in enumerate(code):
        target = re.search(r"^@\S+ +BRA\b.*0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            first = index[int(target[1], 16)]
            if any(name in each for _, each in code[first:last]):
                loops.append((first, last))
    inner = [x for x in loops if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [[text for _, text in code[first : last + 1]] for first, last in inner]


def count(loop: list[str]) -> Counter[str]:
    """How often each instruction is in a loop, by its name without modifiers."""
    return Counter(re.sub(r"^@!?U?P\w+ +", "", text).split()[0].split(".")[0] for text in loop)
