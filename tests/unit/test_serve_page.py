"""The page of the server in headless Chromium: keyboard, sources of a token and a document, texts that are no HTML."""

import re

import pytest
from browser import CHROMIUM, Browser
from serving_fakes import EchoBatcher, served, serving

EVIL = "<img src=x onerror=\"document.title='evil'\"><script>document.title='evil'</script>\u202eback"
pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")]


def find(prompt, answer, top):
  """Three documents: the first helps the bytes of "é" only, the second hurts the first token and helps the others."""
  n = len(answer)
  accent = [0.25 if number in (0xC3, 0xA9) else 0.0 for number in answer]
  mixed = [-0.5, *(0.125 for _ in range(n - 1))]
  documents = [
    {"domain": "evil", "path": EVIL, "text": EVIL, "token_nats": accent, "standard_error": 0.01},
    {"domain": "b", "path": "b.txt", "text": "two\nlines", "token_nats": mixed, "standard_error": 0.5},
    {"domain": "c", "path": "c.txt", "text": "three", "token_nats": [0.0625] + [0.0] * (n - 1), "standard_error": 0.01},
  ]
  for place, one in enumerate(documents):
    trained = [{"step": 7, "epoch": 0, "contribution": 0.00125}] * (place == 0)
    one |= {"id": f"{place}", "offset": 0, "chunk": 0, "nats": sum(one["token_nats"]), "trained": trained}
  tokens = [{"text": "", "logp": -1.0}] * n
  token_top = [[2, 1] if i == 0 else [0, 1] for i in range(n)]
  about = {"seconds": 0.25, "method": "m", "unit": "u"}
  return {"tokens": tokens, "documents": documents[:2] if top == 2 else documents, "token_top": token_top} | about


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
  with Browser(tmp_path_factory.mktemp("profile")) as made:
    yield made


def press(browser, *keys):
  for key in keys:
    browser.press(key, "\r" if key == "Enter" else "")


def rows(browser):
  return browser.look("[...document.querySelectorAll('.document')].map(x => x.querySelector('.worth').textContent)")


def focused(browser):
  return browser.look("document.activeElement.textContent")


def test_a_question_is_answered_and_its_sources_are_read_by_keyboard(browser):
  with serving(served(EchoBatcher(), sources=find)) as port:
    browser.open(f"http://127.0.0.1:{port}/")
    browser.until("document.getElementById('model').textContent === 'echo'")
    browser.look("document.getElementById('prompt').focus()")
    browser.write("aé\nb<i>")
    press(browser, "Enter")
    browser.until("document.querySelectorAll('.document').length === 3")
    answer = browser.look("document.getElementById('answer').textContent")
    assert (
      answer == "aé\u21b5\nb<i>" and browser.look("document.querySelectorAll('#answer i, #documents img').length") == 0
    )
    assert rows(browser) == ["+0.50 nats \u00b1 0.01", "+0.50 nats \u00b1 0.5", "+0.063 nats \u00b1 0.01"]
    assert browser.look("[...document.querySelectorAll('.document')].map(x => x.classList.contains('unsure'))") == [
      False,
      True,
      False,
    ]
    assert browser.look("document.querySelector('.document .excerpt').textContent").startswith("<img src=x")
    assert browser.look("document.querySelector('.document .helped').textContent") == "a\u00e9 +0.50"

    browser.look("document.querySelector('.token').focus()")
    press(browser, "Enter")  # the sources of the first token
    assert browser.look("document.getElementById('sources-title').textContent") == "Sources of a"
    assert rows(browser) == ["+0.063 nats", "\u22120.50 nats"]
    press(browser, "ArrowRight", "Enter")  # both bytes of a letter are one token to see
    assert (focused(browser), rows(browser)) == ("\u00e9", ["+0.50 nats", "+0.25 nats"])
    press(browser, "Escape")
    assert len(rows(browser)) == 3 and focused(browser) == "\u00e9"

    browser.look("document.querySelector('.document button').focus()")
    shades = "[...document.querySelectorAll('.token')].map(x => x.className.slice(6))"
    assert browser.look(shades) == ["", "up4", "", "", "", "", ""]
    press(browser, "ArrowDown", "Enter")
    assert browser.look(shades) == ["down4", "up2", "up1", "up1", "up1", "up1", "up1"]
    assert browser.look("document.querySelector('.document.active pre').textContent") == "two\nlines"
    press(browser, "ArrowUp", "Enter")
    detail = browser.look("document.querySelector('.document .detail').textContent")
    assert "\u202e" not in detail and detail.endswith("Contribution, nats70+0.0013")
    assert browser.look("document.title") == "echo \u00b7 maxghost" and browser.console == []


def test_it_stops_says_errors_and_asks_for_the_key(browser):
  batcher = EchoBatcher(pause=0.02)
  with serving(served(batcher), api_key="secret") as port:
    browser.open(f"http://127.0.0.1:{port}/")
    browser.until("!document.getElementById('key-label').hidden")
    browser.look("document.getElementById('key').focus()")
    browser.write("secret")
    press(browser, "Enter")
    browser.until("document.getElementById('model').textContent === 'echo'")
    assert browser.look("document.getElementById('about').textContent") == "No sources: no index: write one"
    browser.look("document.getElementById('prompt').focus()")
    browser.write("x" * 100)
    press(browser, "Enter")
    browser.until("document.querySelectorAll('.token').length > 3")
    browser.look("document.getElementById('stop').click()")
    browser.until("document.getElementById('status').textContent.endsWith('stopped')")
    browser.until("!document.getElementById('send').disabled")
    browser.look("document.getElementById('prompt').value = 'a fail'; document.getElementById('form').requestSubmit()")
    browser.until("document.getElementById('problem').textContent.includes('the model broke')")
    browser.look("document.getElementById('max_tokens').value = 9999; document.getElementById('form').requestSubmit()")
    # the browser itself refuses a number above the model's
    assert browser.look("document.getElementById('form').checkValidity()") is False


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_reaches_over_the_edge_of_a_phone(browser, dark):
  with serving(served(EchoBatcher(), sources=find, chats=True)) as port:
    browser.open(f"http://127.0.0.1:{port}/", 390, 844, dark)
    browser.until("document.getElementById('model').textContent === 'echo'")
    browser.look(
      "document.getElementById('prompt').value = 'w'.repeat(90); document.getElementById('form').requestSubmit()"
    )
    browser.until("document.querySelectorAll('.document').length === 3")
    browser.look("document.querySelector('.document button').click(); document.getElementById('settings').open = true")
    wide = """[...document.querySelectorAll("*")].filter(x => x.getBoundingClientRect().width &&
      x.getBoundingClientRect().right > 391 && !x.closest("pre, .excerpt, .where")).map(x => x.outerHTML)"""
    assert browser.look("document.documentElement.scrollWidth") <= 390 and browser.look(wide) == []
    ground, ink = browser.look("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == dark and ground != ink
    assert browser.console == []
