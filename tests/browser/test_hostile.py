"""
Nothing in an event, a name or a question is ever run or taken for markup.

Each payload, if anything took it for what it looks like, would set `window.xss`, open a dialog,
ask another origin or break the page's policy; the page is looked over for all of that. It would
also change the page's shape, so that is compared with the shape that harmless text of the same
size has.
"""

import json
from urllib.parse import quote

import pytest
from playwright.sync_api import expect
from tests.browser.towns import order, site

from oncebridge.base.formatting import printable

PAYLOADS = [
    "<script>window.xss=1</script>",
    "</script><script>window.xss=1</script>",
    "</title><script>window.xss=1</script>",
    "</textarea><script>window.xss=1</script>",
    "</style><script>window.xss=1</script>",
    "--><script>window.xss=1</script><!--",
    "]]><script>window.xss=1</script>",
    "<ScRiPt>window.xss=1</sCrIpT>",
    "<scr<script>ipt>window.xss=1</scr</script>ipt>",
    "<script src=//evil.example/x.js></script>",
    "<img src=x onerror=window.xss=1>",
    "<img src='x' onerror='window.xss=1'>",
    "<svg onload=window.xss=1>",
    "<svg><script>window.xss=1</script></svg>",
    "<svg><animate onbegin=window.xss=1 attributeName=x dur=1s>",
    "<svg><a xlink:href='javascript:window.xss=1'><text x=20 y=20>x</text></a></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.xss=1>",
    "<noscript><p title='</noscript><img src=x onerror=window.xss=1>'>",
    "<svg></p><style><a title='</style><img src=x onerror=window.xss=1>'>",
    "<form><math><mtext></form><form><mglyph><style></math><img src=x onerror=window.xss=1>",
    "<iframe srcdoc='<script>parent.xss=1</script>'></iframe>",
    "<iframe src=javascript:parent.xss=1></iframe>",
    "<object data=javascript:window.xss=1></object>",
    "<embed src=javascript:window.xss=1>",
    "<base href=//evil.example/>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=//evil.example/'>",
    "<body onload=window.xss=1>",
    "<details open ontoggle=window.xss=1>",
    "<input autofocus onfocus=window.xss=1>",
    "<video><source onerror=window.xss=1>",
    "<marquee onstart=window.xss=1>",
    "<template shadowrootmode=open><img src=x onerror=window.xss=1></template>",
    '" autofocus onfocus=window.xss=1 x="',
    "' autofocus onfocus=window.xss=1 x='",
    '"><img src=x onerror=window.xss=1>',
    "'><img src=x onerror=window.xss=1>",
    "` onmouseover=window.xss=1 x=`",
    "javascript:window.xss=1",
    "java\tscript:window.xss=1",
    " javascript:window.xss=1",
    "data:text/html,<script>window.xss=1</script>",
    "//evil.example/",
    "{{7*7}}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{x}}{% endfor %}",
    "${7*7}",
    "<%= 7*7 %>",
    "#{7*7}",
    "%3Cscript%3Ewindow.xss=1%3C/script%3E",
    "&lt;script&gt;window.xss=1&lt;/script&gt;",
    "&#60;script&#62;window.xss=1&#60;/script&#62;",
    "\\u003cscript\\u003ewindow.xss=1\\u003c/script\\u003e",
    "\N{FULLWIDTH LESS-THAN SIGN}script\N{FULLWIDTH GREATER-THAN SIGN}window.xss=1",
    "<script\x00>window.xss=1</script>",
    "<scr\x00ipt>window.xss=1</scr\x00ipt>",
    "\N{RIGHT-TO-LEFT OVERRIDE}>tpircs<window.xss=1",
    "\N{LINE SEPARATOR}<script>window.xss=1</script>\N{PARAGRAPH SEPARATOR}",
    "\N{ZERO WIDTH NO-BREAK SPACE}<script>window.xss=1</script>",
    "<\N{ZERO WIDTH SPACE}img src=x onerror=window.xss=1>",
    "+ADw-script+AD4-window.xss=1+ADw-/script+AD4-",
    "..\\..\\..//evil.example",
    "/decisions?q=<img src=x onerror=window.xss=1>",
    "\r\nSet-Cookie: xss=1\r\n\r\n<script>window.xss=1</script>",
    "__proto__",
]
ADDRESSES = [one for one in PAYLOADS if "script:" in one[:13] or one.startswith(("data:", "//"))]
"""They do harm only where an address begins with them."""
_others = [one for one in PAYLOADS if one not in ADDRESSES]
TEXTS = [*ADDRESSES, *(" ".join(_others[at : at + 4]) for at in range(0, len(_others), 4))]
"""All of them, in fewer pages."""
LOOK = """() => {
  const all = [...document.querySelectorAll("*")];
  const told = all.flatMap((one) => [...one.attributes]);
  const runs = ["style", "srcdoc", "formaction", "xlink:href", "http-equiv"];
  const links = [...document.querySelectorAll("[href], [src], [action]")];
  return {
    ran: window.xss ?? null,
    tags: [...new Set(all.map((one) => one.localName))],
    scripts: document.scripts.length,
    runs: told.filter((one) => one.name.startsWith("on") || runs.includes(one.name))
      .map((one) => one.name),
    away: links.map((one) => one.href ?? one.src ?? one.action)
      .filter((one) => !String(one).startsWith(location.origin)),
  };
}"""
OURS = set(
    """
    a abbr article b body br button caption circle code dd del desc details div dl dt figcaption
    figure footer form g h1 h2 h3 h4 head header html input ins label li line link main meta nav ol
    option p path pre rect script section select span strong summary svg table tbody td text
    textarea th thead time title tr ul wbr
    """.split()  # noqa: SIM905 - it is read as a text
)
"""What pages are made of; none of the payloads' own are among them."""


