"""The chat page, in a real browser: it streams, counts, stops, and says what went wrong."""

from __future__ import annotations

import base64
import json

import pytest

from support import chromium
from support.engines import save_text_model
from support.servers import MODEL, serving, wait_until
from tvr import SamplingParams, demo

BROWSER = chromium.find()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
KEY = "right-key"
EVIL = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"
ANSWER = ".turn.assistant:last-child .said"
IS_OVER = "!document.querySelector('#send').disabled"

#: The page itself notes how long the answer was; a test looks less often on a busy machine.
NOTE_LENGTHS = f"""
window.lengths = new Set();
new MutationObserver(() => lengths.add(document.querySelector("{ANSWER}")?.textContent.length))
    .observe(document.body, {{childList: true, subtree: true, characterData: true}});
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with chromium.chromium(BROWSER, tmp_path_factory.mktemp("browser")) as page:
        yield page
        assert page.complaints == [], "nothing but what the tests have asked for"


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A server of the demo model, which has no chat template."""
    with serving(demo.path(), {"num_blocks": 72}) as running:
        yield running


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    path = save_text_model(tmp_path_factory.mktemp("model"))
    with serving(path, {"num_blocks": 128, "max_model_len": 256}) as running:
        yield running


@pytest.fixture(scope="module")
def locked():
    with serving(demo.path(), {"num_blocks": 72}, api_keys=(KEY,)) as running:
        yield running


@pytest.fixture
def page(tab):
    """The tab, where complaints that a test has taken note of are forgotten."""
    tab.call("Emulation.clearDeviceMetricsOverride")
    tab.call("Emulation.setEmulatedMedia", features=[])
    tab.urls.clear()
    yield tab
    tab.open("about:blank")  # its looks at /metrics end with the page


def start(page, running):
    page.open(f"{running.url}/")
    page.wait_for(f"document.title === '{MODEL}'")


def say(page, text, **fields):
    for name, value in {"temperature": "0", **fields}.items():
        page.eval(f"document.querySelector('#{name}').value = {json.dumps(value)}")
    page.fill("#prompt", text)
    page.press("Enter")


