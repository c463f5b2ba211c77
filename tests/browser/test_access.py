"""Everybody can use the pages: by keyboard, on a phone, in the dark, with a reader, without a script."""

import re
from pathlib import Path

import axe_playwright_python
import pytest
from playwright.sync_api import expect
from tests.browser.stage import DESK, PHONE, overflow, picture
from tests.browser.towns import site, stocked

AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
RUN_AXE = """(rules) => axe.run(
  {resultTypes: ["violations"], elementRef: false, ...(rules ? {runOnly: rules} : {})}
)"""
VIEWS = ("overview", "decisions", "why", "event", "dead", "letter", "confirm", "rules", "tried")
LOOKS = {
    "desk": (DESK, "light"),
    "desk-dark": (DESK, "dark"),
    "phone": (PHONE, "light"),
    "phone-dark": (PHONE, "dark"),
}


@pytest.fixture(scope="module")
def centre(tmp_path_factory):
    with stocked(tmp_path_factory.mktemp("centre")) as running:
        yield running


def show(page, centre, view):
    """Go to a view that is full of data."""
    paths = {"overview": "/", "why": "/decisions?verdict=duplicate", "event": "/decisions"}
    paths |= {"decisions": "/decisions?verdict=dead"}
    paths |= {"letter": "/dead", "confirm": "/dead", "tried": "/rules"}
    page.goto(f"{centre.url}{paths.get(view, f'/{view}')}")
    follow = {"why": "table a[href^='/decisions/']", "event": "table a[href^='/events/']"}
    follow |= {"letter": "table a[href^='/dead/']", "confirm": "table a[href^='/dead/']"}
    if view in follow:
        page.goto(centre.url + page.locator(follow[view]).first.get_attribute("href"))
    if view == "confirm":
        page.get_by_role("button", name=re.compile("Drop")).click()
    if view == "tried":
        page.get_by_role("button", name="Try").click()
        expect(page.locator("#result")).to_be_visible()
    titles = {"overview": "", "why": "", "dead": "Dead letters", "confirm": "Drop 1 dead letter?"}
    titles |= {"tried": "Rules", "letter": "Dead letter"}
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_contain_text(titles.get(view, view.capitalize()))


@pytest.mark.full
def test_axe_finds_nothing_serious_on_any_view(visits, centre):
    # Axe comes as a script of ours, which the pages would refuse.
    page = visits.open(centre.url, bypass_csp=True)
    found = {}
    for view in VIEWS:
        show(page, centre, view)
        page.evaluate(AXE.read_text())
        # In the dark only the colours are others.
        for scheme, rules in (("light", None), ("dark", ["color-contrast"])):
            page.emulate_media(color_scheme=scheme)
            told = page.evaluate(RUN_AXE, rules)
            assert told["passes"]
            for one in told["violations"]:
                if one["impact"] in ("serious", "critical"):
                    nodes = [node["html"][:150] for node in one["nodes"][:3]]
                    found[f"{view}, {scheme}: {one['id']}"] = [one["help"], *nodes]
        page.emulate_media(color_scheme="light")
    assert not found


@pytest.mark.full
def test_every_view_fits_every_window(visits, centre):
    page = visits.open(centre.url)
    found = {}
    for view in VIEWS:
        page.set_viewport_size(DESK)
        show(page, centre, view)
        for look, (size, scheme) in LOOKS.items():
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=scheme)
            if look != "phone-dark":
                picture(page, f"{view}-{look}")
            if sticks_out := overflow(page):
                found[f"{view}-{look}"] = sticks_out
    assert not found


@pytest.mark.full
def test_a_phone_shows_every_view(visits, centre):
    page = visits.open(centre.url, size=PHONE)
    for view in VIEWS:
        show(page, centre, view)
        assert page.evaluate("window.innerWidth") == PHONE["width"]
        assert not overflow(page)


