"""What answers look like in headless Chromium: formulas, code, text that grows; and that nothing a model writes acts or leaves the origin."""

from __future__ import annotations

from typing import Any

from browsed import MARKS, Served, Visit, answer, ask, expect, prose

pytestmark = MARKS

# --- what a model writes does nothing --------------------------------------------------------------------------------

HOSTILE = """<script>window.owned = 1</script>
<img src="x" onerror="window.owned = 2">
<iframe srcdoc="<script>parent.owned = 3</script>"></iframe>

[click](javascript:window.owned=4) [relative](/v1/models) [data](data:text/html,x)
![picture](https://evil.example/p.png) [fine](https://example.org/a)

<a href="javascript:window.owned=5" onclick="window.owned=6">html</a>

| <b>cell</b> | x |
|---|---|
| <svg onload="window.owned=7"> | y |

```html" onclick="window.owned=8
<script>window.owned = 9</script>
```

$\\href{javascript:window.owned=10}{x}$ $\\includegraphics{https://evil.example/q.png}$ $\\htmlStyle{position:fixed}{x}$
"""
REL = "noopener noreferrer nofollow"
ACTS = """() => [...document.querySelectorAll("#thread *")].filter((one) => one.matches("script, img, iframe, object, embed, form, style, link,"
  + "svg:not(.icon, .katex svg)") || [...one.attributes].some(({ name }) => name.startsWith("on") || name === "srcdoc" || name === "src")
  || (one.hasAttribute("style") && !one.closest(".katex"))).map((one) => one.outerHTML)"""


def test_what_a_model_writes_stays_text(page: Any, served: Served) -> None:
    ask(page, served, "Be evil").end(*(HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)))
    expect(answer(page).locator("footer.shown")).to_be_visible()
    expect(prose(page).locator(".katex")).to_have_count(3)
    assert page.evaluate("window.owned") is None
    assert page.evaluate(ACTS) == []
    links = page.evaluate("[...document.querySelectorAll('#thread .prose a')].map(a => [a.href, a.rel, a.target])")
    assert links == [["https://evil.example/p.png", REL, "_blank"], ["https://example.org/a", REL, "_blank"]]
    expect(prose(page)).to_contain_text("<script>window.owned = 1</script>")
    page.reload()  # and from what was kept
    expect(prose(page)).to_contain_text("<script>window.owned = 1</script>")
    expect(prose(page).locator(".katex")).to_have_count(3)
    assert page.evaluate("window.owned") is None
    assert page.evaluate(ACTS) == []


def module(page: Any, name: str) -> str:
    """The address of one of the page's modules."""
    return page.locator("script[type=module]").get_attribute("src").replace("app.js", name)


# Were HTML to get through all else: what the sanitiser makes of it.
DIRTY = [
    "<script>window.owned = 1</script>",
    "<img src=x onerror=window.owned=2>",
    "<img src=https://evil.example/a.png>",
    "<svg onload=window.owned=3><script>window.owned=4</script></svg>",
    "<svg><a xlink:href=javascript:window.owned=5><text>x</text></a></svg>",
    "<svg><style><img src=x onerror=window.owned=6></style></svg>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=window.owned=7>",
    "<math href=javascript:window.owned=8>x</math>",
    "<a href=javascript:window.owned=9>x</a>",
    "<a href=' java&#115;cript:window.owned=10'>x</a>",
    "<a href=data:text/html,<script>window.owned=11</script>>x</a>",
    "<a href=https://fine.example/ target=_top rel=opener onclick=window.owned=12 style=position:fixed id=model>x</a>",
    "<a href=/v1/models>x</a>",
    "<form action=https://evil.example/><input name=key><button>x</button></form>",
    "<iframe src=https://evil.example/></iframe><object data=https://evil.example/></object><embed src=https://evil.example/>",
    "<link rel=stylesheet href=https://evil.example/a.css><style>@import url(https://evil.example/b.css)</style>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'><base href=https://evil.example/>",
    "<div style='background:url(https://evil.example/c.png)'>x</div>",
    "<video poster=https://evil.example/d.png><source src=https://evil.example/e.mp4></video><audio src=https://evil.example/f.mp3></audio>",
    "<p class='veil shown send math' id=key tabindex=1 title=x data-x=1 aria-label=x>x</p><p is=y class=veil>x</p>",
    "<template><script>window.owned=13</script></template><noscript><p title='</noscript><img src=x onerror=window.owned=14>'>",
    "<!--><img src=x onerror=window.owned=15>--><![CDATA[<img src=x onerror=window.owned=16>]]>",
    "<table background=https://evil.example/g.png><td background=https://evil.example/h.png>x</td></table>",
    "<details open ontoggle=window.owned=17><summary>x</summary></details><marquee onstart=window.owned=18>x</marquee>",
]
CLEANED = """async ([address, dirty]) => {
  const { clean } = await import(address);
  return dirty.map((html) => {
    const box = document.body.appendChild(document.createElement("section"));
    box.append(clean(html));
    const seen = [...box.querySelectorAll("*")].map((one) => [one.localName, Object.fromEntries([...one.attributes].map((a) => [a.name, a.value]))]);
    return seen;
  });
}"""