def test_the_page_may_run_nothing_but_its_own_script(story):
    reply = story.get("/")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(
        part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert policy[kind].startswith("'sha256-")
        assert "unsafe" not in policy[kind]
    assert b"innerHTML" not in reply.body
    assert b"http://" not in reply.body
    assert b"https://" not in reply.body


@needs_browser
def test_an_answer_grows_and_its_speed_and_the_kv_pool_are_shown(page, story):
    start(page, story)
    page.eval(NOTE_LENGTHS)
    say(page, "ROMEO:", **{"max-tokens": "250"})
    kv, load = set(), set()
    while not page.eval(IS_OVER):
        kv.add(page.text("#kv-text"))
        load.add(page.text("#load"))
    assert page.eval("lengths.size") > 20
    assert any(text.startswith("1 running, 0 waiting, ") for text in load)
    assert any(0 < float(text.removesuffix(" %")) < 100 for text in kv - {"–"})
    (own,) = story.llm.generate(["ROMEO:"], SamplingParams(temperature=0, max_tokens=250))
    assert page.text(ANSWER) == own.outputs[0].text
    tokens, speed = page.text("#speed").split(", ")[:2]
    assert tokens == "250 tokens"
    assert float(speed.removesuffix(" tokens/s")) > 1
    assert {url.removeprefix(story.url) for url in page.urls} == {
        *("/", "/v1/models", "/v1/completions", "/metrics")
    }


@needs_browser
def test_stop_ends_the_request_and_keeps_what_has_come(page, story):
    start(page, story)
    say(page, "JULIET:", **{"max-tokens": "900"})
    page.wait_for(f"document.querySelector('{ANSWER}')?.textContent.length > 40")
    assert not story.is_idle()
    page.click("#stop")
    page.wait_for(IS_OVER)
    wait_until(story.is_idle, 5)
    assert page.text(".turn.assistant .who") == f"{MODEL} (stopped)"
    kept = page.text(ANSWER)
    assert len(kept) > 40
    say(page, "ROMEO:", **{"max-tokens": "8"})
    page.wait_for(f"{IS_OVER} && document.querySelectorAll('.turn').length === 4")
    prompt = f"JULIET:{kept}\nROMEO:"
    (own,) = story.llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
    assert page.text(ANSWER) == own.outputs[0].text
    page.wait_for("document.querySelector('#kv-text').textContent === '0.0 %'")


@needs_browser
def test_a_conversation_has_a_system_prompt_and_all_its_turns(page, chat):
    start(page, chat)
    messages = [{"role": "system", "content": "Be brief."}]
    for turn, text in enumerate(("hello world", "once more"), 1):
        say(page, text, system="Be brief.", **{"max-tokens": "12"})
        page.wait_for(f"{IS_OVER} && document.querySelectorAll('.turn').length === {2 * turn}")
        messages.append({"role": "user", "content": text})
        (own,) = chat.llm.chat(messages, SamplingParams(temperature=0, max_tokens=12))
        assert page.text(ANSWER) == own.outputs[0].text
        messages.append({"role": "assistant", "content": own.outputs[0].text})
    page.click("#clear")
    assert page.eval("document.querySelectorAll('.turn').length") == 0


@needs_browser
def test_what_is_said_is_text_and_never_markup(page, story):
    start(page, story)
    say(page, EVIL, **{"max-tokens": "4"})
    page.wait_for(f"{IS_OVER} && document.querySelectorAll('.turn').length === 2")
    assert page.text(".turn.user .said") == EVIL
    assert page.eval("document.querySelectorAll('#log img, #log script').length") == 0
    assert page.eval("document.title") == MODEL


@needs_browser
def test_a_refusal_is_told_and_the_text_may_be_sent_again(page, story):
    start(page, story)
    say(page, EVIL, temperature="3")
    page.wait_for("document.querySelector('#error').textContent")
    assert page.text("#error").startswith("400: temperature is 3")
    assert page.eval("document.querySelector('#prompt').value") == EVIL
    assert page.eval("document.querySelectorAll('.turn').length") == 0
    assert page.complaints.pop().endswith("the server responded with a status of 400 (Bad Request)")


@needs_browser
def test_the_browser_asks_for_the_key_and_a_wrong_one_in_the_field_is_told(page, locked):
    page.answer_with(KEY)
    start(page, locked)
    say(page, "ROMEO:", **{"max-tokens": "4"})
    page.wait_for(f"{IS_OVER} && document.querySelector('{ANSWER}')?.textContent")
    page.click("#settings summary")
    page.fill("#key", "wrong")
    page.click("#prompt")
    page.wait_for("document.querySelector('#error').textContent.startsWith('401: ')")
    assert "Authorization: Bearer KEY" in page.text("#error")
    page.wait_for("document.querySelector('#load').textContent.startsWith('401: ')")
    page.fill("#key", KEY)
    page.click("#prompt")
    page.wait_for("document.querySelector('#error').hidden")
    page.wait_for("document.querySelector('#load').textContent.startsWith('0 running')")
    say(page, "JULIET:", **{"max-tokens": "4"})
    page.wait_for(f"{IS_OVER} && document.querySelectorAll('.turn').length === 4")
    assert page.eval("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    assert {entry.rpartition(" (")[0] for entry in page.complaints} == {
        "Failed to load resource: the server responded with a status of 401"
    }
    page.complaints.clear()
    page.call("Fetch.disable")


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read_by_day_and_night(page, story, scheme):
    phone = {"width": 320, "height": 640, "deviceScaleFactor": 2, "mobile": True}
    page.call("Emulation.setDeviceMetricsOverride", **phone)
    media = {"name": "prefers-color-scheme", "value": scheme}
    page.call("Emulation.setEmulatedMedia", features=[media])
    start(page, story)
    say(page, "a" * 200, **{"max-tokens": "4"})
    page.wait_for(f"{IS_OVER} && document.querySelectorAll('.turn').length === 2")
    page.click("#settings summary")
    assert page.eval("document.documentElement.scrollWidth") == 320
    boxes = page.eval(
        "[...document.querySelectorAll('button, input, textarea')].filter(e => e.checkVisibility())"
        ".map(e => e.getBoundingClientRect()).map(r => [r.left, r.right, r.height])"
    )
    assert len(boxes) == 7
    assert all(left >= 0 and right <= 320 and height >= 30 for left, right, height in boxes)
    for selector in (".said", ".who", "#note", "#send", "#stop", "#load", "#temperature", "#error"):
        ratio = contrast(*page.eval(COLOURS % json.dumps(selector)))
        assert ratio >= 4.5, f"{selector}: {ratio:.1f}"
    back = page.eval("getComputedStyle(document.body).backgroundColor")
    assert (luminance(back) > 0.5) == (scheme == "light")


#: An element's colour, and that of the first background behind it.
COLOURS = """(() => {
  let e = document.querySelector(%s);
  const text = getComputedStyle(e).color;
  while (getComputedStyle(e).backgroundColor === "rgba(0, 0, 0, 0)") e = e.parentElement;
  return [text, getComputedStyle(e).backgroundColor];
})()"""


def luminance(colour):
    """The relative luminance of WCAG 2."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(*colours):
    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)


def basic(text):
    return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}


def test_a_browser_is_asked_for_the_key_at_the_page_alone(locked):
    for path, scheme in (("/", 'Basic realm="tvr", charset="UTF-8"'), ("/metrics", "Bearer")):
        reply = locked.get(path)
        assert (reply.status, reply.headers["www-authenticate"]) == (401, scheme)
        assert locked.get(path, headers=basic(f"any:{KEY}")).status == 200
        assert locked.get(path, headers=basic(f":{KEY}")).status == 200


@pytest.mark.parametrize(
    "header",
    [
        *(basic("any:wrong"), basic(KEY), basic(f"{KEY}:"), basic(f"any:{KEY}:"), basic("")),
        {"Authorization": f"Basic any:{KEY}"},
        {"Authorization": f"Basic {KEY}"},
    ],
)
def test_a_wrong_password_opens_nothing(locked, header):
    assert locked.get("/", headers=header).status == 401
    assert locked.get("/metrics", headers=header).status == 401