@pytest.mark.parametrize("path", ["/", "/decisions", "/dead", "/rules"])
@pytest.mark.full
def test_a_first_visit_is_light_and_soon_there(visits, centre, path):
    page = visits.open("about:blank", origin=centre.url)
    devtools = page.context.new_cdp_session(page)
    devtools.send("Network.enable")
    sizes = []
    devtools.on("Network.loadingFinished", lambda told: sizes.append(told["encodedDataLength"]))
    page.goto(f"{centre.url}{path}", wait_until="networkidle")
    paint = page.evaluate(
        "performance.getEntriesByName('first-contentful-paint').map((e) => e.startTime)[0]"
    )
    print(
        f"{path}: {sum(sizes) / 1024:.0f} KB in {len(sizes)} answers, painted after {paint:.0f} ms"
    )
    assert len(sizes) >= 3
    assert sum(sizes) <= 200 * 1024
    assert paint < 5_000  # under a second on a machine that is not busy with other tests


@pytest.mark.full
def test_without_a_script_everything_is_there(visits, centre):
    page = visits.open(centre.url, java_script_enabled=False)
    expect(page.locator("#rates")).to_contain_text("Received")
    expect(page.locator("#causes")).to_contain_text("redelivery")
    expect(page.get_by_role("link", name="Reload")).to_be_visible()
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Decisions").click()
    page.get_by_label("Verdict").select_option("duplicate")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("table.decisions tbody tr").first).to_contain_text("duplicate")
    page.get_by_role("link", name=re.compile(r"Why\?")).first.click()
    expect(page.locator("section[aria-labelledby=line]")).to_contain_text("delivered")
    page.get_by_role("link", name="Dead letters").click()
    page.locator("table input[type=checkbox]").first.check()
    page.get_by_role("button", name="Drop selected").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Drop 1 dead letter")
    page.get_by_role("link", name="Rules").click()
    page.get_by_role("button", name="Try").click()
    expect(page.locator("#result")).to_contain_text("genesys")


# --- by keyboard ----------------------------------------------------------------------------


def tab_to(page, name, *, most=80):
    """Press Tab until something of this name has the focus, and it is seen that it has."""
    passed = []
    for _ in range(most):
        page.keyboard.press("Tab")
        told, is_seen = page.evaluate(
            """() => {
              const one = document.activeElement;
              const label = one.labels?.[0]?.textContent ?? one.getAttribute("aria-label");
              const style = getComputedStyle(one);
              const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
              return [(label ?? one.textContent ?? "").trim(), ring || style.boxShadow !== "none"];
            }"""
        )
        assert is_seen, f"nobody sees that {told!r} has the focus"
        passed.append(told)
        if re.search(name, told):
            return
    raise AssertionError(f"{name!r} is not reached: {passed}")


@pytest.fixture
def office(tmp_path):
    with site(tmp_path) as running:
        yield running


def test_by_keyboard_alone_from_the_first_page_to_a_replayed_letter(office, visits):
    event, word = office.kill_letter()
    office.sink.refused.clear()
    page = visits.open(office.url)
    heading = page.get_by_role("heading", level=1)
    tab_to(page, "Skip to the content", most=1)
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.goto(office.url)
    tab_to(page, "^Decisions$", most=8)
    page.keyboard.press("Enter")
    expect(heading).to_have_text("Decisions")
    tab_to(page, "Envelope id")
    page.keyboard.type(event["id"])
    page.keyboard.press("Enter")
    expect(page.locator("table.decisions tbody tr")).to_have_count(1)
    tab_to(page, r"Why\?")
    page.keyboard.press("Enter")
    expect(heading).to_contain_text(re.compile("dead", re.IGNORECASE))
    tab_to(page, "^Dead letters$")
    page.keyboard.press("Enter")
    expect(heading).to_have_text("Dead letters")
    tab_to(page, "^All on this page$")
    page.keyboard.press("Space")
    tab_to(page, "^Replay selected")
    page.keyboard.press("Enter")
    expect(heading).to_have_text("Replay 1 dead letter?")
    tab_to(page, "^Reason")
    page.keyboard.type("by keyboard")
    tab_to(page, "^Replay 1 dead letter")
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_contain_text("delivered")
    assert office.sink.has(word) == 1