def test_the_sanitiser_keeps_nothing_that_acts(page: Any, visit: Visit) -> None:
    cleaned = page.evaluate(CLEANED, [module(page, "markdown/clean.js"), DIRTY])
    page.evaluate("new Promise((done) => setTimeout(done))")
    assert page.evaluate("window.owned") is None
    allowed = {"p", "a", "table", "tbody", "tr", "td", "span"}
    for html, elements in zip(DIRTY, cleaned, strict=True):
        assert {name for name, _ in elements} <= allowed, html
        assert all(set(attributes) <= {"href", "class", "target", "rel"} for _, attributes in elements), html
    attributes = [
        attributes for html, elements in zip(DIRTY, cleaned, strict=True) for name, attributes in elements if name == "a"
    ]
    fine = {"href": "https://fine.example/", "target": "_blank", "rel": REL}
    assert [one for one in attributes if "href" in one] == [fine]
    assert [one["class"] for elements in cleaned for _, one in elements if "class" in one] == ["math"], (
        "no class of the page's own"
    )
    assert [url for url in visit.asked if not url.startswith(visit.url) or url.endswith("/x")] == []
    page.reload()
    visit.complaints.clear()  # the browser refuses their styles, too


def test_the_browser_itself_refuses_markup_from_text(visit: Visit) -> None:
    page = visit.open()
    tried = page.evaluate("""["mine", "dompurify", "default"]
      .map((name) => { try { trustedTypes.createPolicy(name, {}); return name; }
        catch { return "refused"; } })
      .concat([(() => { try { document.body.innerHTML = "<b>x</b>"; return "made"; } catch { return "refused"; } })()])""")
    assert tried == ["refused"] * 4
    visit.complaints.clear()  # it complains, as it should


# --- formulas and code -----------------------------------------------------------------------------------------------


