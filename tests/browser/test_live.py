"""A page that keeps itself fresh, and takes nothing out of anybody's hands."""

import re

import pytest
from playwright.sync_api import expect
from tests.browser.towns import order, site

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    with site(tmp_path_factory.mktemp("live")) as running:
        running.send(order())
        yield running


def arrived(page):
    """Read how many arrivals the first tile tells of."""
    told = page.locator("#rates > div").first.locator("dd").last.inner_text()
    return int(re.match(r"[\d,]+", told)[0].replace(",", ""))


def refreshed(page, times=2):
    """Wait until the page has asked again, and has had time to show what it heard."""
    for _ in range(times):
        with page.expect_response(lambda answer: "x-live" in answer.request.headers):
            pass
    page.wait_for_timeout(100)


def grows(page, shop, *, to=1):
    before = arrived(page)
    for _ in range(to):
        shop.send(order())
    expect(page.locator("#rates > div").first).to_contain_text(f"{before + to:,} in total")


def test_numbers_follow_without_a_reload(visits, shop):
    page = visits.open(shop.url)
    page.evaluate("window.isStillHere = true")
    grows(page, shop, to=3)
    assert page.evaluate("window.isStillHere")


def test_a_table_that_is_open_stays_open_and_goes_on(visits, shop):
    page = visits.open(shop.url)
    page.locator("#minutes-numbers summary").click()
    page.mouse.click(5, 5)
    table = page.locator("#minutes-table tbody")
    before = table.inner_text()
    grows(page, shop)
    expect(table).not_to_have_text(before, use_inner_text=True)
    expect(table).to_be_visible()


def test_what_is_selected_is_left_alone_until_it_is_let_go(visits, shop):
    page = visits.open(shop.url)
    page.evaluate("getSelection().selectAllChildren(document.getElementById('rates'))")
    before = arrived(page)
    shop.send(order())
    refreshed(page)
    assert arrived(page) == before
    page.evaluate("getSelection().removeAllRanges()")
    expect(page.locator("#rates > div").first).to_contain_text(f"{before + 1:,} in total")


def test_what_has_the_focus_keeps_it(visits, shop):
    page = visits.open(shop.url)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    link = page.locator("#routes a").first
    link.focus()
    link.evaluate("(one) => { one.isTheSame = true; }")
    grows(page, shop)
    refreshed(page)
    expect(link).to_be_focused()
    assert link.evaluate("(one) => one.isTheSame")


def test_whoever_is_not_reached_is_told_so_until_they_are(visits, shop):
    page = visits.open(shop.url, allowed=("failed:", "console:"))
    page.route("**/*", lambda route: route.abort())
    expect(page.locator("#status")).to_have_text(
        re.compile(r"oncebridge is unreachable since \d\d:\d\d:\d\d\.")
    )
    expect(page.locator("#live")).to_have_text("Unreachable")
    page.unroute("**/*")
    expect(page.locator("#live")).to_have_text("Live")
    expect(page.locator("#status")).to_be_empty()
    grows(page, shop)


def test_who_was_logged_out_meanwhile_is_told_and_not_asked_again(visits, shop):
    page = visits.open(shop.url, allowed=("answered: 401", "console:"))
    asked = []

    def refuse(route):
        asked.extend(name for name in route.request.headers if name == "x-live")
        route.fulfill(status=401)

    page.route("**/*", refuse)
    expect(page.locator("#status")).to_contain_text("no longer logged in")
    page.wait_for_timeout(2_500)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(200)
    assert len(asked) == 1


def test_times_are_those_of_whoever_looks(visits, shop):
    page = visits.open(shop.url)
    since = page.locator("#workers time").first
    utc = since.get_attribute("datetime")
    hours = int(utc[11:13])
    shown = since.inner_text()
    # In Berlin it is an hour or two later.
    assert int(shown[-8:-6]) in {(hours + 1) % 24, (hours + 2) % 24}
    assert since.get_attribute("title") == utc
    expect(page.locator("#workers time[data-ago]")).to_have_text(re.compile(r"^(now|\d+ s ago)$"))


def test_a_key_is_copied_whole(visits, shop):
    page = visits.open(f"{shop.url}/decisions", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("link", name=re.compile(r"Why\?")).first.click()
    button = page.locator(".copy").first
    wanted = button.get_attribute("data-copy")
    button.click()
    expect(button).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == wanted