def is_unharmed(page):
    """Check that nothing on the page was taken for more than text."""
    found = page.evaluate(LOOK)
    assert set(found.pop("tags")) <= OURS
    assert found == {"ran": None, "scripts": 1, "runs": [], "away": []}


def shows(page, payload):
    """Check that it is told, or at least how it begins: what is long is cut in lists."""
    text = page.get_by_role("main").inner_text()
    assert printable(payload, 400).strip()[:40] in text


def spiked(payload):
    """Make an event that says *payload* wherever it can say anything."""
    return {
        "version": payload,
        "id": payload,
        "detail-type": payload,
        "source": payload,
        "account": payload,
        "time": payload,
        "region": payload,
        "resources": [payload],
        "replay-name": payload,
        payload: payload,
        "detail": {
            "order": order()["id"],
            "topicName": payload,
            "conversationId": payload,
            "eventBody": {"conversationId": payload, "id": payload, payload: payload},
            payload: {payload: [payload, {payload: payload}]},
        },
    }


@pytest.fixture(scope="module")
def haunted(tmp_path_factory):
    """A service that all of them went through, came again, and died in."""
    with site(tmp_path_factory.mktemp("haunted")) as running:
        for text in TEXTS:
            event = spiked(text)
            assert running.send(event) == "delivered"
            assert running.send(event | {"account": f"{text} again"}) == "duplicate"
            event["detail"]["order"] = order()["id"]
            running.sink.refused.add(event["detail"]["order"])
            assert running.send(event) == "dead"
        assert set(running.send(json.dumps(PAYLOADS).encode())) == {"dead"}  # these are no events
        yield running


def test_lists_show_hostile_events_as_text(visits, haunted):
    page = visits.open(haunted.url)
    for path in ("/", "/decisions", "/decisions?cause=redelivery", "/dead", "/rules"):
        page.goto(f"{haunted.url}{path}")
        is_unharmed(page)
        while (older := page.get_by_role("link", name="Older")).count():
            older.click()
            is_unharmed(page)
    page.goto(f"{haunted.url}/dead?reason=rejected")
    for text in TEXTS:
        shows(page, text)


@pytest.mark.parametrize("path", ["/", "/decisions"])
@pytest.mark.full
def test_a_page_stays_live_with_hostile_events_on_it(visits, haunted, path):
    page = visits.open(f"{haunted.url}{path}")
    haunted.send(spiked("<img src=x onerror=window.xss=1> and more"))
    for _ in range(2):
        with page.expect_response(lambda answer: "x-live" in answer.request.headers):
            pass
    page.wait_for_timeout(100)
    is_unharmed(page)
    expect(page.locator("#live")).to_have_text("Live")