def test_markdown_is_drawn(page: Any, served: Served) -> None:
    ask(page, served, "Show").end(
        "# Title\n\n- a\n- [x] b\n\n| x | y |\n|---|--:|\n| 1 | 2 |\n\n```py\n\nprint('hi')\n```\n\n$a_1$ end"
    )
    expect(prose(page).locator("h3")).to_have_text("Title")
    expect(prose(page).locator("li")).to_have_text(["a", "b"])
    expect(prose(page).locator("li input")).to_be_checked()
    expect(prose(page).locator("td.right")).to_have_text("2")
    expect(prose(page).locator("figcaption")).to_contain_text("py")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_label("Copy code").click()
    expect(prose(page).locator("figcaption button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "\nprint('hi')"


def test_formulas_are_set_with_fonts_from_here(page: Any, visit: Visit, served: Served) -> None:
    ask(page, served, "Formulas").end(
        "From $5 to $10: $a_1$ and \\(b^2\\).\n\n$$\\sum_{i=1}^n i$$\n\n\\[\n\\sqrt{x}\n\\]\n\n$\\frac{1}{$ and $\\undefined_x$ end"
    )
    expect(prose(page).locator(".katex")).to_have_count(4)
    expect(prose(page).locator(".katex-display")).to_have_count(2)
    expect(prose(page).locator("p").first).to_contain_text("From $5 to $10: ")
    assert page.evaluate(
        "[...document.querySelectorAll('.math')].every((one) => one.scrollHeight <= one.clientHeight + 1 || one.localName === 'span')"
    )
    expect(prose(page).locator(".math.failed")).to_have_text(["$\\frac{1}{$", "$\\undefined_x$"])
    expect(prose(page).locator("p").last).to_have_text("$\\frac{1}{$ and $\\undefined_x$ end")
    page.evaluate("document.fonts.ready")
    fonts = [url for url in visit.asked if url.endswith(".woff2")]
    assert fonts and all("/vendor/katex/fonts/KaTeX_" in url for url in fonts)


def test_code_is_coloured_and_its_text_is_kept(page: Any, served: Served) -> None:
    python, other = '\n\ndef f(x):\n    return "<b>" + x  # why & how', "<b>no such & language</b>"
    ask(page, served, "Code").end(f"```python\n{python}\n```\n\n```nosuch\n{other}\n```\n\n```\nplain = 1\n```")
    code = prose(page).locator("pre code")
    expect(code.first.locator(".hljs-keyword")).to_have_text(["def", "return"])
    expect(code.first.locator(".hljs-string")).to_have_text('"<b>"')
    expect(code.first.locator(".hljs-title.function_")).to_have_text("f")
    assert code.evaluate_all("all => all.map((one) => one.textContent)") == [python, other, "plain = 1"]
    expect(prose(page).locator("figcaption > span")).to_have_text(["python", "nosuch", "text"])
    expect(prose(page).locator("b")).to_have_count(0)


SAME = """async ([folder, pieces]) => {
  const { MarkdownView } = await import(`${folder}view.js`);
  const { default: hljs } = await import(`${folder}../vendor/highlight/highlight.min.js`);
  return pieces.map(([language, text]) => {
    const view = new MarkdownView();
    view.finish("```" + language + "\\n" + text + "\\n```");
    return [view.element.querySelector("code").innerHTML, hljs.highlight(text, { language, ignoreIllegals: true }).value.replaceAll("&quot;", '"')
      .replaceAll("&#x27;", "'")];
  });
}"""
CODES = [
    ("html", "<p class='x'>a &amp; b</p><script>let f = (x) => `${x}`;</script><style>p { color: red }</style>"),
    ("python", '@a\nclass B(C):\n    def f(self, x="y") -> int: return 1  # <b>'),
    ("diff", "- a\n+ b\n@@ c @@"),
    ("cpp", "#include <a>\ntemplate <class T> T f(T& x) { return x; }"),
    ("md", "# a\n**b** <script>alert(1)</script>"),
]


def test_code_is_coloured_as_highlight_js_would(page: Any) -> None:
    page.evaluate(BOTH, [module(page, "markdown/"), []])
    for ours, theirs in page.evaluate(SAME, [module(page, "markdown/"), CODES]):
        assert ours == theirs and "hljs-" in ours


def test_libraries_are_loaded_when_they_are_needed(page: Any, visit: Visit, served: Served) -> None:
    loaded = lambda: {name for name in ("katex.min.js", "highlight.min.js") if any(url.endswith(name) for url in visit.asked)}  # noqa: E731
    ask(page, served, "Plain").end("Only **text**.")
    expect(prose(page).locator("strong")).to_have_text("text")
    assert loaded() == set()
    ask(page, served, "Formula").end("$x$")
    expect(prose(page).locator(".katex")).to_have_count(1)
    assert loaded() == {"katex.min.js"}
    ask(page, served, "Code").end("```py\nreturn\n```")
    expect(prose(page).locator(".hljs-keyword")).to_have_count(1)
    assert loaded() == {"katex.min.js", "highlight.min.js"}


def test_nothing_but_this_server_may_be_asked(page: Any, visit: Visit) -> None:
    tried = page.evaluate("""async () => {
      const refused = new Promise((told) =>
        document.addEventListener("securitypolicyviolation", (event) => told(event.violatedDirective), { once: true }));
      const picture = document.body.appendChild(new Image());
      picture.src = "https://evil.example/p.png";
      const answer = await refused;
      picture.remove();
      return [answer, await fetch("https://evil.example/").catch(() => "refused")];
    }""")
    assert tried == ["img-src", "refused"]
    visit.complaints.clear()  # it complains, as it should
    visit.asked = [url for url in visit.asked if "evil" not in url]  # counted when it is tried


# --- text that grows -------------------------------------------------------------------------------------------------

LONG = """# Growing

A paragraph with $a_1$, `code`, **bold _both_** and a [link](https://a.org/).
A second line with \\(x^2\\) and [later].

1. one $$y$$
   - two
   - [x] three

     still three
2. four

$$
\\int_0^1 x\\,dx
$$

| a | $b$ |
|:-:|----:|
| 1 | `2` |
| H<sub>2</sub>O | 3 |

```python
def f(x):
    return [1, 2, "three"]  # four

class A: pass
```

> quoted
>
> ```js
> const a = 1;
> ```

\\[ z \\]

---
The [end]. Costs $5 and $10.

[later]: https://b.org/
"""
PIECES = [
    "#",
    " ",
    "\n",
    "\n\n",
    "- ",
    "1. ",
    "> ",
    "```",
    "`",
    "|",
    "-",
    "\n|--|--|\n",
    "a",
    "b c",
    "**",
    "_",
    "$$",
    "$",
    "[",
    "](https://a.b)",
    "x^2",
]
PIECES += [
    "    ",
    "~~~",
    "\\[",
    "\\]",
    "\\(",
    "\\)",
    "```js\n",
    "const a = '1';",
    "[x] ",
    "<br>",
    "<b>",
    "</b>",
    "[a]: https://a.b",
    "\\",
]

BOTH = """async ([folder, texts]) => {
  const { MarkdownView } = await import(`${folder}view.js`);
  const warm = new MarkdownView();
  document.body.append(warm.element);
  const loaded = new Promise((done) => { let left = 2; document.addEventListener("filled", () => (left -= 1) || done()); });
  warm.finish("$x$\\n\\n```js\\nx\\n```");
  await loaded;
  warm.element.remove();
  let seed = 7;
  const random = (below) => (seed = (seed * 48271) % 2147483647) % below;
  return texts.map((text) => {
    const [grown, whole] = [new MarkdownView(), new MarkdownView()];
    for (let at = 0; at < text.length; ) { at += 1 + random(9); grown.update(text.slice(0, at)); }
    grown.finish(text);
    whole.finish(text);
    for (const { element } of [grown, whole]) element.normalize(); // neighbouring texts are one
    return [text, grown.element.isEqualNode(whole.element), grown.element.innerHTML, whole.element.innerHTML];
  });
}"""


def test_a_text_that_grew_looks_like_one_that_came_at_once(page: Any) -> None:
    made = [LONG * 3, "```js\n" + "const a = 1;\n" * 500 + "```\n\nEnd."]  # long code is not coloured with every piece
    seed = 11
    for _ in range(150):
        words = []
        for _ in range(25):
            seed = seed * 48271 % 2147483647
            words.append(PIECES[seed % len(PIECES)])
        made.append("".join(words))
    found = page.evaluate(BOTH, [module(page, "markdown/"), made])
    for text, are_equal, grown, whole in found:
        assert are_equal, (text, grown, whole)
    assert found[0][3].count('class="katex"') >= 15 and "hljs-keyword" in found[0][3]


STEADY = """async ([folder, text]) => {
  const { MarkdownView } = await import(`${folder}view.js`);
  const view = new MarkdownView();
  document.body.append(view.element);
  const seen = new Set();
  let removed = 0;
  new MutationObserver((changes) => { for (const change of changes) for (const node of change.removedNodes)
    if (node.nodeType === 1 && (node.matches(".katex, figure, li, tr") || node.querySelector(".katex, figure"))) removed += 1; })
    .observe(view.element, { childList: true, subtree: true });
  for (let at = 1; at <= text.length; at += 3) {
    view.update(text.slice(0, at));
    for (const one of view.element.querySelectorAll(".katex")) seen.add(one);
  }
  view.finish(text);
  await new Promise(requestAnimationFrame);
  const kept = [...seen].filter((one) => one.isConnected).length;
  return { removed, made: seen.size, kept };
}"""


def test_what_is_set_stays_while_more_comes(page: Any) -> None:
    """No formula is set twice; no list item, row or block of code that is shown is replaced."""
    page.evaluate(BOTH, [module(page, "markdown/"), []])
    text = LONG.replace("| a | $b$ |", "| a | b |")  # which is no table before its second line
    found = page.evaluate(STEADY, [module(page, "markdown/"), text])
    assert found == {"removed": 0, "made": 5, "kept": 5}


WORK = """async ([folder, lengths]) => {
  const { MarkdownView } = await import(`${folder}view.js`);
  const { default: hljs } = await import(`${folder}../vendor/highlight/highlight.min.js`);
  const count = (owner, name) => { const real = owner[name]; const spy = { sum: 0 };
    owner[name] = (text, ...rest) => { spy.sum += text.length; return real.call(owner, text, ...rest); }; return spy; };
  const [cleaned, coloured, linked] = [count(DOMPurify, "sanitize"), count(hljs, "highlight"), count(URL, "canParse")];
  return lengths.map((length) => ["A paragraph of *some* words, $x$ and https://a.org.\\n\\n", "let a = 1;\\n"].map((piece, index) => {
    const text = (index ? "```js\\n" : "") + piece.repeat(length / piece.length);
    const view = new MarkdownView();
    cleaned.sum = coloured.sum = linked.sum = 0;
    for (let at = 8; at < text.length; at += 8) view.update(text.slice(0, at));
    view.finish(text);
    return [(index ? coloured : cleaned).sum / text.length, linked.sum / text.length];
  }));
}"""


def test_work_grows_with_the_text_and_not_faster(page: Any) -> None:
    """For each character of an answer in small pieces: how many are sanitised, and read by markdown-it, which counts links; and how many are
    coloured in one long block of code."""
    page.evaluate(BOTH, [module(page, "markdown/"), []])
    short, long = page.evaluate(WORK, [module(page, "markdown/"), [5_000, 20_000]])
    for more, fewer in zip(long[0], short[0], strict=True):
        assert 0 < more < fewer * 1.2 and more < 20
    assert 0 < long[1][0] < short[1][0], "larger code is coloured more rarely"


def test_halves_look_sane(page: Any, served: Served) -> None:
    turn = ask(page, served, "Slowly")
    turn.say("See:\n\n```py\nprint(1)\n``")
    code = prose(page).locator("pre code")
    expect(code).to_have_text("print(1)")
    assert code.evaluate("one => one.textContent") in ("print(1)", "print(1)\n")
    turn.say("`\n\nSo $$\\frac{1}{")
    expect(prose(page).locator(".math.pending")).to_have_text("$$\\frac{1}{")
    turn.say("2}$$ is *half*")
    expect(prose(page).locator(".katex-display")).to_have_count(1)
    expect(prose(page).locator(".math.pending")).to_have_count(0)
    turn.end()
    expect(answer(page).locator("footer.shown")).to_be_visible()
    assert prose(page).inner_text().count("`") == 0
    turn = ask(page, served, "Unfinished")
    turn.say("so \\(a")
    expect(prose(page).locator(".math.pending")).to_have_text("\\(a")
    turn.end()
    expect(prose(page)).to_have_text("so (a")
    expect(prose(page).locator(".math")).to_have_count(0)


def test_an_answer_is_drawn_at_most_once_a_frame(page: Any, served: Served) -> None:
    page.evaluate("""() => { window.frames_ = 0; window.draws = 0;
      const tick = () => { frames_ += 1; requestAnimationFrame(tick); }; requestAnimationFrame(tick);
      const real = DOMPurify.sanitize; DOMPurify.sanitize = (html) => { draws += 1; return real.call(DOMPurify, html); }; }""")
    turn = ask(page, served, "Quickly")
    for number in range(300):
        turn.say(f"{number} ")
    turn.end()
    expect(prose(page)).to_contain_text("299")
    assert page.evaluate("draws <= frames_ + 2")


def test_the_end_is_still_seen_when_formulas_become_higher(page: Any, served: Served) -> None:
    ask(page, served, "Formulas").end("\n\n".join(["$$\\sum_{i=1}^n \\frac{1}{i}$$"] * 20))
    expect(prose(page).locator(".katex-display")).to_have_count(20)
    expect(page.locator("#latest")).to_be_hidden()
    page.wait_for_function(
        "() => { const box = document.querySelector('#scroll'); return box.scrollHeight - box.scrollTop - box.clientHeight < 2; }"
    )
