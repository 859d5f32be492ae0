"""Copying, reversing, sorting and counting: short lists of words, numbers or letters, and single words letter by letter."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from windlass.model.bundled.tasks.problem import Maker, Problem, draw_digits

WORDS = tuple(
    "apple arm back ball bank bear bell bird blue boat bone book box bread bridge brown bus cake camp car cat chair clock cloud coat "
    "cold cook corn cow cup day deer desk dog door dream drum duck earth east egg eye farm fast field fire fish flag floor flower fly "
    "foot fox frog game garden gate glass goat gold grass green hand hat heart hill home horse house ice iron island jar jump key king "
    "kite lake lamp land leaf leg light lion lock long map milk mind moon mouse mouth name nest night north nose oak ocean old orange "
    "owl page paint paper park path pen pig pink plane plant plate pond queen rain red rice ring river road rock roof room root rope "
    "rose salt sand school sea seed sheep ship shoe silver sky snow song south spoon star stone storm street sun table tail tea tent "
    "tiger time tooth town train tree truck valley voice wall warm watch water wave west wheel white wind window wing winter wolf "
    "wood word yard year yellow young zebra".split()
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SEPARATORS = (" ", " ", ", ")


def _items(random: Random, most: int) -> list[str]:
    """Two to `most` items of one kind."""
    count = random.randrange(2, most + 1)
    kind = random.randrange(4)
    if kind == 0:
        return random.choices(WORDS, k=count)
    if kind == 1:
        return random.choices(LETTERS, k=count)
    return [str(draw_digits(random, kind)) for _ in range(count)]


def _letters(random: Random, most: int) -> str:
    """A word, or random letters."""
    if random.random() < 0.4:
        return random.choice(WORDS)
    return "".join(random.choices(LETTERS, k=random.randrange(2, most + 1)))


def _listed(random: Random, task: str, forms: Sequence[str], items: list[str], answer: list[str]) -> Problem:
    separator = random.choice(SEPARATORS)
    prompt = random.choice(forms).format(separator.join(items))
    return Problem(task, " ".join(items), prompt, separator.join(answer))


COPY = ("Copy: {}", "Repeat: {}", "Say this again: {}", "Repeat after me: {}")
REVERSE = ("Reverse: {}", "Reverse the list: {}", "Write this backwards: {}", "Reverse this list: {}")
SORT = ("Sort: {}", "Sort the list: {}", "Put in order: {}", "Sort this list: {}")
SORT_DOWN = ("Sort downwards: {}", "Sort from large to small: {}")


def copy(random: Random) -> Problem:
    if random.random() < 0.3:
        word = _letters(random, 12)
        return Problem("copy", word, random.choice(COPY).format(word), word)
    items = _items(random, 10)
    return _listed(random, "copy", COPY, items, items)


def reverse(random: Random) -> Problem:
    items = _items(random, 8)
    return _listed(random, "reverse", REVERSE, items, items[::-1])


def spell(random: Random) -> Problem:
    """Spelling a word forwards or backwards, which tokenization makes hard."""
    word = _letters(random, 8)
    if random.random() < 0.5:
        prompt = random.choice(("Spell: {}", "Spell {}", "Spell the word {}.")).format(word)
        return Problem("spell", f"spell {word}", prompt, " ".join(word))
    prompt = random.choice(("Reverse the word {}.", "Reverse the letters: {}", "Spell {} backwards.")).format(word)
    return Problem("spell", f"reverse {word}", prompt, word[::-1])


def sort(random: Random) -> Problem:
    count = random.randrange(2, 9)
    kind = random.randrange(4)
    if kind == 0:
        letters = random.choices(LETTERS, k=count)
        return _listed(random, "sort", SORT, letters, sorted(letters))
    numbers = [draw_digits(random, min(kind, 2) + (kind == 3)) for _ in range(count)]
    down = random.random() < 0.2
    items, answer = [str(number) for number in numbers], [str(number) for number in sorted(numbers, reverse=down)]
    return _listed(random, "sort", SORT_DOWN if down else SORT, items, answer)


def count(random: Random) -> Problem:
    """How often an item is in a list, or how many there are."""
    few = random.sample(WORDS, 3) if random.random() < 0.5 else random.sample(LETTERS, 3)
    items = random.choices(few, k=random.randrange(2, 13))
    listed = " ".join(items)
    if random.random() < 0.3:
        prompt = random.choice(("How many items are in this list: {}", "Count the items: {}")).format(listed)
        return Problem("count", listed, prompt, str(len(items)))
    item = random.choice(few)
    prompt = random.choice(("How many times is {} in this list: {}", "Count {} in: {}")).format(item, listed)
    return Problem("count", f"{item} in {listed}", prompt, str(items.count(item)))


EXTREMES = {
    "largest": ("What is the largest number: {}", "Largest of {}"),
    "smallest": ("What is the smallest number: {}", "Smallest of {}"),
    "first": ("What is the first item: {}", "First of {}"),
    "last": ("What is the last item: {}", "Last of {}"),
}


def pick(random: Random) -> Problem:
    """One number of a list, by size or position."""
    numbers = [draw_digits(random) for _ in range(random.randrange(2, 8))]
    which = random.choice(tuple(EXTREMES))
    answers = {"largest": max(numbers), "smallest": min(numbers), "first": numbers[0], "last": numbers[-1]}
    separator = random.choice(SEPARATORS)
    prompt = random.choice(EXTREMES[which]).format(separator.join(map(str, numbers)))
    return Problem("pick", f"{which} {numbers}", prompt, str(answers[which]))


MAKERS: dict[str, Maker] = {
    "copy": copy,
    "reverse": reverse,
    "spell": spell,
    "sort": sort,
    "count": count,
    "pick": pick,
}
