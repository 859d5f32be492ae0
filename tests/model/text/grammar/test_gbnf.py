"""llama.cpp's grammars as Lark."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadInput
from windlass.model.text.grammar.gbnf import is_gbnf, lark_of

pytestmark = pytest.mark.pure

ARITHMETIC = r"""
# an expression
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws   # in parentheses
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]{1,3} ws
ws    ::= [ \t]*
"""
JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
ACCEPTED = [
    (ARITHMETIC, ["a=b\n", "x1+(23*y)=7\n"], ["a=b", "=b\n"]),
    (JSON, ['{"a": [1, -2.5e3, "x\\n", null], "b": {}}', "{}"], ["[1]", '{"a"}']),
    ('root ::= "\\x41é\\u00e9" . [\\u00e8-\\u00ea&/[] root-2{2,}\nroot-2 ::= "b" |\n "c"', ["Aéézébb", "Aéé/&cc"], ["Aéézéb"]),
    ('root ::= fooBar ()\nfooBar ::= "x" | root "y" ', ["x", "xyy"], ["y"]),
]


def accepts(lark: str, text: str) -> bool:
    library = pytest.importorskip("llguidance")
    from windlass.model.text.grammar.compile import compile_grammar

    tokenizer = library.LLTokenizer("byte")
    matcher = compile_grammar(tokenizer, json.dumps({"grammars": [{"lark_grammar": lark}]}))
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "texts", "others"), ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_it_describes_is_accepted(grammar: str, texts: list[str], others: list[str]) -> None:
    assert is_gbnf(grammar)
    assert [accepts(lark_of(grammar), text) for text in (*texts, *others)] == [True] * len(texts) + [False] * len(others)


ATOMS = st.sampled_from(['"a"', '"b c"', "[a-c]", "[^x]", "other", "third-one", ".", '("a" | other)', '("b" third-one)'])
ITEMS = st.builds(str.__add__, ATOMS, st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}", "{2,}"]))
BODIES = st.lists(st.lists(ITEMS, min_size=1, max_size=3).map(" ".join), min_size=1, max_size=3).map(" | ".join)


@given(root=BODIES, other=BODIES, third=BODIES)
def test_it_says_the_same_as_the_librarys_own_conversion(root: str, other: str, third: str) -> None:
    library: Any = pytest.importorskip("llguidance.gbnf_to_lark")
    text = f"root ::= {root}\nother ::= {other}\nthird-one ::= {third}\n"
    assert written(lark_of(text)) == written(library.gbnf_to_lark(text))


def written(lark: str) -> list[list[str]]:
    """Rules, one on a line, without the parentheses that mean nothing."""
    lines = lark.replace("\n     | ", " | ").splitlines()
    return sorted(line.replace("(", " ").replace(")", " ").split() for line in lines if line)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("root ::= [", "cannot be read"),
        ('root ::= "a', "cannot be read"),
        ('a ::= "b"', "no rule named root"),
        ("root ::= a", "there is no rule a"),
        ('root ::= ("a"', "does not end"),
        ('root ::= "a")', "is not expected"),
        ("root ::= *", "nothing before it"),
        ('root ::= "a"**', "nothing before it"),
        ('root ::= a\na ::= "\\q"', "cannot be escaped"),
        ('root ::= "\\ud800"', "cannot be escaped"),
        ("root ::= [\\q]", "cannot be escaped"),
        ('root ::= "a"{9999999}', "it repeats"),
        ('root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"', "differ only in"),
        ('root ::= "a" start\nstart ::= root', "differ only in"),
        ('root "a" ::= "b"', "a rule begins with"),
        (f"root ::= {'(' * 200}", "nested more than"),
        ("root ::= " + "a " * 100_000, "more than 100,000"),
        ('root ::= "a"\nb', "does not end"),
    ],
)
def test_what_is_none_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(BadInput, match=why) as caught:
        lark_of(text)
    assert caught.value.field == "constraint" and "\n" not in str(caught.value)


def test_lark_is_none() -> None:
    assert not is_gbnf('start: "a ::= b"\n') and is_gbnf('\n\n  root ::= "a"') and is_gbnf('# x\r\nroot ::= "a"')
