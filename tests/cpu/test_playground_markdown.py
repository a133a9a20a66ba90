"""How the playground renders Markdown in headless Chromium: safely, the same however it streams, and only its end anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.cpu.playground import Site, finished, needs_chromium, send, site
from tools import vendor_static

__all__ = ["site"]
pytestmark = needs_chromium
DOCS = Path(__file__).parents[2] / "docs"

ANSWER = r"""# Heads

Some **bold**, *italic*, ~~gone~~ and `code`, [a link](https://example.org/?a=1&b=2) and https://example.com/x.

1. one
2. two
   - nested
     1. deeper

1. loose

2. list

   with more

- [x] read
- [ ] not yet

| left | right |
|------|------:|
| a    |   1.5 |

```python
def go(x: int) -> int:
    return x + 1  # <b>
```

Inline $E = mc^2$, \(a^2\), but $5 and $6; unfinished $\frac{1$.

$$
\sum_{i=1}^n i = \frac{n(n+1)}{2}
$$

\[ \left( x \right) \]

> quoted

---

line one
line two
"""

# From OWASP's cheat sheet of filter evasion and the attacks on Markdown renderers that are known.
ATTACKS = r"""
<script>alert(1)</script><img src=x onerror=alert(1)><svg onload=alert(1)><iframe srcdoc="<script>alert(1)</script>">

<a href="javascript:alert(1)" onclick=alert(1)>x</a><style>*{display:none}</style><form action=//evil.example><input autofocus onfocus=alert(1)>

<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)><details open ontoggle=alert(1)>

[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](&#106;avascript:alert(1)) [d](java&#10;script:alert(1)) [e](vbscript:x)
[f](data:text/html,<script>alert(1)</script>) [g](data:image/svg+xml;base64,PHN2Zz4=) [h](file:///etc/passwd) [i](/flush_cache)
[j](<javascript:alert(1)>) [k](https://ok.example/"onmouseover="alert(1)) ![l](x"onerror="alert(1)) ![m](https://evil.example/beacon.png)
![n](javascript:alert(1)) <javascript:alert(1)> [o]: javascript:alert(1)

$\href{javascript:alert(1)}{x}$ $\includegraphics{https://evil.example/x.png}$ $\class{a" onclick="alert(1)}{x}$ $\html{<img src=x onerror=alert(1)>}$

$$<img src=x onerror=alert(1)>$$

$\def\a{\a\a}\a$ $\rule{1e9em}{1e9em}$

```"><img src=x onerror=alert(1)>
</code></pre><script>alert(1)</script>
```

```html
<script>alert(1)</script>
"""

RENDER = """async ([text, sizes]) => {
    const { MarkdownView } = await import("/playground/markdown.js");
    const whole = document.createElement("div"), streamed = document.createElement("div");
    new MarkdownView(whole).update(text, true);
    const view = new MarkdownView(streamed);
    for (let at = 0, i = 0; at < text.length; i++) { at += sizes[i % sizes.length]; view.update(text.slice(0, at), false); }
    view.update(text, true);
    return [whole.innerHTML, streamed.innerHTML];
}"""


def test_markdown_becomes_elements(site: Site) -> None:
    with site.visit(lambda prompt, choice: ANSWER) as page:
        send(page, "Show it")
        finished(page)
        text = page.locator(".model-turn .text")
        expect(text.locator("h1")).to_have_text("Heads")
        expect(text.locator("p >> strong")).to_have_text("bold")
        expect(text.locator("ol > li > ul > li > ol > li")).to_have_text("deeper")
        expect(text.get_by_role("img", name="done")).to_have_count(1)
        expect(text.locator("td.right")).to_have_text("1.5")
        assert text.locator("td.right").evaluate("e => getComputedStyle(e).textAlign") == "right"
        links = text.locator("a").evaluate_all("all => all.map(a => [a.href, a.target, a.rel])")
        outside = ["_blank", "noopener noreferrer nofollow"]
        assert links == [["https://example.org/?a=1&b=2", *outside], ["https://example.com/x", *outside]]
        expect(text.locator(".code figcaption span")).to_have_text("python")
        expect(text.locator(".code .hljs-keyword").first).to_have_text("def")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=site.url)
        text.get_by_role("button", name="Copy code").click()
        expect(page.get_by_role("status")).to_have_text("Copied.")
        assert page.evaluate("navigator.clipboard.readText()") == "def go(x: int) -> int:\n    return x + 1  # <b>"
        expect(text.locator("math")).to_have_count(4)
        expect(text.locator("math[display=block] munderover, math[display=block] mfrac")).to_have_count(2)
        expect(text.locator("p", has_text="but $5 and $6")).to_contain_text("unfinished $\\frac{1$.")
        expect(text.locator("blockquote")).to_have_text("quoted")
        expect(text.locator("p", has_text="line one").locator("br")).to_have_count(1)


def test_nothing_that_a_model_writes_runs_or_loads(site: Site) -> None:
    thought = ATTACKS + "\n```\n</think>" + ATTACKS
    with site.visit(lambda prompt, choice: thought, chunk=7) as page:  # `visit` looks for dialogs and foreign requests
        page.get_by_role("switch", name="Think before answering").check()
        send(page, ATTACKS)
        finished(page)
        page.locator(".thought summary").click()
        page.reload()
        finished(page)
        bad = page.evaluate(
            """() => [...document.querySelectorAll(".turn *")].filter((e) =>
                e.matches("script, iframe, object, embed, img, style, form, input, base, link, meta, [srcdoc], [style*=url]")
                || [...e.attributes].some((a) => a.name.startsWith("on"))
                || ("href" in e && e.tagName !== "use" && !/^(https?|mailto):/.test(e.href.baseVal ?? e.href))).map((e) => e.outerHTML)"""
        )
        assert bad == []
        hrefs = page.locator(".text a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        assert set(hrefs) <= {"https://ok.example/%22onmouseover=%22alert(1)", "https://evil.example/beacon.png"}, hrefs
        expect(page.locator(".text")).to_have_count(2)
        expect(page.locator(".model-turn .text")).to_contain_text(
            "<script>alert(1)</script><img src=x onerror=alert(1)>"
        )
        assert page.locator(".model-turn .text mspace, .model-turn .text math").evaluate_all(
            "all => all.every(e => e.getBoundingClientRect().width < 2000)"
        )


@pytest.mark.parametrize("name", ["api.md", "glossary.md", "speculation.md", "answer", "attacks"])
def test_a_streamed_text_ends_as_the_whole_one(site: Site, name: str) -> None:
    text = {"answer": ANSWER, "attacks": ATTACKS}.get(name) or (DOCS / name).read_text(encoding="utf-8")[:12_000]
    text += "\n\n[late]: https://late.example\n" if name == "answer" else ""
    text = text.replace("Some", "Some [late]") if name == "answer" else text
    with site.visit() as page:
        whole, streamed = page.evaluate(RENDER, [text, [1] if len(text) < 3000 else [97, 5, 211]])
        assert streamed == whole
        assert name != "answer" or "https://late.example" in whole


def test_a_long_answer_renders_its_end_only(site: Site) -> None:
    with site.visit() as page:
        found = page.evaluate(
            """async () => {
                const { MarkdownView } = await import("/playground/markdown.js");
                const element = document.createElement("div"), view = new MarkdownView(element);
                let text = "", removed = 0;
                const count = (all) => { for (const change of all) removed += change.removedNodes.length; };
                new MutationObserver(count).observe(element, { childList: true });
                for (let i = 0; i < 300; i++) {
                    text += `Paragraph ${i} of a long answer.\\n\\n`;
                    view.update(text.slice(0, -5), false);
                    view.update(text, false);
                }
                view.update(text, true);
                await new Promise(requestAnimationFrame);
                const first = removed, list = "- item of a list\\n".repeat(400) + "\\n```c\\n" + "int x = 1;\\n".repeat(3000);
                for (let at = 0; at < list.length; at += 4000) view.update(text + list.slice(0, at), false);
                view.update(text + list, true);
                return [first, element.children.length, element.querySelectorAll("li").length, element.querySelector("code").textContent.length];
            }"""
        )
        removed, blocks, items, code = found
        assert removed <= 3 * 300 and blocks == 302 and items == 400 and code == len("int x = 1;\n") * 3000 - 1


def test_the_vendored_files_are_those_of_the_manifest(tmp_path: Path) -> None:
    assert vendor_static.problems() == []
    for path in vendor_static.FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "purify.min.js").write_text("other")
    (tmp_path / "more.js").write_text("")
    (tmp_path / "temml.css").unlink()
    found = ["temml.css: missing", "more.js: not in the manifest", "purify.min.js: another checksum"]
    assert vendor_static.problems(tmp_path) == found
    packages = json.loads((tmp_path / "manifest.json").read_text())
    licences = {name for package in packages for name in package["files"] if name.endswith("LICENSE")}
    assert len(licences) == len(packages)