@pytest.mark.full
def test_why_tells_hostile_events_as_text(visits, haunted):
    page = visits.open(f"{haunted.url}/decisions?verdict=duplicate")
    links = []
    while True:
        links += [a.get_attribute("href") for a in page.locator("a[href^='/decisions/']").all()]
        if not page.get_by_role("link", name="Older").count():
            break
        page.get_by_role("link", name="Older").click()
    assert len(links) == len(TEXTS)
    for link, text in zip(links, reversed(TEXTS), strict=True):
        page.goto(f"{haunted.url}{link}", wait_until="domcontentloaded")
        is_unharmed(page)
        shows(page, text)


@pytest.mark.full
def test_letters_tell_hostile_events_as_text(visits, haunted):
    page = visits.open(haunted.url)
    for number, text in enumerate(TEXTS, 1):
        page.goto(f"{haunted.url}/dead/{number}", wait_until="domcontentloaded")
        is_unharmed(page)
        shows(page, text)
    for number in range(len(TEXTS) + 1, len(TEXTS) + len(PAYLOADS), 6):  # what was no event
        page.goto(f"{haunted.url}/dead/{number}", wait_until="domcontentloaded")
        is_unharmed(page)
    page.locator("button[value=drop]").click()
    is_unharmed(page)


@pytest.mark.full
def test_a_hostile_question_is_answered_as_text(visits, haunted):
    page = visits.open(f"{haunted.url}/decisions", allowed=("400", "404"))
    for text in TEXTS:
        asked = quote(text, safe="")
        page.goto(f"{haunted.url}/decisions?q={asked}&verdict={asked}&cause={asked}&route={asked}")
        is_unharmed(page)
    for payload in PAYLOADS[::16]:
        page.goto(f"{haunted.url}/dead?reason={quote(payload)}&route={quote(payload)}")
        is_unharmed(page)
        for path in ("decisions", "events", "dead", ""):
            page.goto(f"{haunted.url}/{path}/{quote(payload, safe='')}")
            is_unharmed(page)


@pytest.mark.full
def test_a_hostile_event_is_tried_as_text(visits, haunted):
    page = visits.open(f"{haunted.url}/rules")

    def tried(text):
        page.get_by_label("Event", exact=True).fill(text)
        page.get_by_role("button", name="Try").click()
        expect(page.locator("#result")).to_be_visible()
        is_unharmed(page)

    for some in (PAYLOADS[:40], PAYLOADS[40:]):
        tried("\n".join(json.dumps(spiked(payload)) for payload in some))
    tried("\n".join(PAYLOADS))
    for payload in PAYLOADS[3:36:8]:
        tried(payload)
        assert page.get_by_label("Event", exact=True).input_value() == payload


# --- names out of a configuration -----------------------------------------------------------

RULE = """
[[rules]]
name = {name}
match = {{ detail-type = [{number}] }}
key = ["detail.order", {path}]
"""


@pytest.fixture(scope="module")
def misnamed(tmp_path_factory):
    """A service whose rules and route are called what nobody would call them."""
    names = [payload for payload in PAYLOADS if payload.isprintable()]
    path = json.dumps('detail."</code><img src=x onerror=window.xss=1>"')
    rules = "".join(
        RULE.format(name=json.dumps(name), number=json.dumps(f"type {number}"), path=path)
        for number, name in enumerate(names)
    )
    route = '"><svg onload=window.xss=1>'
    with site(tmp_path_factory.mktemp("misnamed"), rules=rules, arguments=("--route", route)) as it:
        it.names = names
        for number in range(len(names)):
            event = order(**{"detail-type": f"type {number}"})
            event["detail"]["</code><img src=x onerror=window.xss=1>"] = "x"
            assert [it.send(event), it.send(event)] == ["delivered", "duplicate"]
        it.kill_letter(**{"detail-type": "type 1"})
        yield it


@pytest.mark.full
def test_hostile_names_of_rules_and_routes_are_text(visits, misnamed):
    page = visits.open(misnamed.url)
    for path in ("/", "/decisions", "/dead", "/dead/1", "/rules"):
        page.goto(f"{misnamed.url}{path}")
        is_unharmed(page)
    for name in misnamed.names:
        shows(page, name)
    page.goto(f"{misnamed.url}/decisions")
    page.goto(misnamed.url + page.locator("a[href^='/decisions/']").last.get_attribute("href"))
    is_unharmed(page)
